"""The channels of a shared tier: among the engines of a host, and of a deployment."""

from __future__ import annotations

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import redis_keys
from efficient_lmcache.telemetry.cluster import ClusterView, OwnReports
from efficient_lmcache.telemetry.local import LocalSink, LocalSource
from efficient_lmcache.telemetry.poller import NewestOf
from efficient_lmcache.telemetry.reader import ReportReader
from efficient_lmcache.telemetry.redis_lease import RedisLease
from efficient_lmcache.telemetry.redis_outbox import RedisOutbox, RedisSink
from efficient_lmcache.telemetry.redis_settings import RedisFailure, RedisSettings


class HostChannel:
    """Among engines of one user that see the same memory of the host: who has locked the local transport's channel."""

    def __init__(self, name: str) -> None:
        self._sink = LocalSink(name)
        self._reader = ReportReader(LocalSource(name), name)

    def claim(self) -> bool:
        return self._sink.claim()

    def publish(self, payload: bytes) -> None:
        self._sink.publish(payload)

    def latest(self, now_s: float) -> TierReport | None:
        return self._reader.latest(now_s)

    def close(self) -> None:
        self._reader.close()
        self._sink.close()


class DeploymentChannel:
    """Among all engines of a deployment: of the hosts' (or containers') first engines, the one with a lease in Redis.

    Without Redis each host has one engine that probes, as with `HostChannel`.

    Args:
        view: hears all tiers of the deployment. Someone else's to close.
        lease_s: an engine that is gone keeps the lease for so long.
        max_age_s: of a report that one with a lower sequence must not outrank.
    """

    def __init__(
        self,
        settings: RedisSettings,
        deployment: str,
        name: str,
        view: ClusterView,
        *,
        lease_s: float,
        max_age_s: float,
    ) -> None:
        self._host = HostChannel(name)
        self._lease = RedisLease(settings, redis_keys.probe_key(deployment, name), lease_s)
        self._sink = RedisSink(RedisOutbox(settings, deployment), redis_keys.tier_key(deployment, name, rank=0))
        self._newest = NewestOf([self._host, OwnReports(view, name)], max_age_s)

    def claim(self) -> bool:
        if not self._host.claim():
            return False
        try:
            return self._lease.hold()
        except RedisFailure:  # which who publishes and who listens say already
            return True

    def publish(self, payload: bytes) -> None:
        self._sink.publish(payload)
        self._host.publish(payload)

    def latest(self, now_s: float) -> TierReport | None:
        return self._newest.latest(now_s)

    def close(self) -> None:
        try:
            self._host.close()
        finally:
            self._sink.close()
            self._lease.close()
