"""A lint report as a picture: what each habit costs, and call by call what the worst task resubmits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efficient_lmcache.sizing.lint import LaneReport, Report

_HABITS = 8
_REUSED, _LOST, _NEW = "#4c78a8", "#e45756", "#bab0ac"


def draw(report: Report, out: Path) -> None:
    """Write the figure. Raises ValueError where matplotlib is missing or there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--figure needs the package matplotlib: install efficient-lmcache[sizing]") from error
    if not report.calls:
        raise ValueError(f"--figure {out}: {report.source} has no calls to draw")
    worst = report.worst_lanes()
    lane = worst[0] if worst else max(report.lanes, key=lambda each: sum(each.prompt_tokens))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    habits, calls = figure.subplots(1, 2, width_ratios=(2, 3))
    _draw_habits(habits, report)
    _draw_calls(calls, report, lane)
    figure.savefig(out, dpi=150)


def _lost(report: Report) -> str:
    return "lost" if report.knows_text else "lost at most"


def _draw_habits(axes: Any, report: Report) -> None:
    totals = report.habits()[:_HABITS][::-1]
    names = [each.label.replace(": ", ":\n") for each in totals]
    axes.barh(names, [each.cost_tokens / 1e6 for each in totals], color=_LOST)
    axes.set_xlabel(f"{_lost(report)}, M tokens")
    title = f"{report.source}: breaks by likely habit" if totals else f"{report.source}: no breaks"
    axes.set_title(title, fontsize=10)


def _draw_calls(axes: Any, report: Report, lane: LaneReport) -> None:
    calls = range(len(lane.prompt_tokens))
    rest = [n - h - lost for n, h, lost in zip(lane.prompt_tokens, lane.stable_tokens, lane.cost_tokens, strict=True)]
    bottom = [0.0] * len(rest)
    parts = {
        "extends an earlier call": (lane.stable_tokens, _REUSED),
        f"processed before, {_lost(report)}": (lane.cost_tokens, _LOST),
        "new": (rest, _NEW),
    }
    for label, (tokens, color) in parts.items():
        thousands = [each / 1e3 for each in tokens]
        axes.bar(calls, thousands, 1.0, bottom, color=color, label=label)
        bottom = [low + each for low, each in zip(bottom, thousands, strict=True)]
    axes.set_xlabel("call")
    axes.set_ylabel("prompt, K tokens")
    axes.set_title(f"{lane.task}: {'the worst task' if lane.findings else 'the longest task'}", fontsize=10)
    axes.legend(fontsize=8, loc="upper left")
