"""Tables 4 and 5 as plots: what was predicted for each tier, and the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from efficient_lmcache.report.figures import (
    MARKS,
    CapacityAxis,
    Figure,
    Panel,
    Unit,
    hover,
    key_of,
    mark_name,
    marker,
    swatch,
    tier_text,
    token_unit,
)
from efficient_lmcache.report.figures_runs import named_by_thresholds, thresholds_text, tokens_text
from efficient_lmcache.report.markup import element
from efficient_lmcache.report.predictions import Held, PredictedRun

_Stripe = tuple[int, float, float]
DirectoryOf = Callable[[PredictedRun], str | None]


def predicted(runs: Sequence[PredictedRun], estimate_gib: float | None, address: DirectoryOf) -> Figure:
    """Computed prefill and restored tokens of one pool's runs over host capacity."""
    panels = (
        _panel("Computed prefill", "", runs, lambda run: run.computed, estimate_gib, address),
        _panel("Restored", " per rank", runs, lambda run: run.restored, estimate_gib, address),
    )
    used = {_mark(run) for run in runs}
    items = [
        element("li", swatch(mark.path, mark.colour), f"measured: {mark.label}")
        for name, mark in MARKS.items()
        if name in used
    ]
    items += [
        element("li", swatch("M5 0h4v14h-4z", "range"), "predicted range"),
        element("li", swatch("M0 6h14v2h-14z", "quiet"), "expected"),
    ]
    younger = any(run.older is False for run in runs)
    stored = "some younger than their run, as the table says" if younger else "each stored before its run began"
    caption = f"{len(runs)} predictions with A = {runs[0].active_pool}, {stored}."
    if "lmcache" in used:
        caption += " Tokens restored by LMCache's own connector are by its own counter, which counts more."
    return Figure(panels, caption, key_of(items))


def _panel(
    title: str,
    per: str,
    runs: Sequence[PredictedRun],
    held: Callable[[PredictedRun], Held],
    estimate_gib: float | None,
    address: DirectoryOf,
) -> Panel:
    unit = token_unit(value for run in runs for value in (held(run).high, held(run).measured))
    axis = CapacityAxis.of(run.host_gib_per_rank for run in runs)
    low, high = axis.limits
    beside: dict[float, list[_Stripe]] = {}
    for gib, stripe in sorted({(run.host_gib_per_rank, _stripe(run)) for run in runs}):
        beside.setdefault(gib, []).append(stripe)

    def place(run: PredictedRun) -> float:
        """The plot's width is not known here; a stripe is about a fortieth of it."""
        stripes = beside[run.host_gib_per_rank]
        shift = stripes.index(_stripe(run)) - (len(stripes) - 1) / 2
        return axis.place(run.host_gib_per_rank) + shift * (high - low) / 40

    data: list[dict[str, Any]] = []
    for stripe in sorted({_stripe(run) for run in runs}):
        shown = [run for run in runs if _stripe(run) == stripe]
        data += _ranges(shown, held, unit, place)
        data += _measured(shown, held, unit, place, address)
    described = "; ".join(
        f"{axis.words(run.host_gib_per_rank)} {run.admission}: predicted {unit.text(held(run).expected)}, "
        f"measured {unit.text(held(run).measured)}"
        for run in runs
    )
    layout = {"xaxis": axis.layout(), "yaxis": {"rangemode": "tozero"}, "shapes": axis.shade_above(estimate_gib)}
    return Panel(f"{title} ({unit.suffix}{per})", f"{title}. {described}.", data, layout)


def _mark(run: PredictedRun) -> str:
    return mark_name(run.admission, run.connector)


def _stripe(run: PredictedRun) -> _Stripe:
    """Runs of one tier stand beside each other by admission, connector and thresholds, in this order."""
    kappa, theta = run.write_threshold_chunks, run.occupancy_threshold
    return list(MARKS).index(_mark(run)), -1 if kappa is None else kappa, -1 if theta is None else theta


def _ranges(
    runs: Sequence[PredictedRun], held: Callable[[PredictedRun], Held], unit: Unit, x: Callable[[PredictedRun], float]
) -> list[dict[str, Any]]:
    first = [run for run in runs if run.repeat == 1]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [x(run) for run in first],
            "y": [unit.of_value(held(run).expected) for run in first],
            "marker": {"symbol": "line-ew", "size": 15, "line": {"width": 2, "color": "@quiet"}},
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [(held(run).high - held(run).expected) / unit.scale for run in first],
                "arrayminus": [(held(run).expected - held(run).low) / unit.scale for run in first],
                "width": 0,
                "thickness": 7,
                "color": "@range",
            },
            "cliponaxis": False,
            "hoverinfo": "skip",
        }
    ]


def _measured(
    runs: Sequence[PredictedRun],
    held: Callable[[PredictedRun], Held],
    unit: Unit,
    x: Callable[[PredictedRun], float],
    address: DirectoryOf,
) -> list[dict[str, Any]]:
    done = [run for run in runs if held(run).measured is not None]
    if not done:
        return []
    return [
        {
            "type": "scatter",
            **named_by_thresholds([thresholds_text(run) for run in done]),
            "x": [x(run) for run in done],
            "y": [unit.of_value(held(run).measured) for run in done],
            "marker": marker(_mark(done[0])),
            "cliponaxis": False,
            "hoverinfo": "text",
            "hovertext": [_hover(run, held(run)) for run in done],
            "customdata": [address(run) for run in done],
        }
    ]


def _hover(run: PredictedRun, held: Held) -> str:
    return hover(
        run.run,
        ", ".join(filter(None, (MARKS[_mark(run)].label, thresholds_text(run)))),
        f"A {run.active_pool} · host tier {tier_text(run.host_gib_per_rank)} per rank",
        f"predicted {tokens_text(held.expected)} ({tokens_text(held.low)} – {tokens_text(held.high)}) tokens",
        f"measured {tokens_text(held.measured)} tokens: {verdict(held)}",
    )


def verdict(held: Held) -> str:
    """Inside the predicted range, or by how much outside it."""
    if held.inside is None:
        return "not measured"
    if held.inside:
        return "inside"
    if held.off is None:
        return "outside a range that ends at 0"
    share = 100 * abs(held.off)
    return f"off by {'+' if held.off > 0 else '−'}{f'{share:.1f}' if share >= 0.1 else f'{max(share, 0.01):.1g}'} %"
