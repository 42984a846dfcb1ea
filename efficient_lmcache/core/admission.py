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
from typing import NamedTuple, Protocol

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.core.workingset import WorkingSetEstimate, WorkingSetEstimator


class Outcome(str, Enum):
    """Why a request's new KV is saved or not."""

    NO_PRESSURE = "no_pressure"  # saved: nothing says that the pool thrashes the tier
    EXTENSION = "extension"  # saved: under pressure, but it extends a resident prefix
    REFILL = "refill"  # declined: under pressure, and it would re-store evicted context


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
        configured_capacity_bytes: C_H per rank as configured; a tier report's own capacity takes its place.
        write_threshold_chunks: kappa.
        occupancy_threshold: theta.
        report_max_age_s: a report is fresh for so long after its receipt.
        activity_window_s: a task is active for so long after a first lookup.
        prompt_window_lookups: first lookups whose prompts enter the mean.
    """

    chunk_tokens: int
    bytes_per_token: int
    configured_capacity_bytes: int
    write_threshold_chunks: int = 8
    occupancy_threshold: float = 0.95
    report_max_age_s: float = 5.0
    activity_window_s: float = 60.0
    prompt_window_lookups: int = 256

    def __post_init__(self) -> None:
        allowed = {
            "chunk_tokens": self.chunk_tokens >= 1,
            "bytes_per_token": self.bytes_per_token >= 0,
            "configured_capacity_bytes": self.configured_capacity_bytes >= 0,
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
        write_threshold_chunks: kappa.
        estimate: A, N and the working set (Eq. 5).
        capacity_bytes: C_H per rank.
        estimate_above: the first factor: working set > C_H.
        full_and_evicting: the second factor; None without a fresh report.
        occupancy: registered chunks over K_H in the latest report, however old; None without any.
        evicted_chunks: chunks evicted to make room in that report's window; None without any.
        report_age_s: since the latest report's receipt; None without any.
        report_fresh: that age is within the allowed one.
    """

    save: bool
    outcome: Outcome
    pressure: bool
    request: RequestFacts
    new_full_chunks: int
    write_threshold_chunks: int
    estimate: WorkingSetEstimate
    capacity_bytes: int
    estimate_above: bool
    full_and_evicting: bool | None
    occupancy: float | None
    evicted_chunks: int | None
    report_age_s: float | None
    report_fresh: bool


class AdmissionPolicy(Protocol):
    """Decides once per request, at its first resolved lookup."""

    @property
    def name(self) -> str:
        """The admission as options and records name it."""
        ...

    def decide(self, request: RequestFacts, tier_report: TierReport | None, now_s: float) -> Decision:
        """Observe the request, then decide. `now_s` is on the clock of `TierReport.received_s`."""
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

    def decide(self, request: RequestFacts, tier_report: TierReport | None, now_s: float) -> Decision:
        parameters = self.parameters
        estimate = self.estimator.observe(request.task, request.prompt_tokens, now_s)
        capacity_bytes = tier_report.capacity_bytes if tier_report else parameters.configured_capacity_bytes
        estimate_above = estimate.bytes > capacity_bytes
        age_s = tier_report.age_s(now_s) if tier_report else None
        fresh = age_s is not None and age_s <= parameters.report_max_age_s
        full_and_evicting = (
            tier_report.full_and_evicting(parameters.occupancy_threshold) if tier_report and fresh else None
        )
        chunk_tokens = parameters.chunk_tokens
        new_full_chunks = request.prompt_tokens // chunk_tokens - request.host_match_tokens // chunk_tokens
        pressure = self._pressure(estimate_above, full_and_evicting)
        refill = new_full_chunks > parameters.write_threshold_chunks
        return Decision(
            save=not (pressure and refill),
            outcome=(Outcome.REFILL if refill else Outcome.EXTENSION) if pressure else Outcome.NO_PRESSURE,
            pressure=pressure,
            request=request,
            new_full_chunks=new_full_chunks,
            write_threshold_chunks=parameters.write_threshold_chunks,
            estimate=estimate,
            capacity_bytes=capacity_bytes,
            estimate_above=estimate_above,
            full_and_evicting=full_and_evicting,
            occupancy=tier_report.occupancy if tier_report else None,
            evicted_chunks=tier_report.evicted_chunks if tier_report else None,
            report_age_s=age_s,
            report_fresh=fresh,
        )

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
