"""A fresh `lmcache server` with an empty tier, for one run (LMCache 0.5.6): its command line and environment.

The server evicts in the background: once a second, when its L1 is filled to the watermark, it drops the least recently
used share of its chunks. What its engines can rely on is therefore the L1 up to the watermark; until the next second
it may hold more, and once the L1 is full it drops what it is asked to store. `host_gib` is what they can rely on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from efficient_lmcache.replay.server import LMCACHE_QUIET, LMCachePorts, answers_http, without_lmcache

#: LMCache's own defaults, fixed here because the tier's size depends on them.
WATERMARK = 0.8
_EVICTED_SHARE = 0.2


def l1_gib(host_gib: float, ranks: int) -> float:
    """The L1 in which all ranks' `host_gib` stay below the watermark, in GiB."""
    return host_gib * ranks / WATERMARK


def lmcache_command(host_gib: float, ranks: int, chunk_tokens: int, ports: LMCachePorts) -> list[str]:
    """The command line that serves on 127.0.0.1.

    Args:
        host_gib: tier per rank that is usable, see above.
    """
    args = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(ports.engines)]
    args += ["--http-host", "127.0.0.1", "--http-port", str(ports.http), "--chunk-size", str(chunk_tokens)]
    # Allocated lazily, the tier would be rounded up to 64 MiB.
    args += ["--l1-size-gb", repr(l1_gib(host_gib, ranks)), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    args += ["--eviction-trigger-watermark", str(WATERMARK), "--eviction-ratio", str(_EVICTED_SHARE)]
    # CPU workers move their KV themselves, GPU workers leave it to the server.
    return [*args, "--supported-transfer-mode", "auto"]


def lmcache_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    return {**without_lmcache(inherited), "PYTHONHASHSEED": "0", **LMCACHE_QUIET}


def lmcache_is_ready(http_port: int) -> bool:
    return answers_http(http_port, "/healthcheck")
