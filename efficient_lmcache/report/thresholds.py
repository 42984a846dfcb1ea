"""Figure 5: the recorded decisions under other thresholds kappa and theta.

The facts of every decision (task, n, h, the tier report and the time) are given to the policies of `core.admission`
again. That says what another threshold would have decided on this stream, not what the stream would then have been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from efficient_lmcache.core.admission import AdmissionParameters
from efficient_lmcache.report.redecide import Facts, recorded_facts, recorded_parameters, redecide
from efficient_lmcache.report.runs import Run

WRITE_THRESHOLDS_CHUNKS = (2, 4, 8, 16, 32)
OCCUPANCY_THRESHOLDS = tuple(round(0.80 + step / 100, 2) for step in range(21))
NEW_CHUNK_BINS = ("0", "1", "2", "3–4", "5–8", "9–16", "17–32", "33–64", "65+")
_NEW_CHUNK_EDGES = (0, 1, 2, 3, 5, 9, 17, 33, 65, float("inf"))
_OCCUPANCY_EDGES = (0.0, *OCCUPANCY_THRESHOLDS)


@dataclass(frozen=True, slots=True)
class WriteThreshold:
    """What kappa selects.

    Attributes:
        declined: requests.
        declined_chunks: their new full chunks.
        declined_share: of all new full chunks; None where there are none.
    """

    write_threshold_chunks: int
    declined: int
    declined_chunks: int
    declined_share: float | None


@dataclass(frozen=True, slots=True)
class OccupancyThreshold:
    """What theta changes.

    Attributes:
        pressure: decisions under pressure.
        changed: decisions whose pressure differs from the recorded theta's.
        changed_share: of all decisions.
    """

    occupancy_threshold: float
    pressure: int
    changed: int
    changed_share: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Figure 5 of one run.

    Attributes:
        policy: whose rule was applied: the run's own, `conditioned` for one without admission.
        decisions: that were logged.
        reproduced: of them, how many the run's own policy decides alike again; less than all: the log lost something.
        new_chunks: u, requests by NEW_CHUNK_BINS.
        at_most_one_new_chunk: requests with u <= 1.
        median_refill_chunks: median u of the requests above the run's kappa; None without any.
        write_thresholds: for WRITE_THRESHOLDS_CHUNKS and the run's own.
        reports_evicting: distinct tier reports with evictions that a decision saw.
        occupancy_edges: [bins + 1], the last bin includes its end.
        occupancy_reports: [bins] of those reports.
        occupancy_lowest: of those reports; None without any.
        occupancy_thresholds: for OCCUPANCY_THRESHOLDS, under the conditioned rule whatever the run's admission.
    """

    policy: str
    decisions: int
    reproduced: int
    write_threshold_chunks: int
    occupancy_threshold: float
    new_chunks: tuple[int, ...]
    at_most_one_new_chunk: int
    median_refill_chunks: float | None
    write_thresholds: tuple[WriteThreshold, ...]
    reports_evicting: int
    occupancy_edges: tuple[float, ...]
    occupancy_reports: tuple[int, ...]
    occupancy_lowest: float | None
    occupancy_thresholds: tuple[OccupancyThreshold, ...]


def thresholds(run: Run) -> Thresholds:
    """Raises Unavailable without decisions."""
    rows, facts, parameters = run.decisions, recorded_facts(run), recorded_parameters(run)
    admission = run.record["admission"]
    policy = "conditioned" if admission == "none" else admission
    again = redecide(admission, parameters, facts)
    new_chunks = np.array([row["new_full_chunks"] for row in rows])
    refills = new_chunks[new_chunks > parameters.write_threshold_chunks]
    occupancies = _occupancies_evicting(facts)
    return Thresholds(
        policy=policy,
        decisions=len(rows),
        reproduced=sum(
            (decision.save, decision.outcome.value) == (row["save"], row["outcome"])
            for decision, row in zip(again, rows, strict=True)
        ),
        write_threshold_chunks=parameters.write_threshold_chunks,
        occupancy_threshold=parameters.occupancy_threshold,
        new_chunks=_counts(new_chunks, _NEW_CHUNK_EDGES),
        at_most_one_new_chunk=int((new_chunks <= 1).sum()),
        median_refill_chunks=float(np.median(refills)) if len(refills) else None,
        write_thresholds=_write_thresholds(policy, parameters, facts, int(new_chunks.sum())),
        reports_evicting=len(occupancies),
        occupancy_edges=_OCCUPANCY_EDGES,
        occupancy_reports=_counts(occupancies, _OCCUPANCY_EDGES),
        occupancy_lowest=float(occupancies.min()) if len(occupancies) else None,
        occupancy_thresholds=_occupancy_thresholds(parameters, facts),
    )


def _write_thresholds(
    policy: str, parameters: AdmissionParameters, facts: Sequence[Facts], new_chunks: int
) -> tuple[WriteThreshold, ...]:
    found = []
    for kappa in sorted({*WRITE_THRESHOLDS_CHUNKS, parameters.write_threshold_chunks}):
        decisions = redecide(policy, replace(parameters, write_threshold_chunks=kappa), facts)
        declined = [decision.new_full_chunks for decision in decisions if not decision.save]
        share = sum(declined) / new_chunks if new_chunks else None
        found.append(WriteThreshold(kappa, len(declined), sum(declined), share))
    return tuple(found)


def _occupancy_thresholds(parameters: AdmissionParameters, facts: Sequence[Facts]) -> tuple[OccupancyThreshold, ...]:
    def pressure(theta: float) -> npt.NDArray[np.bool_]:
        decisions = redecide("conditioned", replace(parameters, occupancy_threshold=theta), facts)
        return np.array([decision.pressure for decision in decisions])

    recorded = pressure(parameters.occupancy_threshold)
    found = []
    for theta in OCCUPANCY_THRESHOLDS:
        changed = pressure(theta)
        differ = int((changed != recorded).sum())
        found.append(OccupancyThreshold(theta, int(changed.sum()), differ, differ / len(facts)))
    return tuple(found)


def _occupancies_evicting(facts: Sequence[Facts]) -> npt.NDArray[np.float64]:
    """Of the distinct reports with evictions; decisions that saw the same report have the same object."""
    reports = {id(report): report for _, report, _ in facts if report is not None and report.evicted_chunks > 0}
    return np.array([report.occupancy for report in reports.values()], np.float64)


def _counts(values: npt.NDArray[Any], edges: Sequence[float]) -> tuple[int, ...]:
    return tuple(int(count) for count in np.histogram(values, edges)[0])
