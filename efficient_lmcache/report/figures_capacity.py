"""Figures 2 and 3: makespan, computed prefill and host traffic against host capacity; pools against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from efficient_lmcache.report.capacity import CapacityFigure, PoolRatio, Series
from efficient_lmcache.report.figures import (
    CapacityAxis,
    Figure,
    Panel,
    Unit,
    key,
    line_swatch,
    mark_name,
    time_unit,
    token_unit,
)
from efficient_lmcache.report.figures_runs import Link, repeated, row_points, run_hover
from efficient_lmcache.report.markup import Html, element
from efficient_lmcache.report.table import RunRow

_WITHOUT_ADMISSION = ("recompute", "none")
_TRAFFIC_KEY = (
    element("li", line_swatch("restored"), "restored, host → GPU"),
    element("li", line_swatch("stored", "dot"), "stored, GPU → host"),
)


def host_capacity(figure: CapacityFigure, pool: int, link: Link) -> Figure | None:
    """Figure 2 (a) to (c) of one pool: recomputation and offload. None without a run with a host tier."""
    series = [one for one in figure.series if one.active_pool == pool and one.admission in _WITHOUT_ADMISSION]
    if not any(row.host_gib_per_rank for row in _rows(series)):
        return None
    axis = CapacityAxis.of(row.host_gib_per_rank for row in _rows(series))
    estimate = figure.working_set_gib_per_rank.get(pool)
    panels = (
        _makespan(series, axis, estimate, link),
        _computed(series, axis, estimate, link),
        _traffic([one for one in series if one.admission != "recompute"], axis, estimate, link),
    )
    caption = _caption(series, pool)
    if any(one.connector == "lmcache" for one in series):
        caption += " Host traffic with crosses is by LMCache's own counters, which count more than what was copied."
    return Figure(panels, caption, _key(series, *_TRAFFIC_KEY, shade=bool(axis.shade_above(estimate))))


def write_admission(figure: CapacityFigure, pool: int, link: Link) -> Figure | None:
    """Figure 3 of one pool: every admission. None without a run that filters writes."""
    series = [one for one in figure.series if one.active_pool == pool and one.admission != "recompute"]
    if not any(one.admission in ("fixed", "conditioned") for one in series):
        return None
    axis = CapacityAxis.of(row.host_gib_per_rank for row in _rows(series))
    estimate = figure.working_set_gib_per_rank.get(pool)
    panels = (_makespan(series, axis, estimate, link), _computed(series, axis, estimate, link))
    return Figure(panels, _caption(series, pool), _key(series, shade=bool(axis.shade_above(estimate))))


def pools(ratios: Sequence[PoolRatio]) -> Figure:
    """Figure 2 (d): the pools without a host tier, relative to the largest."""
    offered: tuple[tuple[str, Callable[[PoolRatio], float | None]], ...] = (
        ("Makespan", lambda ratio: ratio.makespan),
        ("Computed prefill", lambda ratio: ratio.computed_prefill),
        ("Queue delay", lambda ratio: ratio.queue_delay),
    )
    quantities = [(name, value) for name, value in offered if all(value(ratio) is not None for ratio in ratios)]
    data = [
        {
            "type": "bar",
            "name": f"A {ratio.active_pool}",
            "x": [name for name, _ in quantities],
            "y": [value(ratio) for _, value in quantities],
            "text": [f"A {ratio.active_pool}<br>{value(ratio):.2f} ×" for _, value in quantities],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": "@recompute", "opacity": max(1 - 0.3 * index, 0.3)},
            "hovertemplate": f"A {ratio.active_pool}: %{{y:.2f}} × A {ratio.base_pool}<extra></extra>",
        }
        for index, ratio in enumerate(ratios)
    ]
    highest = max((value(ratio) or 0 for ratio in ratios for _, value in quantities), default=1)
    layout = {
        "barmode": "group",
        "yaxis": {"title": {"text": f"Relative to A = {ratios[0].base_pool}"}, "range": [0, max(highest, 1) * 1.22]},
    }
    words = "; ".join(
        f"{name.lower()} with A = {ratio.active_pool}: {value(ratio):.2f} times that with A = {ratio.base_pool}"
        for ratio in ratios
        for name, value in quantities
        if ratio.active_pool != ratio.base_pool and value(ratio) is not None
    )
    title = "Active pool, no host tier"
    return Figure((Panel(title, f"Bars. {words}.", data, layout),), "Recomputation only, relative to the largest pool.")


def _rows(series: Sequence[Series]) -> list[RunRow]:
    return [row for one in series for row in (*one.line, *one.repeats)]


def _makespan(series: Sequence[Series], axis: CapacityAxis, estimate: float | None, link: Link) -> Panel:
    unit = time_unit(row.makespan_s for row in _rows(series))
    return _panel("Makespan", unit, lambda row: row.makespan_s, series, axis, estimate, link)


def _computed(series: Sequence[Series], axis: CapacityAxis, estimate: float | None, link: Link) -> Panel:
    unit = token_unit(row.computed_prefill_tokens for row in _rows(series))
    return _panel("Computed prefill", unit, lambda row: row.computed_prefill_tokens, series, axis, estimate, link)


def _panel(
    title: str,
    unit: Unit,
    value: Callable[[RunRow], float | None],
    series: Sequence[Series],
    axis: CapacityAxis,
    estimate: float | None,
    link: Link,
) -> Panel:
    data = []
    for one in series:
        data += row_points(
            (*one.line, *one.repeats),
            lambda row: axis.place(row.host_gib_per_rank),
            lambda row: unit.of_value(value(row)),
            link,
            line=True,
        )
    described = [
        f"{one.configuration}: "
        + ", ".join(f"{axis.words(row.host_gib_per_rank)} {unit.text(value(row))}" for row in one.line)
        for one in series
    ]
    return Panel(
        f"{title} ({unit.suffix})",
        f"{title} against host capacity per rank. {'; '.join(described)}.",
        data,
        _layout(axis, estimate),
    )


def _traffic(series: Sequence[Series], axis: CapacityAxis, estimate: float | None, link: Link) -> Panel:
    rows = _rows(series)
    unit = token_unit(tokens for row in rows for tokens in (row.restored_tokens_per_rank, row.stored_tokens_per_rank))
    data: list[dict[str, Any]] = []
    for value, colour, symbol, dash in (
        (_restored, "restored", "circle", "solid"),
        (_stored, "stored", "square", "dot"),
    ):
        for one in series:
            shown = [row for row in one.line if value(row) is not None]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(shown) > 1 else "markers",
                    "x": [axis.place(row.host_gib_per_rank) for row in shown],
                    "y": [unit.of_value(value(row)) for row in shown],
                    "marker": {
                        "symbol": "cross" if one.connector == "lmcache" else symbol,
                        "size": 8,
                        "color": f"@{colour}",
                    },
                    "line": {"width": 1.5, "dash": dash, "color": f"@{colour}"},
                    "cliponaxis": False,
                    "hoverinfo": "text",
                    "hovertext": [run_hover(row) for row in shown],
                    "customdata": [link(row.directory) for row in shown],
                }
            )
    described = ", ".join(
        f"{axis.words(row.host_gib_per_rank)}: restored {unit.text(_restored(row))}, stored {unit.text(_stored(row))}"
        for one in series
        for row in one.line
    )
    return Panel(f"Host traffic ({unit.suffix} per rank)", f"Host traffic. {described}.", data, _layout(axis, estimate))


def _restored(row: RunRow) -> int | None:
    return row.restored_tokens_per_rank


def _stored(row: RunRow) -> int | None:
    return row.stored_tokens_per_rank


def _layout(axis: CapacityAxis, estimate: float | None) -> dict[str, Any]:
    return {"xaxis": axis.layout(), "yaxis": {"rangemode": "tozero"}, "shapes": axis.shade_above(estimate)}


def _key(series: Sequence[Series], *more: Html, shade: bool) -> Html:
    names = [mark_name(one.admission, one.connector) for one in series]
    return key(names, *more, repeated=repeated(series), shade=shade)


def _caption(series: Sequence[Series], pool: int) -> str:
    runs = len(_rows(series))
    return f"{runs} complete runs with A = {pool}. Each point is one run; lines join runs of one configuration."
