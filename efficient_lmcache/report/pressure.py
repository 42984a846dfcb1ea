"""The factors of Eq. 10 over the time of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    rows = run.decisions
    declined = np.cumsum([not row["save"] for row in rows])
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).astype(int))
    picked = [rows[place] for place in places]
    estimates = [row["estimate"] for row in picked]
    return PressureSeries(
        decisions=len(rows),
        time_s=tuple(row["now_s"] - rows[0]["now_s"] for row in picked),
        working_set_to_capacity=tuple(
            row["estimate"]["bytes"] / row["capacity_bytes"] if row["capacity_bytes"] else None for row in picked
        ),
        occupancy=tuple(row["occupancy"] for row in picked),
        evicted_chunks=tuple(row["evicted_chunks"] for row in picked),
        pressure=tuple(row["pressure"] for row in picked),
        full_and_evicting=tuple(row["full_and_evicting"] for row in picked),
        active_pool=tuple(estimate["active_pool"] for estimate in estimates),
        mean_prompt_tokens=tuple(estimate["mean_prompt_tokens"] for estimate in estimates),
        declined=tuple(int(declined[place]) for place in places),
    )
