"""Write admission: may a request's new KV enter the host tier? (paper, Eq. 6 and 10, Table 7).

    request     what a request's first resolved lookup tells: its task, its prompt, its host match
    extension   at most kappa new full chunks: it extends a prefix that the tier holds
    refill      more than kappa: the tier has lost this context, or never had it
    pressure    the working set exceeds the tier, and the tier is full and evicting

A policy is asked once per request and answers with a `Decision` that carries every factor it weighed. Policies keep
no clock and do no I/O; the connector, the simulator and the analyses run these same objects.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.core.workingset import WorkingSetEstimate, WorkingSetEstimator, reuse_working_set_bytes


class Outcome(str, Enum):
    """Why a request's new KV is saved or not."""

    NO_PRESSURE = "no_pressure"  # saved: nothing says that the pool thrashes the tier
    EXTENSION = "extension"  # saved: under pressure, but it extends a resident prefix
    REFILL = "refill"  # declined: under pressure, and it would re-store evicted context


_NO_PRESSURE, _EXTENSION, _REFILL = Outcome
# Makes a named tuple of its values, without the function that calling its class runs.
_new = tuple.__new__


class RequestFacts(NamedTuple):
    """A request at its first resolved lookup.

    Attributes:
        task: identifies the agent task the request belongs to.
        prompt_tokens: n.
        host_match_tokens: h, tokens of the consecutive resident chunks from the first one.
    """

    task: Hashable
    prompt_tokens: int
    host_match_tokens: int


@dataclass(frozen=True, slots=True)
class AdmissionParameters:
    """Table 7, and the tier they are applied to.

    Attributes:
        chunk_tokens: b.
        bytes_per_token: beta per rank.
        configured_capacity_bytes: C_H per rank as configured; a tier report's own takes its place. None: nobody
            knows, and nothing says that the pool thrashes the tier until a report tells its capacity.
        write_threshold_chunks: kappa.
        occupancy_threshold: theta.
        report_max_age_s: a report is fresh for so long after its receipt.
        activity_window_s: a task is active for so long after a first lookup.
        prompt_window_lookups: first lookups whose prompts enter the mean.
    """

    chunk_tokens: int
    bytes_per_token: int
    configured_capacity_bytes: int | None
    write_threshold_chunks: int = 8
    occupancy_threshold: float = 0.95
    report_max_age_s: float = 5.0
    activity_window_s: float = 60.0
    prompt_window_lookups: int = 256

    def __post_init__(self) -> None:
        allowed = {
            "chunk_tokens": self.chunk_tokens >= 1,
            "bytes_per_token": self.bytes_per_token >= 0,
            "configured_capacity_bytes": (self.configured_capacity_bytes or 0) >= 0,
            "write_threshold_chunks": self.write_threshold_chunks >= 0,
            "occupancy_threshold": 0.0 <= self.occupancy_threshold <= 1.0,
            "report_max_age_s": self.report_max_age_s > 0.0,
        }
        for name, holds in allowed.items():
            if not holds:
                raise ValueError(f"AdmissionParameters.{name} is out of range: {getattr(self, name)}")


class Decision(NamedTuple):
    """What was decided, and every factor of it.

    Attributes:
        save: whether the request's new KV enters the tier; holds for the rest of the request.
        outcome: why.
        pressure: p of Eq. 6 as the policy sees it (0 for `none`, 1 for `fixed`).
        request: the facts decided on.
        new_full_chunks: u = floor(n / b) - floor(h / b).
        estimate: A, N and the working set (Eq. 5), of the pool where the tier is shared.
        estimate_above: the first factor: working set > C_H; false of a tier with another one behind it.
        full_and_evicting: the second factor; None without a fresh report.
        report_age_s: since the latest report's receipt; None without any.
        tier_report: the latest report, however old; None without any.
        parameters: what the policy was set to.
    """

    save: bool
    outcome: Outcome
    pressure: bool
    request: RequestFacts
    new_full_chunks: int
    estimate: WorkingSetEstimate
    estimate_above: bool
    full_and_evicting: bool | None
    report_age_s: float | None
    tier_report: TierReport | None
    parameters: AdmissionParameters

    @property
    def write_threshold_chunks(self) -> int:
        """kappa."""
        return self.parameters.write_threshold_chunks

    @property
    def capacity_bytes(self) -> int | None:
        """C_H per rank: the tier's own, or as configured while no report says it; None while nobody knows."""
        return self.tier_report.capacity_bytes if self.tier_report else self.parameters.configured_capacity_bytes

    @property
    def occupancy(self) -> float | None:
        """Registered chunks over K_H in the latest report; None without any."""
        return self.tier_report.occupancy if self.tier_report else None

    @property
    def evicted_chunks(self) -> int | None:
        """Chunks evicted to make room in the latest report's window; None without any."""
        return self.tier_report.evicted_chunks if self.tier_report else None

    @property
    def report_fresh(self) -> bool:
        """There is a report, and its age is within the allowed one."""
        return self.report_age_s is not None and self.report_age_s <= self.parameters.report_max_age_s

    def record(self) -> dict[str, Any]:
        """Every factor by its name, flat but for the estimate, in types that JSON and msgpack know."""
        report = self.tier_report
        of_servers = {name: getattr(report, name, 0) for name in ("eviction_batch_chunks", "backing_tiers")}
        return {
            "save": self.save,
            "outcome": self.outcome.value,
            "pressure": self.pressure,
            **self.request._asdict(),
            "new_full_chunks": self.new_full_chunks,
            "write_threshold_chunks": self.write_threshold_chunks,
            "estimate": {**self.estimate._asdict(), "bytes": self.estimate.bytes},
            "capacity_bytes": self.capacity_bytes,
            "estimate_above": self.estimate_above,
            "full_and_evicting": self.full_and_evicting,
            "occupancy": self.occupancy,
            "evicted_chunks": self.evicted_chunks,
            **{name: count for name, count in of_servers.items() if count},
            "report_age_s": self.report_age_s,
            "report_fresh": self.report_fresh,
        }


