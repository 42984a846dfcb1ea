"""All analyses of a report's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from efficient_lmcache.report.capacity import CapacityFigure, PoolRatio, capacity_figures, pool_ratios
from efficient_lmcache.report.condensers import CondenserRow, condenser_table
from efficient_lmcache.report.declined import DeclinedReuse, declined_reuse
from efficient_lmcache.report.gap import (
    EvictedBeforeReuse,
    NewKvReuse,
    ReuseGap,
    evicted_before_reuse,
    new_kv_reuse,
    reuse_gap,
)
from efficient_lmcache.report.latency import Quantiles, ServerTimes, call_times, server_times
from efficient_lmcache.report.predictions import PredictedRun, predicted_runs
from efficient_lmcache.report.pressure import PressureSeries, pressure_series
from efficient_lmcache.report.runs import Absent, Inputs, Run, attempt
from efficient_lmcache.report.table import RunRow, runs_table
from efficient_lmcache.report.thresholds import Thresholds, thresholds


@dataclass(frozen=True, slots=True)
class RunAnalyses:
    """What one run's files say, each as far as they allow."""

    row: RunRow
    server_times: ServerTimes | Absent
    call_times: Quantiles | Absent
    thresholds: Thresholds | Absent
    declined_reuse: DeclinedReuse | Absent
    pressure: PressureSeries | Absent
    reuse_gap: ReuseGap | Absent
    evicted_before_reuse: EvictedBeforeReuse | Absent
    new_kv_reuse: NewKvReuse | Absent


@dataclass(frozen=True, slots=True)
class Analyses:
    """A report's numbers. `runs` are in the order of Table 3."""

    runs: tuple[RunAnalyses, ...]
    predictions: tuple[PredictedRun, ...] | Absent
    capacity: tuple[CapacityFigure, ...]
    pools: tuple[PoolRatio, ...] | Absent
    condensers: tuple[CondenserRow, ...] | Absent


def analyse(inputs: Inputs, progress: Callable[[int, int], None] | None = None) -> Analyses:
    """Everything; `progress` is called with (runs done, runs in all).

    Raises:
        ReportError: a file that is not what it should be.
    """
    runs = {str(run.path): run for run in inputs.runs}
    rows = runs_table(inputs.runs)
    analysed = []
    for row in rows:
        analysed.append(_analyse_run(row, runs[row.directory]))
        if progress is not None:
            progress(len(analysed), len(rows))
    times = {of.row.directory: of.server_times for of in analysed}
    return Analyses(
        runs=tuple(analysed),
        predictions=attempt(lambda: predicted_runs(inputs)),
        capacity=capacity_figures(rows),
        pools=attempt(lambda: pool_ratios(rows, times)),
        condensers=attempt(lambda: condenser_table(inputs.runs)),
    )


def _analyse_run(row: RunRow, run: Run) -> RunAnalyses:
    return RunAnalyses(
        row=row,
        server_times=attempt(lambda: server_times(run)),
        call_times=attempt(lambda: call_times(run)),
        thresholds=attempt(lambda: thresholds(run)),
        declined_reuse=attempt(lambda: declined_reuse(run)),
        pressure=attempt(lambda: pressure_series(run)),
        reuse_gap=attempt(lambda: reuse_gap(run)),
        evicted_before_reuse=attempt(lambda: evicted_before_reuse(run)),
        new_kv_reuse=attempt(lambda: new_kv_reuse(run)),
    )
