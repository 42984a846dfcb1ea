"""Scheduler side: the remote tier decides by the same law as the CPU tier, with a capacity and a pool of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from efficient_lmcache.connector.admission import HasReport, NoReports
from efficient_lmcache.core.admission import ADMISSIONS, AdmissionParameters, AdmissionPolicy, Decision, RequestFacts
from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.telemetry.poller import ReportPoller
from efficient_lmcache.telemetry.redis_tier import RedisTierReader, RemoteChunks

if TYPE_CHECKING:
    from efficient_lmcache.connector.lmcache_adapter import SchedulerSide
    from efficient_lmcache.connector.options import ConnectorOptions


class RemoteAdmission:
    """May a request's new KV enter the remote tier?

    Args:
        policy: decides.
        reports: has the remote tier's newest report.
        pool: A and N of all engines that share the remote tier; None while only this engine is known.
        cpu_match_tokens: of a request that was just looked up; None where LMCache does not tell.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        reports: HasReport,
        pool: Callable[[], PoolEstimate | None],
        cpu_match_tokens: Callable[[str], int | None],
    ) -> None:
        self._policy = policy
        self._reports = reports
        self._pool = pool
        self._cpu_match_tokens = cpu_match_tokens

    def facts_of_cpu_tier(self, request_id: str, request: RequestFacts) -> RequestFacts:
        """The CPU tier's own host match: what is restored from the remote tier is written to the CPU tier as well."""
        tokens = self._cpu_match_tokens(request_id)
        return request if tokens is None else request._replace(host_match_tokens=tokens)

    def decide(self, request: RequestFacts, now_s: float) -> Decision:
        """The request's host match is that of all tiers: only what lies beyond it is written to the remote tier."""
        return self._policy.decide(request, self._reports.report, now_s, self._pool())

    def close(self) -> None:
        if isinstance(self._reports, ReportPoller):
            self._reports.close()


def start_remote_admission(
    options: ConnectorOptions,
    lmcache: SchedulerSide,
    host_tier: AdmissionParameters,
    engine_id: str,
    pool: Callable[[], PoolEstimate | None],
) -> RemoteAdmission | None:
    """None without a remote tier.

    Args:
        host_tier: the CPU tier's parameters; all but the capacity are the remote tier's too.
        engine_id: whose reports these are, in records.
    """
    if not lmcache.has_remote_tier:
        return None
    gib = options.remote_capacity_gib
    chunks = RemoteChunks(
        engine_id=engine_id,
        chunk_tokens=host_tier.chunk_tokens,
        chunk_bytes=host_tier.chunk_tokens * host_tier.bytes_per_token,
        ranks=lmcache.ranks_storing,
        capacity_bytes=None if gib is None else int(gib * 1024**3),
    )
    if options.admission != "none":
        lmcache.ask_for_cpu_matches()
    parameters = replace(host_tier, configured_capacity_bytes=chunks.capacity_bytes_per_rank)
    policy = ADMISSIONS[options.admission](parameters)
    return RemoteAdmission(policy, _reports(options, lmcache, chunks), pool, lmcache.cpu_match_tokens)


def _reports(options: ConnectorOptions, lmcache: SchedulerSide, chunks: RemoteChunks) -> HasReport:
    address = lmcache.remote_redis
    if address is None or options.telemetry_transport == "off" or not chunks.chunk_bytes:
        return NoReports()
    return ReportPoller(RedisTierReader(address, chunks, options.activity_window_s), options.report_interval_s)
