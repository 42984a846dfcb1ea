"""The factors of Eq. 10 over the time of a run."""

from __future__ import annotations

from dataclasses import dataclass

from efficient_lmcache.report.runs import Run

MOST_POINTS = 2000


@dataclass(frozen=True, slots=True)
class PressureSeries:
    """At most MOST_POINTS decisions of a run, evenly picked, the first and the last among them; arrays are parallel.

    Attributes:
        decisions: in the run.
        time_s: since the first decision.
        working_set_to_capacity: the estimate over C_H: the first factor holds above 1.
        occupancy: registered chunks over K_H in the latest report; None before any.
        evicted_chunks: in that report's window.
        pressure: as the policy saw it (never for `none`, always for `fixed`).
        full_and_evicting: the second factor; None without a fresh report.
        active_pool: A, tasks in the activity window.
        mean_prompt_tokens: N of the latest first lookups.
        declined: requests declined so far.
    """

    decisions: int
    time_s: tuple[float, ...]
    working_set_to_capacity: tuple[float | None, ...]
    occupancy: tuple[float | None, ...]
    evicted_chunks: tuple[int | None, ...]
    pressure: tuple[bool, ...]
    full_and_evicting: tuple[bool | None, ...]
    active_pool: tuple[int, ...]
    mean_prompt_tokens: tuple[float, ...]
    declined: tuple[int, ...]


def pressure_series(run: Run) -> PressureSeries:
    """Raises Unavailable without decisions."""
    raise NotImplementedError
