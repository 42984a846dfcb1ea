"""A real `lmcache server` on the CPU, for tests that fill, clear and kill it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

CHUNK_TOKENS = 256


class LMCacheServer:
    """Its L1 is allocated at once, so that it is as large as it says.

    Args:
        directory: of its log.
        l1_mib: L1, of which it fills four fifths before it evicts.
    """

    def __init__(self, directory: Path, l1_mib: float, *arguments: str) -> None:
        self.port, self.http_port = _free_port(), _free_port()
        self._log = directory / "lmcache-server.log"
        self._command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
        self._command += ["--port", str(self.port), "--http-port", str(self.http_port), "--eviction-policy", "LRU"]
        self._command += ["--l1-size-gb", str(l1_mib / 1024), "--no-l1-use-lazy", "--chunk-size", str(CHUNK_TOKENS)]
        self._command += ["--supported-transfer-mode", "auto", *arguments]
        self.process = self._started()

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def transfer_options(self) -> dict[str, Any]:
        """What `kv_connector_extra_config` says of it."""
        return {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.port,
            "lmcache.mp.heartbeat_interval": 3.0,
            "efficient.mode": "server",
            "efficient.server.http_url": self.http_url,
        }

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.http_url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
        with self._log.open("ab") as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=log, env={**os.environ, **quiet})
        deadline_s = time.monotonic() + 300
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                self.get("/healthcheck")
                return process
            except OSError:
                time.sleep(0.1)
        process.kill()
        pytest.fail(f"lmcache server did not start:\n{self._log.read_text()[-4000:]}")


def tier(http_url: str) -> dict[str, int]:
    """What the server itself says of its L1."""
    with urllib.request.urlopen(f"{http_url}/status", timeout=10) as answer:
        status = json.load(answer)["storage_manager"]
    with urllib.request.urlopen(f"{http_url}/metrics", timeout=10) as answer:
        evicted = re.findall(r"^lmcache_mp_l1_evicted_chunks_total\S* (\S+)", answer.read().decode(), re.MULTILINE)
    l1 = status["l1_manager"]
    return {
        "objects": l1["total_object_count"],
        "used_bytes": l1["memory_used_bytes"],
        "total_bytes": l1["memory_total_bytes"],
        "removed": int(sum(map(float, evicted))),
        "locked": l1["write_locked_count"] + l1["read_locked_count"],
    }


def clear(http_url: str) -> None:
    """All of it: what an aborted request had looked up may stay locked for minutes, if the server was busy then."""
    request = urllib.request.Request(f"{http_url}/cache/clear", data=b'{"force": true}', method="POST")
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request, timeout=10).close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
