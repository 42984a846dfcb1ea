"""Figures 2 to 4: makespan, computed prefill and host traffic against host capacity and against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from efficient_lmcache.report.latency import ServerTimes
from efficient_lmcache.report.runs import Absent, Unavailable
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
    return tuple(_figure(complete) for complete in _complete_by_trace(rows))


def pool_ratios(rows: Sequence[RunRow], times: Mapping[str, ServerTimes | Absent]) -> tuple[PoolRatio, ...]:
    """Without a host tier, every pool relative to the largest one. `times` by `RunRow.directory`.

    Raises:
        Unavailable: no trace has complete recompute runs of two pools.
    """
    ratios: list[PoolRatio] = []
    for complete in _complete_by_trace(rows):
        # Of a pool's repeats the first stands for it, as in the paper.
        firsts = {row.active_pool: row for row in reversed(complete) if row.admission == "recompute"}
        if len(firsts) > 1:
            base = firsts[max(firsts)]
            ratios += [_pool_ratio(firsts[pool], base, times) for pool in sorted(firsts, reverse=True)]
    if not ratios:
        raise Unavailable("no trace has complete recompute runs of two active pools")
    return tuple(ratios)


def first_runs(series: Sequence[Series], pool: int) -> list[RunRow]:
    """One run per admission and tier, of our connector where both ran; without those of other thresholds."""
    rows = [
        row
        for one in series
        if one.active_pool == pool
        for row in one.line
        if row.write_threshold_chunks is None and row.occupancy_threshold is None
    ]
    rows.sort(key=lambda row: row.connector != "lmcache")
    return list({(row.admission, row.host_gib_per_rank): row for row in rows}.values())


def _complete_by_trace(rows: Sequence[RunRow]) -> list[list[RunRow]]:
    groups: dict[str | None, list[RunRow]] = {}
    for row in rows:
        if row.status == "complete":
            groups.setdefault(row.trace_sha256, []).append(row)
    return list(groups.values())


def _figure(rows: Sequence[RunRow]) -> CapacityFigure:
    groups: dict[tuple[str, int], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row.configuration, row.active_pool), []).append(row)
    return CapacityFigure(
        trace_name=rows[0].trace_name,
        trace_sha256=rows[0].trace_sha256,
        series=tuple(_series(group) for group in groups.values()),
        working_set_gib_per_rank={
            row.active_pool: row.working_set_gib_per_rank for row in rows if row.working_set_gib_per_rank is not None
        },
    )


def _series(rows: Sequence[RunRow]) -> Series:
    """Of a tier's repeats the first complete one is on the line, whatever its number."""
    by_capacity = sorted(rows, key=lambda row: (row.host_gib_per_rank, row.repeat))
    firsts = {row.host_gib_per_rank: row for row in reversed(by_capacity)}
    line = tuple(row for row in by_capacity if row is firsts[row.host_gib_per_rank])
    repeats = tuple(row for row in by_capacity if row is not firsts[row.host_gib_per_rank])
    first = rows[0]
    return Series(first.configuration, first.admission, first.connector, first.active_pool, line, repeats)


def _pool_ratio(row: RunRow, base: RunRow, times: Mapping[str, ServerTimes | Absent]) -> PoolRatio:
    waits = [times.get(of.directory) for of in (row, base)]
    queues_s = [wait.queue_s if isinstance(wait, ServerTimes) else None for wait in waits]
    return PoolRatio(
        trace_name=row.trace_name,
        active_pool=row.active_pool,
        base_pool=base.active_pool,
        makespan=_ratio(row.makespan_s, base.makespan_s),
        computed_prefill=_ratio(row.computed_prefill_tokens, base.computed_prefill_tokens),
        queue_delay=_ratio(*queues_s),
    )


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
