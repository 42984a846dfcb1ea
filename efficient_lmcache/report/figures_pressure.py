"""The factors of Eq. 10 over the time of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from efficient_lmcache.report.figures import BAR_PATH, Figure, Panel, key_of, line_swatch, swatch
from efficient_lmcache.report.figures_runs import gamma_text, percent, row_text
from efficient_lmcache.report.markup import element
from efficient_lmcache.report.pressure import PressureSeries
from efficient_lmcache.report.table import RunRow

Pressed = tuple[RunRow, PressureSeries]
MOST_RUNS = 6


def shown_runs(runs: Sequence[Pressed]) -> list[Pressed]:
    """Runs under the conditioned rule, whose pressure is computed; without any, all others."""
    conditioned = [pair for pair in runs if pair[0].admission == "conditioned"]
    return (conditioned or list(runs))[:MOST_RUNS]


def pressure_over_time(runs: Sequence[Pressed]) -> Figure:
    items = [
        element("li", line_swatch("conditioned"), "working-set estimate ÷ capacity C_H"),
        element("li", line_swatch("none"), "occupancy of the tier"),
        element("li", swatch(BAR_PATH, "pressed"), "under pressure"),
    ]
    caption = "Pressure needs both: the estimate above the tier (1.0) and the tier full and evicting."
    return Figure(tuple(_panel(row, series) for row, series in runs), caption, key_of(items))


def _panel(row: RunRow, series: PressureSeries) -> Panel:
    lines = (
        (series.working_set_to_capacity, "conditioned", "estimate ÷ C_H"),
        (series.occupancy, "none", "occupancy"),
    )
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [round(second, 2) for second in series.time_s],
            "y": [None if value is None else round(value, 4) for value in values],
            "line": {"width": 1.5, "color": f"@{colour}", "shape": "hv"},
            "hovertemplate": f"{name} %{{y:.2f}} after %{{x:,.0f}} s<extra></extra>",
        }
        for values, colour, name in lines
    ]
    layout = {
        "xaxis": {"title": {"text": "Time since the first decision (s)"}},
        "yaxis": {"rangemode": "tozero"},
        "shapes": [*_pressed(series), _one()],
    }
    share = sum(series.pressure) / max(len(series.pressure), 1)
    title = f"{row_text(row)}, γ_H {gamma_text(row.gamma_h)}"
    description = (
        f"Over {series.time_s[-1] if series.time_s else 0:,.0f} s and {series.decisions:,} decisions, pressure held in "
        f"{percent(share)}; {row.declined:,} requests were declined."
    )
    return Panel(title, description, data, layout)


def _pressed(series: PressureSeries) -> list[dict[str, Any]]:
    """A rectangle for each stretch under pressure."""
    stretches: list[list[float]] = []
    for index, pressed in enumerate(series.pressure):
        end = series.time_s[min(index + 1, len(series.time_s) - 1)]
        if not pressed:
            continue
        if stretches and stretches[-1][1] == series.time_s[index]:
            stretches[-1][1] = end
        else:
            stretches.append([series.time_s[index], end])
    return [
        {
            "type": "rect", "x0": start, "x1": end, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
            "fillcolor": "@pressed", "line": {"width": 0},
        }
        for start, end in stretches
    ]  # fmt: skip


def _one() -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "layer": "below",
        "line": {"width": 1, "dash": "dot", "color": "@quiet"},
    }  # fmt: skip
