"""What a Redis that LMCache uses as its remote tier says of itself, as a tier report."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.eviction_window import EvictionWindow
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.redis_settings import TIMEOUT_S

if TYPE_CHECKING:
    from redis import Redis

_SCHEMES = ("redis://", "rediss://", "unix://")
_RESP = "resp://"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteChunks:
    """How an engine's chunks lie in a remote tier.

    Attributes:
        engine_id: whose reports these are.
        chunk_tokens: b.
        chunk_bytes: of a full chunk on one rank.
        ranks: that store a chunk each: the remote tier is theirs together, and C_H is per rank.
        capacity_bytes: of the whole tier, where it does not tell; None: nobody knows.
    """

    engine_id: str
    chunk_tokens: int
    chunk_bytes: int
    ranks: int
    capacity_bytes: int | None

    @property
    def capacity_bytes_per_rank(self) -> int | None:
        return None if self.capacity_bytes is None else self.capacity_bytes // self.ranks


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis as LMCache uses it.

    Attributes:
        url: for redis-py.
        keys_per_chunk: LMCache's connector for `redis://` keeps a chunk's KV under one key and its shape under another.
        login: the user's name and password where the URL has none.
    """

    url: str = field(repr=False)
    keys_per_chunk: int
    login: Mapping[str, str] = field(default_factory=dict, repr=False)


def redis_address(remote_url: str | None, resp_login: Mapping[str, str]) -> RedisAddress | None:
    """The Redis at LMCache's `remote_url`, if there is one; clusters and sentinels have no single memory to ask for.

    Args:
        resp_login: `username` and `password`, where LMCache has them, for the connector of `resp://`.
    """
    if remote_url is None:
        return None
    if remote_url.startswith(_SCHEMES):
        return RedisAddress(remote_url, keys_per_chunk=2)
    if remote_url.startswith(_RESP):
        login = {name: value for name, value in resp_login.items() if value}
        return RedisAddress("redis://" + remote_url[len(_RESP) :], 1, login)
    return None


class RedisTierReader:
    """Asks Redis for its memory and evictions each time it is read. For one thread; a `poller.Reader`.

    Capacity is `maxmemory`, occupancy `used_memory` over it, whatever else Redis holds. Its `evicted_keys` counts
    evictions for room only. What it evicted before the first reading counts for nothing.
    """

    def __init__(self, address: RedisAddress, chunks: RemoteChunks, window_s: float) -> None:
        self._address = address
        self._chunks = chunks
        self._client: Redis | None = None
        self._evicted_keys = EvictionWindow(window_s)
        self._evicted_keys_seen: int | None = None
        self._sequence = 0
        self._report: TierReport | None = None
        self._failures = FailureLog(_logger, "Asking the remote tier how full it is")

    def latest(self, now_s: float) -> TierReport | None:
        """The newest report; an old one while Redis does not answer, None where nobody knows the capacity."""
        try:
            self._report = self._ask(now_s)
        except Exception as error:
            self._failures.failed(error)
        else:
            self._failures.succeeded()
        return self._report

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _ask(self, now_s: float) -> TierReport | None:
        pipeline = self._connected().pipeline(transaction=False)
        pipeline.info("memory")
        pipeline.info("stats")
        memory, stats = pipeline.execute()
        self._count_evictions(int(stats["evicted_keys"]), now_s)
        chunks = self._chunks
        capacity_bytes = int(memory["maxmemory"]) or chunks.capacity_bytes
        if not capacity_bytes:
            return None
        self._sequence += 1
        bytes_in_ranks = chunks.ranks * chunks.chunk_bytes
        return TierReport(
            engine_id=chunks.engine_id,
            sequence=self._sequence,
            chunk_tokens=chunks.chunk_tokens,
            chunk_bytes=chunks.chunk_bytes,
            registered_chunks=int(memory["used_memory"]) // bytes_in_ranks,
            capacity_chunks=capacity_bytes // bytes_in_ranks,
            evicted_chunks=self._in_chunks(self._evicted_keys.total(now_s)),
            evicted_chunks_total=self._in_chunks(self._evicted_keys.grand_total),
            received_s=now_s,
        )

    def _count_evictions(self, evicted_keys: int, now_s: float) -> None:
        seen, self._evicted_keys_seen = self._evicted_keys_seen, evicted_keys
        if seen is not None:
            # It counts from zero again after a restart, and when told so.
            self._evicted_keys.add(evicted_keys - seen if evicted_keys >= seen else evicted_keys, now_s)

    def _in_chunks(self, keys: int) -> int:
        return -(-keys // (self._address.keys_per_chunk * self._chunks.ranks))

    def _connected(self) -> Redis:
        if self._client is None:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
            options |= self._address.login
            self._client = redis.Redis.from_url(self._address.url, retry=Retry(NoBackoff(), 0), **options)
        return self._client
