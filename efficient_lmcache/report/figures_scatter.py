"""Figure 4: makespan against computed prefill of all runs, and what their tiers restored against what they stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.report.capacity import CapacityFigure, Series, first_runs
from efficient_lmcache.report.figures import Figure, Panel, key, mark_name, tier_number, time_unit, token_unit
from efficient_lmcache.report.figures_runs import Link, repeated, row_points, thresholds_text
from efficient_lmcache.report.table import RunRow

_RATIOS = (0.1, 1.0, 10.0)
_LETTER, _LINE = 0.025, 0.075  # of the plot's width and height; labels nearer than that would lie over one another


def scatter(figure: CapacityFigure, link: Link) -> Figure | None:
    """None for fewer than two runs that know their makespan."""
    rows = [row for one in figure.series for row in (*one.line, *one.repeats)]
    if sum(row.makespan_s is not None and row.computed_prefill_tokens is not None for row in rows) < 2:
        return None
    panels = [_makespan_by_prefill(figure.series, rows, link)]
    tiers = [one for one in figure.series if one.admission != "recompute"]
    if any(one.line for one in tiers):
        panels.append(_restored_by_stored(tiers, link))
    names = [mark_name(one.admission, one.connector) for one in figure.series]
    unit = "MiB" if max(row.host_gib_per_rank for row in rows) < 1 else "GiB"
    caption = (
        f"{len(rows)} complete runs; labels give the host tier in {unit} per rank, and A where it is not the largest. "
        "Faint lines join runs without write admission in order of host capacity."
    )
    return Figure(tuple(panels), caption, key(names, repeated=repeated(figure.series)))


def _makespan_by_prefill(series: Sequence[Series], rows: Sequence[RunRow], link: Link) -> Panel:
    time, tokens = time_unit(row.makespan_s for row in rows), token_unit(row.computed_prefill_tokens for row in rows)

    def x(row: RunRow) -> float | None:
        return tokens.of_value(row.computed_prefill_tokens)

    def y(row: RunRow) -> float | None:
        return time.of_value(row.makespan_s)

    data = [_thread(series, pool, x, y) for pool in sorted({one.active_pool for one in series})]
    for one in series:
        data += row_points((*one.line, *one.repeats), x, y, link)
    known = [row for row in rows if x(row) is not None and y(row) is not None]
    layout = {
        "xaxis": {"title": {"text": f"Computed prefill ({tokens.suffix})"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"Makespan ({time.suffix})"}},
        "annotations": _labels(known, x, y),
    }
    least, most = min(known, key=lambda row: y(row) or 0), max(known, key=lambda row: y(row) or 0)
    description = (
        f"Scatter of {len(known)} runs. Shortest makespan {time.text(least.makespan_s)} at "
        f"{tokens.text(least.computed_prefill_tokens)} computed; longest {time.text(most.makespan_s)} at "
        f"{tokens.text(most.computed_prefill_tokens)}."
    )
    return Panel("Makespan and computed prefill", description, data, layout)


def _thread(
    series: Sequence[Series], pool: int, x: Callable[[RunRow], Any], y: Callable[[RunRow], Any]
) -> dict[str, Any]:
    rows = [row for row in first_runs(series, pool) if row.admission in ("recompute", "none")]
    rows.sort(key=lambda row: row.host_gib_per_rank)
    shown = [row for row in rows if x(row) is not None and y(row) is not None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x(row) for row in shown],
        "y": [y(row) for row in shown],
        "line": {"width": 1, "color": "@line"},
        "hoverinfo": "skip",
    }


def _restored_by_stored(series: Sequence[Series], link: Link) -> Panel:
    rows = [row for one in series for row in (*one.line, *one.repeats)]
    stored = _LogAxis.of(row.stored_tokens_per_rank for row in rows)
    restored = _LogAxis.of(row.restored_tokens_per_rank for row in rows)

    def x(row: RunRow) -> float | None:
        return stored.place(row.stored_tokens_per_rank)

    def y(row: RunRow) -> float | None:
        return restored.place(row.restored_tokens_per_rank)

    crossing = [(ratio, _across(math.log10(ratio), stored, restored)) for ratio in _RATIOS]
    lines = [(ratio, ends) for ratio, ends in crossing if ends[0] < ends[1]]
    data = [_ratio_line(math.log10(ratio), ends) for ratio, ends in lines]
    for one in series:
        data += row_points((*one.line, *one.repeats), x, y, link)
    layout = {
        "xaxis": {**stored.layout(), "title": {"text": "Stored on host (tokens per rank)"}},
        "yaxis": {**restored.layout(), "title": {"text": "Restored to GPU (tokens per rank)"}},
        "annotations": [*_labels(rows, x, y), *(_ratio_name(ratio, ends) for ratio, ends in lines)],
    }
    described = ", ".join(
        f"{row.name} {row.restored_tokens_per_rank / row.stored_tokens_per_rank:.2g}"
        for row in rows
        if row.stored_tokens_per_rank and row.restored_tokens_per_rank is not None
    )
    description = f"Scatter, logarithmic. Restored per stored token: {described}."
    return Panel("Host restores and writes, with their ratio", description, data, layout)


@dataclass(frozen=True, slots=True)
class _LogAxis:
    """log10 with a place for 0, which tiers that restore nothing need.

    Attributes:
        low, high: of the positive values, with a margin.
        zero: where 0 is; None if there is none.
    """

    low: float
    high: float
    zero: float | None

    @classmethod
    def of(cls, tokens: Iterable[int | None]) -> _LogAxis:
        known = [value for value in tokens if value is not None]
        places = [math.log10(value) for value in known if value] or [0.0]
        low, high = min(places), max(places)
        margin = max(0.12 * (high - low), 0.15)
        return cls(low - margin, high + margin, low - 2 * margin if 0 in known else None)

    def place(self, tokens: int | None) -> float | None:
        return None if tokens is None else math.log10(tokens) if tokens else self.zero

    @property
    def left(self) -> float:
        """The axis' end."""
        return self.low if self.zero is None else self.zero - 0.5 * (self.low - self.zero)

    def layout(self) -> dict[str, Any]:
        steps = (1, 2, 5) if self.high - self.low < 2.2 else (1,)
        values = [step * 10**power for power in range(max(int(self.low), 0), int(self.high) + 1) for step in steps]
        ticks = {math.log10(value): _count(value) for value in values if self.low <= math.log10(value) <= self.high}
        if self.zero is not None:
            ticks[self.zero] = "0"
        places = sorted(ticks)
        return {
            "range": [self.left, self.high],
            "tickvals": places,
            "ticktext": [ticks[place] for place in places],
        }


