"""Figure 6: when the chunks that admission declined are referenced again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from efficient_lmcache.report.declined import DeclinedReuse
from efficient_lmcache.report.figures import BAR_PATH, Figure, Panel, hover, key_of, swatch
from efficient_lmcache.report.figures_rows import RowAxis, whiskers
from efficient_lmcache.report.figures_runs import Link, percent
from efficient_lmcache.report.markup import element
from efficient_lmcache.report.table import RunRow

Declined = tuple[RunRow, DeclinedReuse]
_RATIO_TICKS = [one * 10.0**power for power in range(-4, 4) for one in (1, 2, 5)]
_PARTS = (("never", "never again", "never"), ("beyond", "D ≥ K_H", "conditioned"), ("within", "D < K_H", "fixed"))


def reuse_of_declined(runs: Sequence[Declined], link: Link) -> Figure:
    """Of the runs that declined chunks, one row each."""
    axis = RowAxis.of([row for row, _ in runs])
    panels = [_shares(runs, axis, link)]
    again = [(row, found) for row, found in runs if found.ratio is not None]
    if again:
        panels.append(_distances(again, axis, link))
    items = [element("li", swatch(BAR_PATH, colour), label) for _, label, colour in _PARTS]
    caption = (
        "Declining a chunk costs no hit where it is never referenced again, or only at a reuse distance D of at least "
        "the tier's K_H chunks (Proposition 1); above each bar the share of chunks that meets this. Right: thin lines "
        "from the 10th to the 90th percentile, thick ones between the quartiles."
    )
    return Figure(tuple(panels), caption, key_of(items))


def _shares(runs: Sequence[Declined], axis: RowAxis, link: Link) -> Panel:
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [axis.place(row) for row, _ in runs],
            "x": [100 * getattr(found, part) / max(found.chunks, 1) for _, found in runs],
            "marker": {"color": f"@{colour}"},
            "width": 0.5,
            "hoverinfo": "text",
            "hovertext": [
                hover(
                    row.name,
                    axis.label(row),
                    f"{label}: {getattr(found, part):,} of {found.chunks:,} declined chunks",
                    f"condition of Proposition 1: {percent(found.condition_share)}",
                    f"K_H = {found.capacity_chunks:,} chunks",
                )
                for row, found in runs
            ],
            "customdata": [link(row.directory) for row, _ in runs],
        }
        for part, label, colour in _PARTS
    ]
    words = "; ".join(f"{axis.label(row)}: {percent(found.condition_share)}" for row, found in runs)
    ink = {"size": 11.5, "color": "@ink"}
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "Declined chunks (%)"}, "range": [0, 100]},
        "yaxis": axis.layout(),
        "annotations": [
            {
                "x": 100, "y": axis.place(row), "text": percent(found.condition_share), "showarrow": False,
                "xanchor": "right", "yanchor": "bottom", "yshift": axis.above_px, "font": ink,
            }
            for row, found in runs
        ],
    }  # fmt: skip
    title = "Declined chunks by next reuse distance D"
    return Panel(
        title, f"Share that meets the condition of Proposition 1. {words}.", data, layout, height_rem=axis.height_rem
    )


def _distances(runs: Sequence[Declined], axis: RowAxis, link: Link) -> Panel:
    data = whiskers(
        [(row, found.ratio) for row, found in runs if found.ratio is not None],
        axis,
        lambda row: "conditioned" if row.admission == "conditioned" else "fixed",
        lambda row, ratio: hover(
            row.name,
            axis.label(row),
            f"{ratio.count:,} declined chunks referenced again",
            f"D / K_H: median {ratio.p50:.2f}, quartiles {ratio.p25:.2f} – {ratio.p75:.2f}",
        ),
        link,
    )
    words = "; ".join(f"{axis.label(row)}: median {found.ratio.p50:.2f}" for row, found in runs if found.ratio)
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "D / K<sub>H</sub>"},
            "tickvals": _RATIO_TICKS,
            "showgrid": True,
        },
        "yaxis": axis.layout(),
        "shapes": [axis.mark_at(1.0)],
    }
    return Panel("Those referenced again", f"D over K_H. {words}.", data, layout, height_rem=axis.height_rem)
