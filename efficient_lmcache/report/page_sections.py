"""The page's sections, in the paper's order; one whose data are absent says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from efficient_lmcache.report import page_tables as tables
from efficient_lmcache.report.analyses import Analyses, RunAnalyses
from efficient_lmcache.report.figures import Figure
from efficient_lmcache.report.figures_capacity import host_capacity, pools, write_admission
from efficient_lmcache.report.figures_declined import reuse_of_declined
from efficient_lmcache.report.figures_gap import gaps
from efficient_lmcache.report.figures_predictions import predicted
from efficient_lmcache.report.figures_pressure import pressure_over_time
from efficient_lmcache.report.figures_pressure import shown_runs as pressed_runs
from efficient_lmcache.report.figures_runs import Link
from efficient_lmcache.report.figures_scatter import scatter
from efficient_lmcache.report.figures_thresholds import sensitivity
from efficient_lmcache.report.markup import Html, element
from efficient_lmcache.report.predictions import PredictedRun
from efficient_lmcache.report.runs import Absent, Inputs
from efficient_lmcache.report.table import RunRow

T = TypeVar("T")
Part = Html | Figure


@dataclass(frozen=True, slots=True)
class Section:
    """`name` is its anchor."""

    name: str
    title: str
    parts: tuple[Part, ...]


def sections(inputs: Inputs, analyses: Analyses, link: Link) -> tuple[Section, ...]:
    return (
        Section("runs", "Runs", _runs(inputs, analyses, link)),
        Section("predictions", "Predicted, then measured", _predictions(analyses, link)),
        Section("capacity", "Host capacity", _capacity(analyses, link)),
        Section("admission", "Write admission", _admission(analyses, link)),
        Section("makespan", "Makespan and host traffic", _makespan(analyses, link)),
        Section("latency", "Waiting and latency", _latency(analyses, link)),
        Section("thresholds", "Thresholds κ and θ", _thresholds(analyses, link)),
        Section("declined", "Reuse distance of declined chunks", _declined(analyses, link)),
        Section("pressure", "Pressure over time", _pressure(analyses)),
        Section("gap", "Reuse gap", _gap(analyses, link)),
        Section("condensers", "Condensers", _condensers(analyses, link)),
    )


def _text(sentence: object) -> Html:
    return element("p", sentence)


def _absent(reason: str) -> Html:
    return element("p", f"Nothing to show: {reason.rstrip('.')}.", class_="absent")


def _of_runs(
    runs: Sequence[RunAnalyses], value: Callable[[RunAnalyses], T | Absent], *, of_tiers: bool = True
) -> tuple[list[tuple[RunRow, T]], list[Html]]:
    """(run, analysis) where there is one, and paragraphs that say why the others are missing.

    An analysis `of_tiers` is not missed where there is no tier.
    """
    found: list[tuple[RunRow, T]] = []
    reasons: dict[str, list[str]] = {}
    for one in runs:
        result = value(one)
        if isinstance(result, Absent):
            reasons.setdefault(result.reason, []).append(one.row.name)
        else:
            found.append((one.row, result))
    if of_tiers:
        reasons = _of_rows([one.row for one in runs if one.row.admission != "recompute"], reasons)
    if not found:
        return found, [_absent("; ".join(reasons) or "there are no runs with a host tier")]
    return found, [_without(names, reason) for reason, names in reasons.items()]


def _of_rows(rows: Iterable[RunRow], reasons: dict[str, list[str]]) -> dict[str, list[str]]:
    names = {row.name for row in rows}
    kept = {reason: [name for name in missing if name in names] for reason, missing in reasons.items()}
    return {reason: missing for reason, missing in kept.items() if missing}


def _without(names: Sequence[str], reason: str) -> Html:
    listed = ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
    return element("p", f"Without {listed}: {reason.rstrip('.')}.", class_="quiet")


def _runs(inputs: Inputs, analyses: Analyses, link: Link) -> tuple[Part, ...]:
    rows = [one.row for one in analyses.runs]
    parts: list[Part] = [tables.runs(rows, link)]
    unfinished = tables.unfinished(inputs, rows, link)
    return (*parts, *unfinished)


def _predictions(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    found = analyses.predictions
    if isinstance(found, Absent):
        return (_absent(found.reason),)
    estimates = {one.row.directory: one.row.working_set_gib_per_rank for one in analyses.runs}

    def address(run: PredictedRun) -> str | None:
        return None if run.directory is None else link(run.directory)

    groups: dict[tuple[str, int], list[PredictedRun]] = {}
    for run in found:
        groups.setdefault((run.sweep_directory, -run.active_pool), []).append(run)
    several = len({sweep for sweep, _ in groups}) > 1
    drawn = []
    for (sweep, pool), runs in sorted(groups.items()):
        estimate = next((estimates[run.directory] for run in runs if run.directory is not None), None)
        whose = f"{runs[0].sweep} ({sweep}), " if several else ""
        drawn.append((f"{whose}A = {-pool}", predicted(runs, estimate, address)))
    said = _text("What the capacity model said before each run began, and what the run then counted.")
    return (said, *_headed(drawn), tables.predictions(found, address))


def _capacity(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    parts = _per_pool(analyses, lambda figure, pool: host_capacity(figure, pool, link))
    if isinstance(analyses.pools, Absent):
        parts.append(element("p", f"Pools are not compared: {analyses.pools.reason.rstrip('.')}.", class_="quiet"))
    else:
        parts.append(pools(analyses.pools))
    if not any(isinstance(part, Figure) for part in parts):
        parts.insert(0, _absent("no complete run with a host tier and without write admission"))
    return tuple(parts)


def _admission(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    parts = _per_pool(analyses, lambda figure, pool: write_admission(figure, pool, link))
    return tuple(parts) or (_absent("no complete run with fixed or conditioned write admission"),)


def _makespan(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    drawn = [(one.trace_name, figure) for one in analyses.capacity if (figure := scatter(one, link))]
    return tuple(_headed(drawn)) or (_absent("fewer than two complete runs"),)


def _per_pool(analyses: Analyses, draw: Callable[..., Figure | None]) -> list[Part]:
    """A figure per trace and pool."""
    drawn: list[tuple[str, Figure]] = []
    for one in analyses.capacity:
        for pool in sorted({series.active_pool for series in one.series}, reverse=True):
            figure = draw(one, pool)
            if figure:
                drawn.append((f"{one.trace_name}, A = {pool}", figure))
    return _headed(drawn)


def _headed(drawn: Sequence[tuple[str, Figure]]) -> list[Part]:
    """Figures, each under its heading where there are several."""
    if len(drawn) < 2:
        return [figure for _, figure in drawn]
    return [part for heading, figure in drawn for part in (element("h4", heading), figure)]


def _latency(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    served, without = _of_runs(analyses.runs, lambda one: one.server_times, of_tiers=False)
    called, _ = _of_runs(analyses.runs, lambda one: one.call_times)
    if not served and not called:
        return tuple(without)
    times = {row.directory: found for row, found in served}
    return (tables.latency(called, times, link), *(without if served else ()))


def _thresholds(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    found, without = _of_runs(analyses.runs, lambda one: one.thresholds)
    if not found:
        return tuple(without)
    return (sensitivity(found, link), tables.thresholds(found, link), *without)


def _declined(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    found, without = _of_runs(analyses.runs, lambda one: one.declined_reuse)
    if not found:
        return tuple(without)
    declining = [pair for pair in found if pair[1].chunks]
    idle = [row.name for row, reuse in found if not reuse.chunks and row.admission in ("fixed", "conditioned")]
    notes = [element("p", f"Declined nothing: {', '.join(idle)}.", class_="quiet")] if idle else []
    if not declining:
        return (_absent("no run declined a write"), *notes, *without)
    return (reuse_of_declined(declining, link), *notes, *without)


def _pressure(analyses: Analyses) -> tuple[Part, ...]:
    found, without = _of_runs(analyses.runs, lambda one: one.pressure)
    if not found:
        return tuple(without)
    shown = pressed_runs(found)
    notes = without
    if len(shown) < len(found):
        whose = "under conditioned admission" if shown[0][0].admission == "conditioned" else "listed first"
        notes = [element("p", f"Shown are {len(shown)} of {len(found)} runs, those {whose}.", class_="quiet"), *without]
    return (pressure_over_time(shown), *notes)


def _gap(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    found, without = _of_runs(analyses.runs, lambda one: one.reuse_gap)
    parts: list[Part] = [_text(sentence) for sentence in _new_kv(analyses.runs)]
    if not found:
        return (*parts, *without)
    evicted = {one.row.directory: one.evicted_before_reuse for one in analyses.runs}
    runs = [(row, gap, evicted[row.directory]) for row, gap in found]
    return (*parts, gaps(runs, link), tables.gaps(runs, link), *without)


def _new_kv(runs: Iterable[RunAnalyses]) -> list[str]:
    """A sentence per trace."""
    said = {}
    for one in runs:
        reuse = one.new_kv_reuse
        if not isinstance(reuse, Absent) and reuse.share is not None:
            said[one.row.trace_sha256] = (
                f"Of the KV that a call of {one.row.trace_name} adds, {reuse.share:.1%} reappears in its task's next "
                f"call ({reuse.reappearing_tokens:,} of {reuse.new_tokens:,} tokens)."
            ).replace("%", " %")
    return list(said.values())


def _condensers(analyses: Analyses, link: Link) -> tuple[Part, ...]:
    found = analyses.condensers
    return (_absent(found.reason),) if isinstance(found, Absent) else (tables.condensers(found, link),)
