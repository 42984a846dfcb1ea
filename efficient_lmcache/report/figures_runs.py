"""What a run is called, where it lies, and what hovering over its point says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from efficient_lmcache.report.capacity import Series
from efficient_lmcache.report.figures import hover, mark_name, marker, tier_text
from efficient_lmcache.report.predictions import PredictedRun
from efficient_lmcache.report.table import RunRow

Link = Callable[[str], str]
"""The relative address of a run directory."""


def tokens_text(tokens: float | None) -> str:
    if tokens is None:
        return "–"
    return (
        f"{tokens / 1e6:,.3f} M" if tokens >= 1e6 else f"{tokens / 1e3:,.1f} K" if tokens >= 1e4 else f"{tokens:,.0f}"
    )


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds >= 600:
        return f"{seconds / 60:,.1f} min"
    return (
        f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.0f} ms"
    )


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share:.{digits}%}".replace("%", " %")


def gamma_text(gamma: float | None) -> str:
    return "–" if gamma is None else f"{gamma:.2f}"


def row_text(row: RunRow) -> str:
    """A run by what was varied, not how its directory is called."""
    configuration = row.configuration.replace(" write admission", "").replace(" admission", "")
    return f"{configuration}, {tier_text(row.host_gib_per_rank)}, A {row.active_pool}"


def thresholds_text(run: RunRow | PredictedRun) -> str:
    """kappa and theta where the run set them: what else tells it from its neighbours."""
    kappa, theta = run.write_threshold_chunks, run.occupancy_threshold
    return ", ".join(([f"κ {kappa}"] if kappa is not None else []) + ([f"θ {theta:g}"] if theta is not None else []))


def named_by_thresholds(texts: list[str], *, lines: bool = False) -> dict[str, Any]:
    """A Plotly mode of markers with the texts beside them, where there are any."""
    mode = "lines+markers" if lines else "markers"
    if not any(texts):
        return {"mode": mode}
    font = {"size": 11, "color": "@quiet"}
    apart = [f"\u2002{text}" if text else "" for text in texts]
    return {"mode": f"{mode}+text", "text": apart, "textposition": "middle right", "textfont": font}


def repeated(series: Iterable[Series]) -> str | None:
    """The mark of runs that were repeated; None if none were."""
    return next((mark_name(one.admission, one.connector) for one in series if one.repeats), None)


def run_hover(row: RunRow, *more: str) -> str:
    """Run, pool, tier, gamma_H, admission and what was measured."""
    lines = [
        row.configuration + (f", repeat {row.repeat}" if row.repeat > 1 else ""),
        f"A {row.active_pool} · host tier {tier_text(row.host_gib_per_rank)} per rank · γ_H {gamma_text(row.gamma_h)}",
        *more,
        f"makespan {seconds_text(row.makespan_s)}",
        f"computed prefill {tokens_text(row.computed_prefill_tokens)} tokens",
    ]
    if row.admission != "recompute":
        lines += [
            f"restored {tokens_text(row.restored_tokens_per_rank)}, stored {tokens_text(row.stored_tokens_per_rank)}"
            " tokens per rank",
            f"declined {row.declined:,} of {row.decisions:,} requests" if row.decisions else "no decisions logged",
        ]
    return hover(row.name, *lines)


def row_points(
    rows: Iterable[RunRow],
    x: Callable[[RunRow], float | None],
    y: Callable[[RunRow], float | None],
    link: Link,
    *,
    line: bool = False,
) -> list[dict[str, Any]]:
    """Traces of runs of one configuration: filled first runs, joined and named by their thresholds where `line`;
    hollow repeats. Runs without an x or y are left out.
    """
    known = [row for row in rows if x(row) is not None and y(row) is not None]
    traces = []
    for hollow in (False, True):
        shown = [row for row in known if (row.repeat > 1) == hollow]
        if not shown:
            continue
        mark = marker(mark_name(shown[0].admission, shown[0].connector), hollow=hollow)
        joined = line and not hollow and len(shown) > 1
        names = [thresholds_text(row) if line else "" for row in shown]
        traces.append(
            {
                "type": "scatter",
                **named_by_thresholds(names, lines=joined),
                "x": [x(row) for row in shown],
                "y": [y(row) for row in shown],
                "marker": mark,
                **({"line": {"width": 1.5, "color": mark["color"]}} if joined else {}),
                "cliponaxis": False,
                "hoverinfo": "text",
                "hovertext": [run_hover(row) for row in shown],
                "customdata": [link(row.directory) for row in shown],
            }
        )
    return traces
