"""All analyses of a report's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from efficient_lmcache.report.capacity import CapacityFigure, PoolRatio
from efficient_lmcache.report.condensers import CondenserRow
from efficient_lmcache.report.declined import DeclinedReuse
from efficient_lmcache.report.gap import EvictedBeforeReuse, NewKvReuse, ReuseGap
from efficient_lmcache.report.latency import Quantiles, ServerTimes
from efficient_lmcache.report.predictions import PredictedRun
from efficient_lmcache.report.pressure import PressureSeries
from efficient_lmcache.report.runs import Absent, Inputs
from efficient_lmcache.report.table import RunRow
from efficient_lmcache.report.thresholds import Thresholds


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
    raise NotImplementedError
