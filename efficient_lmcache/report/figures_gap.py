"""Section 1's gap between two turns of an agent, and what a tier loses in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from efficient_lmcache.report.figures import BAR_PATH, MARKS, Figure, Panel, hover, key_of, mark_name, swatch
from efficient_lmcache.report.figures_rows import RowAxis, whiskers
from efficient_lmcache.report.figures_runs import Link, percent, seconds_text
from efficient_lmcache.report.gap import EvictedBeforeReuse, ReuseGap
from efficient_lmcache.report.markup import element
from efficient_lmcache.report.runs import Absent
from efficient_lmcache.report.table import RunRow

GapRun = tuple[RunRow, ReuseGap, EvictedBeforeReuse | Absent]
_RING = "M7 3a4 4 0 1 0 0 8a4 4 0 1 0 0-8z"


def gaps(runs: Sequence[GapRun], link: Link) -> Figure:
    axis = RowAxis.of([row for row, _, _ in runs])
    panels = [_gap(runs, axis, link)]
    evicted = [
        (row, found)
        for row, _, found in runs
        if isinstance(found, EvictedBeforeReuse) and found.evicted_share is not None
    ]
    if evicted:
        panels.append(_evicted(evicted, axis, link))
    items = [
        element("li", swatch("M6 0h2.4v14h-2.4z", "ink"), "median gap on the server"),
        element("li", swatch(_RING, "quiet", hollow=True), "median of the agent's own time"),
        element("li", swatch(BAR_PATH, "quiet"), "evicted and computed again"),
        element("li", swatch(BAR_PATH, "range"), "evicted, but still in the GPU's cache"),
    ]
    caption = (
        "The gap runs from the end of a task's response to the first lookup of its next call; its own part is the "
        "agent's and its tools' time as replayed. Thin lines from the 10th to the 90th percentile, thick ones between "
        "the quartiles. Right: of the chunks that calls wrote to the tier, those gone when the agent called again."
    )
    return Figure(tuple(panels), caption, key_of(items))


def _gap(runs: Sequence[GapRun], axis: RowAxis, link: Link) -> Panel:
    data = whiskers(
        [(row, gap.gap_s) for row, gap, _ in runs],
        axis,
        lambda row: MARKS[mark_name(row.admission, row.connector)].colour,
        lambda row, gap: hover(
            row.name,
            axis.label(row),
            f"gap: median {seconds_text(gap.p50)}, 90th percentile {seconds_text(gap.p90)}",
            f"{gap.count:,} pairs of calls",
        ),
        link,
    )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [gap.own_s.p50 for _, gap, _ in runs],
            "y": [axis.place(row) for row, _, _ in runs],
            "marker": {
                "symbol": "circle-open",
                "size": 8,
                "color": "@quiet",
                "line": {"width": 1.75, "color": "@quiet"},
            },
            "hoverinfo": "text",
            "hovertext": [
                hover(row.name, axis.label(row), f"own time: median {seconds_text(gap.own_s.p50)}")
                for row, gap, _ in runs
            ],
            "customdata": [link(row.directory) for row, _, _ in runs],
        }
    )
    longest = max(max(gap.gap_s.p90, gap.own_s.p50) for _, gap, _ in runs)
    words = "; ".join(f"{axis.label(row)}: median {seconds_text(gap.gap_s.p50)}" for row, gap, _ in runs)
    layout = {
        "xaxis": {
            "title": {"text": "Seconds between two turns"},
            "range": [-0.02 * longest, 1.03 * longest],
            "showgrid": True,
        },
        "yaxis": axis.layout(),
    }
    return Panel("Gap between an agent's turns (s)", f"{words}.", data, layout, height_rem=axis.height_rem)


def _evicted(runs: Sequence[tuple[RunRow, EvictedBeforeReuse]], axis: RowAxis, link: Link) -> Panel:
    colours = [f"@{MARKS[mark_name(row.admission, row.connector)].colour}" for row, _ in runs]
    recomputed = [100 * (found.recomputed_share or 0) for _, found in runs]
    evicted = [100 * (found.evicted_share or 0) for _, found in runs]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [axis.place(row) for row, _ in runs],
            "x": shares,
            "width": 0.5,
            "marker": {"color": colours, "opacity": opacity},
            **text,
            "hoverinfo": "text",
            "hovertext": [
                hover(
                    row.name,
                    axis.label(row),
                    f"{found.evicted_chunks:,} of {found.written_chunks:,} written chunks evicted before the next call",
                    f"{found.recomputed_chunks:,} computed again ({percent(found.recomputed_share)})",
                )
                for row, found in runs
            ],
            "customdata": [link(row.directory) for row, _ in runs],
        }
        for shares, opacity, text in (
            (recomputed, 1.0, {}),
            (
                [gone - again for gone, again in zip(evicted, recomputed, strict=True)],
                0.4,
                {
                    "text": [percent(found.evicted_share) for _, found in runs],
                    "textposition": "outside",
                    "cliponaxis": False,
                },
            ),
        )
    ]
    words = "; ".join(
        f"{axis.label(row)}: {percent(found.evicted_share)}, computed again {percent(found.recomputed_share)}"
        for row, found in runs
    )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "Written chunks (%)"}, "range": [0, 125], "tickvals": [0, 25, 50, 75, 100]},
        "yaxis": axis.layout(),
    }
    return Panel("Evicted before the next call", f"{words}.", data, layout, height_rem=axis.height_rem)
