"""Worker side: deduplicate before each copy, count the copies, probe the tier and publish what it says."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from efficient_lmcache.connector.metrics import ConnectorStats, StatsCollector
from efficient_lmcache.connector.options import ConnectorOptions
from efficient_lmcache.connector.telemetry import worker_sink
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.eviction_window import EvictionWindow
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.publisher import ReportPublisher

if TYPE_CHECKING:
    from efficient_lmcache.connector.lmcache_adapter import WorkerSide

_logger = logging.getLogger(__name__)


class WorkerOffload:
    """One rank's offloading, from registration of the KV caches to shutdown.

    Args:
        lmcache: this rank's engine.
        engine_id: the channel on which one rank publishes.
        options: `admission` other than `none` deduplicates, and heeds the decisions of a CPU tier and a remote tier;
            `telemetry_transport` other than `off` publishes.
        speaks_for_all: whether this is the rank that publishes, and hands its counts on.
    """

    def __init__(self, lmcache: WorkerSide, engine_id: str, options: ConnectorOptions, speaks_for_all: bool) -> None:
        self.stats = StatsCollector()
        self._lmcache = lmcache
        self._engine_id = engine_id
        self._speaks_for_all = speaks_for_all
        self._evictions = EvictionWindow(options.activity_window_s)
        self._dedup_failures = FailureLog(_logger, "Deduplicating a store")
        self._publisher: ReportPublisher | None = None
        if lmcache.is_layerwise:
            return
        lmcache.on_transfer(
            stored=lambda tokens: self.stats.count("stored_tokens", tokens),
            restored=lambda tokens: self.stats.count("restored_tokens", tokens),
        )
        if not lmcache.has_host_tier:
            return
        lmcache.on_eviction(self._evicted)
        if options.admission != "none":
            if lmcache.has_remote_tier:
                staging_bytes = int(options.remote_staging_gib * 1024**3)
                lmcache.decide_per_tier(self._is_absent, staging_bytes, self.stats.count)
            else:
                lmcache.filter_stores(keep=self._is_absent)
        sink = worker_sink(options, engine_id) if speaks_for_all else None
        if sink is not None:
            self._publisher = ReportPublisher(self.probe, sink, options.report_interval_s)

    def probe(self) -> TierReport:
        """What the tier holds now; the publisher numbers it."""
        return TierReport(
            engine_id=self._engine_id,
            sequence=0,
            chunk_tokens=self._lmcache.chunk_tokens,
            chunk_bytes=self._lmcache.chunk_bytes,
            registered_chunks=self._lmcache.registered_chunks(),
            capacity_chunks=self._lmcache.capacity_chunks(),
            evicted_chunks=self._evictions.total(time.monotonic()),
            evicted_chunks_total=self._evictions.grand_total,
        )

    def take_stats(self) -> ConnectorStats | None:
        """What was counted since the last call, if this rank speaks for all."""
        return self.stats.take() if self._speaks_for_all else None

    def requests_ended(self, request_ids: Iterable[str]) -> None:
        """Unpin what lookups of ended requests pinned, scheduled or not."""
        for request_id in request_ids:
            self._lmcache.release(request_id)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _evicted(self, chunks: int) -> None:
        self._evictions.add(chunks, time.monotonic())
        self.stats.count("evicted_chunks", chunks)

    def _is_absent(self, key: Hashable) -> bool:
        try:
            held = self._lmcache.contains(key)
        except Exception as error:
            self._dedup_failures.failed(error)
            return True
        self._dedup_failures.succeeded()
        if held:
            self.stats.count("deduplicated_chunks")
        return not held
