"""Figures 2 to 4: makespan, computed prefill and host traffic against host capacity and against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from efficient_lmcache.report.latency import ServerTimes
from efficient_lmcache.report.runs import Absent
from efficient_lmcache.report.table import RunRow


@dataclass(frozen=True, slots=True)
class Series:
    """The complete runs of one configuration and pool over host capacity: a line of Figures 2 and 3.

    Attributes:
        configuration: of the runs, as in the table.
        line: the first runs, small tiers first.
        repeats: the others (the paper's diamonds).
    """

    configuration: str
    admission: str
    connector: str
    active_pool: int
    line: tuple[RunRow, ...]
    repeats: tuple[RunRow, ...]


@dataclass(frozen=True, slots=True)
class CapacityFigure:
    """One trace's runs. Figures 2 and 3 plot `series` over host_gib_per_rank; Figure 4 plots the same rows' makespan
    against computed prefill, and restored against stored tokens.

    Attributes:
        trace_name, trace_sha256: of the workload.
        working_set_gib_per_rank: by active pool; capacities above it are shaded.
    """

    trace_name: str
    trace_sha256: str | None
    series: tuple[Series, ...]
    working_set_gib_per_rank: dict[int, float]


@dataclass(frozen=True, slots=True)
class PoolRatio:
    """Figure 2d: a pool's recompute run relative to the largest pool's; None for what a run does not know."""

    trace_name: str
    active_pool: int
    base_pool: int
    makespan: float | None
    computed_prefill: float | None
    queue_delay: float | None


def capacity_figures(rows: Sequence[RunRow]) -> tuple[CapacityFigure, ...]:
    """One per trace with complete runs, in the order of the rows."""
    raise NotImplementedError


def pool_ratios(rows: Sequence[RunRow], times: Mapping[str, ServerTimes | Absent]) -> tuple[PoolRatio, ...]:
    """Without a host tier, every pool relative to the largest one. `times` by `RunRow.directory`.

    Raises:
        Unavailable: no trace has complete recompute runs of two pools.
    """
    raise NotImplementedError