class AdmissionPolicy(Protocol):
    """Decides once per request, at its first resolved lookup."""

    @property
    def name(self) -> str:
        """The admission as options and records name it."""
        ...

    def decide(
        self, request: RequestFacts, tier_report: TierReport | None, now_s: float, pool: PoolEstimate | None = None
    ) -> Decision:
        """Observe the request, then decide. `now_s` is on the clock of `TierReport.received_s`.

        Args:
            pool: A and N of all engines that share the tier; this engine's own count while it alone sees more tasks.
        """
        ...


class _WorkingSetAdmission:
    """What the three admissions share: observe, weigh every factor, then save(r) = not (p and u > kappa) (Eq. 6).

    The pressure signal p is the subclass's.
    """

    name: str

    def __init__(self, parameters: AdmissionParameters) -> None:
        self.parameters = parameters
        self.estimator = WorkingSetEstimator(
            parameters.bytes_per_token, parameters.activity_window_s, parameters.prompt_window_lookups
        )
        self._full_and_evicting = False
        self._read(None)

    def decide(
        self, request: RequestFacts, tier_report: TierReport | None, now_s: float, pool: PoolEstimate | None = None
    ) -> Decision:
        # Called between a lookup and its answer, when the processor's caches hold neither this code nor its data: what
        # counts is how many functions run and objects are touched, and whatever the interpreter does rarely is slow.
        parameters = self.parameters
        task, prompt_tokens, host_match_tokens = request
        estimate = self.estimator.observe(task, prompt_tokens, now_s)
        if pool is not None and pool.active_pool >= estimate.active_pool:
            estimate = WorkingSetEstimate(pool.active_pool, pool.mean_prompt_tokens, parameters.bytes_per_token)
        if tier_report is not self._tier_report:
            self._read(tier_report)
        capacity_bytes = self._capacity_bytes
        estimate_above = False
        if capacity_bytes is not None:
            active_pool, mean_prompt_tokens, bytes_per_token = estimate
            working_set_bytes = reuse_working_set_bytes(active_pool, mean_prompt_tokens, bytes_per_token)
            estimate_above = working_set_bytes > capacity_bytes
        age_s = full_and_evicting = None
        if tier_report is not None:
            age_s = now_s - tier_report.received_s
            if age_s <= parameters.report_max_age_s:
                full_and_evicting = self._full_and_evicting
        chunk_tokens = parameters.chunk_tokens
        new_full_chunks = prompt_tokens // chunk_tokens - host_match_tokens // chunk_tokens
        pressure = self._pressure(estimate_above, full_and_evicting)
        outcome = _NO_PRESSURE
        if pressure:
            outcome = _REFILL if new_full_chunks > parameters.write_threshold_chunks else _EXTENSION
        return _new(
            Decision,
            (
                outcome is not _REFILL,
                outcome,
                pressure,
                request,
                new_full_chunks,
                estimate,
                estimate_above,
                full_and_evicting,
                age_s,
                tier_report,
                parameters,
            ),
        )

    def _read(self, tier_report: TierReport | None) -> None:
        """Keep what a report says until the next one: there are two a second, and any number of requests."""
        self._tier_report = tier_report
        self._capacity_bytes = self.parameters.configured_capacity_bytes
        if tier_report is not None:
            # What such a tier loses is not lost.
            self._capacity_bytes = None if tier_report.backing_tiers else tier_report.capacity_bytes
            self._full_and_evicting = tier_report.full_and_evicting(self.parameters.occupancy_threshold)

    def _pressure(self, estimate_above: bool, full_and_evicting: bool | None) -> bool:
        raise NotImplementedError


class NoAdmission(_WorkingSetAdmission):
    """p = 0: plain offload, with the factors still recorded."""

    name = "none"

    def _pressure(self, estimate_above: bool, full_and_evicting: bool | None) -> bool:
        return False


class FixedAdmission(_WorkingSetAdmission):
    """p = 1: the filter applies to every request."""

    name = "fixed"

    def _pressure(self, estimate_above: bool, full_and_evicting: bool | None) -> bool:
        return True


class ConditionedAdmission(_WorkingSetAdmission):
    """Eq. 10: p = 1[working set > C_H] * 1[full and evicting]; without a fresh report the first factor alone."""

    name = "conditioned"

    def _pressure(self, estimate_above: bool, full_and_evicting: bool | None) -> bool:
        return estimate_above and full_and_evicting is not False


ADMISSIONS: dict[str, type[_WorkingSetAdmission]] = {
    policy.name: policy for policy in (NoAdmission, FixedAdmission, ConditionedAdmission)
}
