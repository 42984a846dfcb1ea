"""The memory tier of an LMCache server, as one rank of an engine sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from efficient_lmcache.connector import lmcache_server_adapter
from efficient_lmcache.connector.lmcache_server_adapter import ServerCapacity, ServerUse
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.eviction_window import EvictionWindow
from efficient_lmcache.telemetry.shared_probe import SHARED_TIER_PREFIX

#: A server's capacity changes while it grows into its memory, and seldom after.
CAPACITY_HOLDS_S = 60.0
_logger = logging.getLogger(__name__)


class RoomMade:
    """Tells the objects that were evicted to make room from those removed for other reasons.

    The server counts all removals in one counter (evictions, a cleared cache, explicit deletions), and in another one
    how often its watermark made it evict. Removals count while the second one moves. It moves after the first, so that
    a look in between sees removals alone: those wait for the next look.
    """

    def __init__(self) -> None:
        self._last: ServerUse | None = None
        self._unexplained = 0

    def since_last(self, use: ServerUse) -> int:
        """Objects evicted to make room since the last call; 0 at the first, and after the server was restarted."""
        last, self._last = self._last, use
        if last is None or use.removed_objects < last.removed_objects or use.evictions < last.evictions:
            self._unexplained = 0
            return 0
        removed = use.removed_objects - last.removed_objects
        if use.evictions == last.evictions:
            self._unexplained = removed
            return 0
        evicted, self._unexplained = removed + self._unexplained, 0
        return evicted


class ServerTier:
    """Asks a server for its tier.

    A server holds one object for every rank's piece of a chunk, and all engines of a model share them. Beta, and with
    it Eq. 5, are a rank's, so of what the server holds before it evicts, a `pieces`-th is C_H.

    Args:
        http_url: where the server answers HTTP.
        chunk_tokens: b.
        chunk_bytes: of one full chunk on one rank.
        pieces: objects of one chunk.
        window_s: an eviction counts for so long.
        on_evicted: called with the chunks that a probe finds evicted to make room.
    """

    def __init__(
        self,
        http_url: str,
        *,
        chunk_tokens: int,
        chunk_bytes: int,
        pieces: int,
        window_s: float,
        on_evicted: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._http_url = http_url
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._pieces = pieces
        self._window_s = window_s
        self._on_evicted = on_evicted
        self._capacity: ServerCapacity | None = None
        self._capacity_until_s = 0.0
        self.resume(None)

    def identify(self) -> str:
        """A name for the tier, the same for all engines for which a report would be the same.

        Raises:
            ServerError: the server cannot be asked.
        """
        server = lmcache_server_adapter.instance_id(self._http_url)
        return f"{SHARED_TIER_PREFIX}{server}/{self._pieces}x{self._chunk_bytes}"

    def resume(self, report: TierReport | None) -> None:
        """Start to watch where another one has left off, with `report` as its last word."""
        self._evictions = EvictionWindow(self._window_s)
        self._room_made = RoomMade()
        self._evicted_before = 0
        self._odd_objects = 0
        self._capacity_until_s = 0.0
        if report is not None:
            self._evictions.add(report.evicted_chunks, time.monotonic())
            self._evicted_before = report.evicted_chunks_total - report.evicted_chunks

    def probe(self) -> TierReport:
        """What the tier holds now; the publisher names and numbers it.

        Raises:
            ServerError: the server cannot be asked.
        """
        capacity = self._read_capacity()
        use = lmcache_server_adapter.server_use(self._http_url)
        evicted, self._odd_objects = divmod(self._room_made.since_last(use) + self._odd_objects, self._pieces)
        now_s = time.monotonic()
        self._evictions.add(evicted, now_s)
        if evicted:
            self._on_evicted(evicted)
        bytes_per_chunk = self._chunk_bytes * self._pieces
        return TierReport(
            engine_id="unnamed",
            sequence=0,
            chunk_tokens=self._chunk_tokens,
            chunk_bytes=self._chunk_bytes,
            registered_chunks=use.used_bytes // bytes_per_chunk,
            capacity_chunks=capacity.usable_bytes // bytes_per_chunk,
            evicted_chunks=self._evictions.total(now_s),
            evicted_chunks_total=self._evicted_before + self._evictions.grand_total,
            eviction_batch_chunks=capacity.batch_bytes // bytes_per_chunk,
            backing_tiers=capacity.l2_adapters,
        )

    def _read_capacity(self) -> ServerCapacity:
        now_s = time.monotonic()
        known = self._capacity
        if known is not None and now_s < self._capacity_until_s:
            return known
        capacity = self._capacity = lmcache_server_adapter.server_capacity(self._http_url)
        self._capacity_until_s = now_s + CAPACITY_HOLDS_S
        if capacity != known:
            _logger.info(
                "The LMCache server at %s holds %.3f GiB before it evicts, of %.3f GiB; ranks share it %d to a chunk",
                self._http_url,
                capacity.usable_bytes / 1024**3,
                capacity.total_bytes / 1024**3,
                self._pieces,
            )
            if capacity.l2_adapters:
                _logger.info(
                    "It has an L2 behind it, which keeps what it evicts: conditioned admission declines nothing"
                )
        return capacity