def _across(shift: float, stored: _LogAxis, restored: _LogAxis) -> tuple[float, float]:
    """Where a line of restored = stored + shift enters and leaves the plot, in x."""
    return max(stored.left, restored.low - shift), min(stored.high, restored.high - shift)


def _ratio_line(shift: float, ends: tuple[float, float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(ends),
        "y": [end + shift for end in ends],
        "line": {"width": 1, "dash": "dot", "color": "@quiet"},
        "hoverinfo": "skip",
    }


def _ratio_name(ratio: float, ends: tuple[float, float]) -> dict[str, Any]:
    """At the line's lower end, where few runs are."""
    return {
        "x": ends[0],
        "y": ends[0] + math.log10(ratio),
        "text": f"{ratio:g} ×",
        "showarrow": False,
        "xanchor": "left",
        "xshift": 8,
        "yanchor": "bottom",
        "font": {"size": 11, "color": "@quiet"},
    }


def _count(tokens: int) -> str:
    return f"{tokens // 10**6} M" if tokens >= 10**6 else f"{tokens // 1000} K" if tokens >= 1000 else str(tokens)


def _labels(
    rows: Sequence[RunRow], x: Callable[[RunRow], float | None], y: Callable[[RunRow], float | None]
) -> list[dict[str, Any]]:
    """The tier beside its run, unless another label is there already; hovering tells the rest."""
    known = [(left, top, row) for row in rows if (left := x(row)) is not None and (top := y(row)) is not None]
    if not known:
        return []
    width = max(left for left, _, _ in known) - min(left for left, _, _ in known) or 1.0
    height = max(top for _, top, _ in known) - min(top for _, top, _ in known) or 1.0
    tiers = [row.host_gib_per_rank for row in rows if row.host_gib_per_rank]
    largest = max(row.active_pool for row in rows)
    kept: list[tuple[float, float, int]] = []
    labels = []
    for left, top, row in known:
        tier = tier_number(row.host_gib_per_rank, tiers) if row.host_gib_per_rank else "GPU only"
        named = ", ".join(filter(None, (tier, thresholds_text(row))))
        text = named + (f" (A {row.active_pool})" if row.active_pool != largest else "")
        near = any(
            abs(left - other) < _LETTER * (len(text) + letters) / 2 * width and abs(top - above) < _LINE * height
            for other, above, letters in kept
        )
        if near or row.repeat > 1:
            continue
        kept.append((left, top, len(text)))
        font = {"size": 11, "color": "@quiet"}
        labels.append({"x": left, "y": top, "text": text, "showarrow": False, "yshift": 13, "font": font})
    return labels
