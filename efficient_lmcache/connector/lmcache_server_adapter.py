"""Every LMCache internal that the connector reads or sets in server mode (LMCache 0.5.6, multiprocess connector).

`tests/integration/test_upstream_server.py` guards each of them, so that a change upstream fails there, not in service.
"""

from __future__ import annotations

import json
import re
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from vllm.v1.request import Request

#: Where `lmcache server` answers HTTP unless told otherwise (`--http-port`).
DEFAULT_HTTP_PORT = 8080
HTTP_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 16 * 1024**2
#: Directly: a proxy of the environment is not meant for the server beside the engine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(OSError):
    """The server's HTTP side cannot be reached, or does not say what it should. The text names the address."""


class Transfers(NamedTuple):
    """What one step hands to the workers, in tokens.

    Attributes:
        stored_tokens: sent to the server, which may hold some of them already, or have no room.
        restored_tokens: fetched from it, without those that vLLM has.
    """

    stored_tokens: int
    restored_tokens: int


class ServerSide:
    """What the scheduler's connector reads and sets of LMCache's multiprocess connector."""

    def __init__(self, connector: LMCacheMPConnector) -> None:
        self._connector = connector
        self._adapter = connector.scheduler_adapter

    @property
    def chunk_tokens(self) -> int:
        """As the server has it."""
        return int(self._adapter.lmcache_tokens_per_chunk)

    @property
    def tokens_per_block(self) -> list[int]:
        """Of each of vLLM's groups of KV caches; 0 for one that is not cached."""
        return list(self._connector._group_tokens_per_block)

    @property
    def pieces(self) -> int:
        """Into how many objects a server splits a chunk: one for every rank whose KV differs from the others'."""
        return int(self._adapter.parallel_strategy.kv_world_size)

    @property
    def url(self) -> str:
        """Of several servers, which hold a share of the ranks each, the first speaks for all."""
        return str(self._adapter._server_urls[0])

    @property
    def stores_when_evicted(self) -> bool:
        """`lmcache.mp.lazy_offload`: blocks are stored when vLLM is about to evict them, not when they are computed."""
        return bool(self._connector.lazy_offload)

    def host_match_tokens(self, request_id: str) -> int:
        """h of a request whose lookup is resolved."""
        return int(self._connector.request_trackers[request_id].num_lmcache_hit_tokens)

    def decline(self, request: Request) -> None:
        """Store nothing more of a request that has been looked up.

        By LMCache's own limit of what may be stored of a request, on its tracker: as a request's parameter it would
        come too late, and become part of what is sent along with keys. A preempted request gets a new tracker.
        """
        self._connector.request_trackers[request.request_id].max_offload_tokens = 0

    def restores_nothing(self, request_id: str) -> None:
        """vLLM computes what LMCache found of a request that was just allocated.

        LMCache takes what it found for computed, and would store the rest of the last block with what the GPU happened
        to hold there, wherever a step of a chunked prefill ends inside a block.
        """
        tracker = self._connector.request_trackers[request_id]
        tracker.num_lmcache_hit_tokens = min(tracker.num_lmcache_hit_tokens, tracker.num_vllm_hit_tokens)

    def release_unscheduled(self, request_id: str) -> None:
        """Unlock what was found for a request that ends between its lookup and its scheduling.

        LMCache leaves it locked for five minutes (the server's `--l1-read-ttl-seconds`), and what is locked is not
        evicted. The server releases what this lookup has locked, and nothing where it is not done yet.
        """
        tracker = self._connector.request_trackers.get(request_id)
        if tracker is None or tracker.state.name != "PREFETCHING" or request_id not in self._adapter._pending_lookups:
            return
        token_ids = tracker.get_token_ids()
        self._adapter.free_lookup_locks(
            token_ids=token_ids,
            start=0,
            end=len(token_ids) // self.chunk_tokens * self.chunk_tokens,
            request_id=request_id,
            cache_salt=tracker.cache_salt,
            request_configs=tracker.request_configs,
        )

    @staticmethod
    def transfers(metadata: Any) -> Transfers:
        """What `build_connector_meta` tells the workers to do."""
        stored = restored = 0
        for request in metadata.requests:
            operation = request.op
            if request.direction == "STORE":
                stored += operation.end - operation.start
            else:
                restored += operation.end - operation.start - operation.skip_first_n_tokens
        return Transfers(stored, restored)


