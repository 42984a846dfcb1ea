"""The connector's telemetry, put together as the options say."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from efficient_lmcache.connector.admission import HasReport, NoReports
from efficient_lmcache.connector.options import ConnectorOptions
from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.telemetry import redis_keys
from efficient_lmcache.telemetry.cluster import ClusterView, OwnReports
from efficient_lmcache.telemetry.local import LocalSink, LocalSource
from efficient_lmcache.telemetry.poller import NewestOf, ReportPoller
from efficient_lmcache.telemetry.pool import Lookup, Observer, PoolTelemetry
from efficient_lmcache.telemetry.pool_now import PoolNow
from efficient_lmcache.telemetry.reader import ReportReader
from efficient_lmcache.telemetry.redis_feed import RedisFeed
from efficient_lmcache.telemetry.redis_outbox import BothSinks, RedisOutbox, RedisSink
from efficient_lmcache.telemetry.shared_channels import DeploymentChannel, HostChannel
from efficient_lmcache.telemetry.shared_probe import SharedChannel, SharedProbe, SharedTier
from efficient_lmcache.telemetry.transport import ReportSink

if TYPE_CHECKING:
    from efficient_lmcache.connector.metrics import StatsCollector

#: An observation describes a minute where a report describes a moment, so it may come, and age, so many times slower.
#: Every engine hears every other: at the reports' pace, 64 of them would cost each almost 1 % of a core.
OBSERVATION_PACE = 3
#: At least: of a shorter window than the default, a report interval is no small part.
OBSERVATIONS_PER_WINDOW = 20
#: An engine that probes for all may miss so many probes before another one takes over.
PROBES_PER_LEASE = 3


def worker_sink(options: ConnectorOptions, engine_id: str) -> ReportSink | None:
    """Where worker rank 0 publishes; None for nowhere."""
    if options.telemetry_transport == "off":
        return None
    local = LocalSink(engine_id)
    if options.telemetry_transport == "local":
        return local
    deployment = options.telemetry_deployment
    outbox = RedisOutbox(options.redis_settings, deployment)
    return BothSinks(local, RedisSink(outbox, redis_keys.tier_key(deployment, engine_id, rank=0)))


class SchedulerTelemetry:
    """What the scheduler's process knows of its tier and its pool.

    Attributes:
        reports: has the newest tier report.
        lookups: takes the scheduler's lookups for the pool; None where nobody shares one.
        pool: A and N of the pool at a lookup; None where nobody shares one.

    Args:
        shared_tier: probed by one of the engines that share it; None where the engine has a tier of its own, of which
            its worker reports.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        engine_id: str,
        stats: StatsCollector,
        shared_tier: SharedTier | None = None,
    ) -> None:
        self.reports: HasReport = NoReports()
        self.lookups: deque[Lookup] | None = None
        self.pool: PoolNow | None = None
        self._stats = stats
        self._feed: RedisFeed | None = None
        self._pool: PoolTelemetry | None = None
        self._poller: ReportPoller | SharedProbe | None = None
        if options.telemetry_transport == "off":
            return
        if shared_tier is not None:
            self.reports = self._poller = self._share(shared_tier, options, engine_id)
            return
        local = ReportReader(LocalSource(engine_id), engine_id)
        if options.telemetry_transport == "local":
            self.reports = self._poller = ReportPoller(local, options.report_read_interval_s)
            return
        view = self._join_pool(
            options, engine_id, [redis_keys.tier_key(options.telemetry_deployment, engine_id, rank=0)]
        )
        either = NewestOf([local, OwnReports(view, engine_id)], options.report_max_age_s)
        self.reports = self._poller = ReportPoller(either, options.report_read_interval_s)

    @property
    def pool_estimate(self) -> PoolEstimate | None:
        """A and N of all engines that are heard; None where nobody shares a pool."""
        return self._pool.estimate if self._pool is not None else None

    def _share(self, tier: SharedTier, options: ConnectorOptions, engine_id: str) -> SharedProbe:
        view = None
        if options.telemetry_transport == "redis":
            # Of all tiers: this one's name is not known yet.
            view = self._join_pool(options, engine_id, redis_keys.all_of(options.telemetry_deployment))
        return SharedProbe(
            tier,
            lambda name: _shared_channel(options, view, name),
            interval_s=options.report_interval_s,
            max_age_s=options.report_max_age_s,
        )

    def _join_pool(self, options: ConnectorOptions, engine_id: str, tiers: list[str]) -> ClusterView:
        settings, deployment = options.redis_settings, options.telemetry_deployment
        view = ClusterView(on_bad_message=lambda: self._stats.count("telemetry_bad_messages"))
        keys = sorted({*tiers, redis_keys.all_pools(deployment)})
        self._feed = RedisFeed(settings, deployment, keys, view.receive)
        observer = Observer(engine_id, options.activity_window_s, options.prompt_window_lookups)
        self.lookups = observer.lookups
        self._pool = PoolTelemetry(
            observer,
            engine_id,
            deployment,
            view,
            RedisOutbox(settings, deployment),
            interval_s=min(
                OBSERVATION_PACE * options.report_interval_s, options.activity_window_s / OBSERVATIONS_PER_WINDOW
            ),
            max_age_s=OBSERVATION_PACE * options.report_max_age_s,
            on_estimate=self._show,
        )
        self.pool = PoolNow(self._pool)
        return view

    def _show(self, estimate: PoolEstimate) -> None:
        assert self._feed is not None
        self._stats.set_gauges(
            {
                "pool_active_tasks": estimate.active_pool,
                "pool_mean_prompt_tokens": estimate.mean_prompt_tokens,
                "pool_engines": estimate.engines,
                "telemetry_redis_up": float(self._feed.connected),
            }
        )

    def close(self) -> None:
        for part in (self._poller, self._pool, self._feed):
            if part is not None:
                part.close()


def _shared_channel(options: ConnectorOptions, view: ClusterView | None, name: str) -> SharedChannel:
    if view is None:
        return HostChannel(name)
    return DeploymentChannel(
        options.redis_settings,
        options.telemetry_deployment,
        name,
        view,
        lease_s=PROBES_PER_LEASE * options.report_interval_s,
        max_age_s=options.report_max_age_s,
    )
