"""Figure 5: the recorded decisions under other thresholds kappa and theta.

The facts of every decision (task, n, h, the tier report and the time) are given to the policies of `core.admission`
again. That says what another threshold would have decided on this stream, not what the stream would then have been.
"""

from __future__ import annotations

from dataclasses import dataclass

from efficient_lmcache.report.runs import Run

WRITE_THRESHOLDS_CHUNKS = (2, 4, 8, 16, 32)
OCCUPANCY_THRESHOLDS = tuple(round(0.80 + step / 100, 2) for step in range(21))
NEW_CHUNK_BINS = ("0", "1", "2", "3–4", "5–8", "9–16", "17–32", "33–64", "65+")


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
    raise NotImplementedError