def prom_metrics(*arguments: Any) -> Any:
    """The metrics of LMCache's multiprocess connector; arguments as of vLLM's `build_prom_metrics`."""
    from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPPromMetrics

    return LMCacheMPPromMetrics(*arguments)


class ServerCapacity(NamedTuple):
    """The size of a server's memory tier (L1), which all its engines share.

    Attributes:
        total_bytes: what there is to allocate from.
        usable_bytes: what it holds before it evicts: its eviction starts at a watermark, on a thread of its own.
        batch_bytes: what it evicts of them at a time.
        l2_adapters: stores behind it (files, object stores, …), which get what it gets and keep it longer.
    """

    total_bytes: int
    usable_bytes: int
    batch_bytes: int
    l2_adapters: int


class ServerUse(NamedTuple):
    """What a server's memory tier holds, and what has left it since the server's start.

    Attributes:
        used_bytes: of objects, those that are being written included.
        removed_objects: for whatever reason.
        evictions: how often the watermark was found exceeded and objects were evicted.
    """

    used_bytes: int
    removed_objects: int
    evictions: int


def default_http_url(server_url: str) -> str:
    """The HTTP address of a server whose message queue is at `server_url` (`tcp://host:port`)."""
    host = urlsplit(server_url if "://" in server_url else f"tcp://{server_url}").hostname or "localhost"
    return f"http://{f'[{host}]' if ':' in host else host}:{DEFAULT_HTTP_PORT}"


def instance_id(http_url: str) -> str:
    """What tells one start of one server from all others, unless its operator named it.

    Raises:
        ServerError: see there.
    """
    answer = _json(f"{http_url}/config")
    try:
        return str(answer["mp"]["instance_id"])
    except (KeyError, TypeError):
        raise ServerError(f"{http_url}/config does not say mp.instance_id") from None


def server_capacity(http_url: str) -> ServerCapacity:
    """How large the server's tier is now; it may allocate its memory little by little.

    Not for every probe: to answer, the server walks through all its objects with its tier locked, and checks its
    allocator, of which it logs five lines.

    Raises:
        ServerError: see there.
    """
    answer = _json(f"{http_url}/status")
    try:
        tiers, evictors = (answer["storage_manager"][name] for name in ("l1_managers", "l1_eviction_controllers"))
        usable_bytes = {
            tag: int(tier["memory_total_bytes"] * evictors[tag]["trigger_watermark"]) for tag, tier in tiers.items()
        }
        return ServerCapacity(
            total_bytes=sum(int(tier["memory_total_bytes"]) for tier in tiers.values()),
            usable_bytes=sum(usable_bytes.values()),
            batch_bytes=sum(int(usable_bytes[tag] * evictors[tag]["eviction_ratio"]) for tag in tiers),
            l2_adapters=int(answer["storage_manager"]["num_l2_adapters"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"{http_url}/status lacks {error}") from None


def server_use(http_url: str) -> ServerUse:
    """What the server's tier holds now.

    Raises:
        ServerError: see there; also where the server does not count (`--disable-metrics`, `--otlp-endpoint`).
    """
    text = _answer(f"{http_url}/metrics").decode(errors="replace")
    # Counts every second, so that without it nothing is counted. The others show once they have counted.
    if "lmcache_mp_l1_eviction_loop_ticks" not in text:
        raise ServerError(f"{http_url}/metrics counts no evictions; allowed: a server that serves its own metrics")
    return ServerUse(
        used_bytes=_summed(text, "lmcache_mp_l1_memory_usage_bytes"),
        removed_objects=_summed(text, "lmcache_mp_l1_evicted_chunks_total"),
        evictions=_summed(text, "lmcache_mp_l1_eviction_loop_triggered_total"),
    )


def _summed(text: str, metric: str) -> int:
    """Over its labels; 0 where it does not show. Raises ServerError."""
    try:
        return int(sum(map(float, re.findall(rf"^{metric}(?:{{.*}})? (\S+)", text, re.MULTILINE))))
    except (ValueError, OverflowError):
        raise ServerError(f"{metric} is no number") from None


def _json(url: str) -> Any:
    try:
        return json.loads(_answer(url))
    except ValueError:
        raise ServerError(f"{url} does not answer with JSON") from None


def _answer(url: str) -> bytes:
    try:
        with _opener.open(url, timeout=HTTP_TIMEOUT_S) as response:
            return bytes(response.read(_MAX_ANSWER_BYTES))
    except OSError as error:  # urllib's own errors are of this kind
        raise ServerError(f"{url}: {error}") from None
