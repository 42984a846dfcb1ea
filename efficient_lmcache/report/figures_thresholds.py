"""Figure 5: new chunks per request, and what other kappa and theta would have decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from efficient_lmcache.report.figures import Figure, Panel, hover, key_of, line_swatch, marker
from efficient_lmcache.report.figures_runs import Link, percent, row_text
from efficient_lmcache.report.markup import Html, element
from efficient_lmcache.report.table import RunRow
from efficient_lmcache.report.thresholds import NEW_CHUNK_BINS, Thresholds

Sensitive = tuple[RunRow, Thresholds]
Dashes = dict[str, tuple[str, str]]  # a run's directory: its colour and dash
_DASHES = ("solid", "dash", "dot", "dashdot")
_MOST_RUNS = 4


def shown_runs(runs: Sequence[Sensitive], *admissions: str) -> list[Sensitive]:
    """The runs that a plot has room for: those of the first of the admissions that ran; the extreme tiers."""
    first = [pair for pair in runs if pair[0].repeat == 1]
    for admission in admissions:
        chosen = sorted(
            (pair for pair in first if pair[0].admission == admission), key=lambda pair: pair[0].host_gib_per_rank
        )
        if chosen:
            half = _MOST_RUNS // 2
            return chosen if len(chosen) <= _MOST_RUNS else chosen[:half] + chosen[-half:]
    return list(runs[:_MOST_RUNS])


def sensitivity(runs: Sequence[Sensitive], link: Link) -> Figure:
    shown = shown_runs(runs, "fixed", "conditioned", "none")
    evicting = [pair for pair in runs if pair[1].reports_evicting]
    theta = shown_runs(evicting, "conditioned", "fixed", "none") if evicting else []
    dashes = _dashes([row for row, _ in (*shown, *theta)])
    panels = [_new_chunks(shown, dashes, link), _write_thresholds(shown, dashes, link)]
    if theta:
        panels.append(_occupancy_thresholds(theta, dashes, link))
    caption = (
        "The recorded decisions, decided again under other thresholds: what κ and θ would have selected on this "
        "stream, not what the stream would then have been."
    )
    return Figure(tuple(panels), caption, _key([row for row, _ in (*shown, *theta)], dashes))


def _dashes(rows: Sequence[RunRow]) -> Dashes:
    """One for each run of an admission, the same in all panels."""
    dashes: Dashes = {}
    for row in {row.directory: row for row in rows}.values():
        earlier = sum(of == row.admission for of, _ in dashes.values())
        dashes[row.directory] = (row.admission, _DASHES[earlier % len(_DASHES)])
    return dashes


def _new_chunks(runs: Sequence[Sensitive], dashes: Dashes, link: Link) -> Panel:
    data = [
        {
            **_line(dashes, row),
            "x": list(NEW_CHUNK_BINS),
            "y": [100 * count / max(found.decisions, 1) for count in found.new_chunks],
            "hovertext": [
                hover(row.name, row_text(row), f"{count:,} of {found.decisions:,} requests have u = {bin_}")
                for bin_, count in zip(NEW_CHUNK_BINS, found.new_chunks, strict=True)
            ],
            "customdata": [link(row.directory)] * len(NEW_CHUNK_BINS),
        }
        for row, found in runs
    ]
    words = "; ".join(
        f"{row_text(row)}: {percent(found.at_most_one_new_chunk / max(found.decisions, 1))} need at most one"
        for row, found in runs
    )
    layout = {
        "xaxis": {
            "type": "category",
            "title": {"text": "New full chunks u"},
            "tickangle": -45,
            "tickfont": {"size": 11},
        },
        "yaxis": {"rangemode": "tozero"},
    }
    return Panel("Requests by new full chunks (%)", f"Requests by new full chunks. {words}.", data, layout)


def _write_thresholds(runs: Sequence[Sensitive], dashes: Dashes, link: Link) -> Panel:
    data = []
    for row, found in runs:
        known = [one for one in found.write_thresholds if one.declined_share is not None]
        data.append(
            {
                **_line(dashes, row),
                "x": [str(one.write_threshold_chunks) for one in known],
                "y": [100 * (one.declined_share or 0) for one in known],
                "hovertext": [
                    hover(
                        row.name,
                        row_text(row),
                        f"κ = {one.write_threshold_chunks}: declined {one.declined:,} requests",
                        f"with {one.declined_chunks:,} chunks, {percent(one.declined_share)} of new-chunk writes",
                    )
                    for one in known
                ],
                "customdata": [link(row.directory)] * len(known),
            }
        )
    kappas = sorted({one.write_threshold_chunks for _, found in runs for one in found.write_thresholds})
    words = "; ".join(
        f"{row_text(row)}: "
        + ", ".join(f"{percent(one.declined_share)} at {one.write_threshold_chunks}" for one in found.write_thresholds)
        for row, found in runs
    )
    layout = {
        "xaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [str(kappa) for kappa in kappas],
            "title": {"text": "Write threshold κ (chunks)"},
        },
        "yaxis": {"rangemode": "tozero"},
    }
    return Panel("Writes declined (% of new chunks)", f"Declined writes by κ. {words}.", data, layout)


def _occupancy_thresholds(runs: Sequence[Sensitive], dashes: Dashes, link: Link) -> Panel:
    data = [
        {
            **_line(dashes, row, marks=False),
            "x": [one.occupancy_threshold for one in found.occupancy_thresholds],
            "y": [100 * one.changed_share for one in found.occupancy_thresholds],
            "hovertext": [
                hover(
                    row.name,
                    row_text(row),
                    f"θ = {one.occupancy_threshold:.2f}: {one.changed:,} of {found.decisions:,} decisions change",
                )
                for one in found.occupancy_thresholds
            ],
            "customdata": [link(row.directory)] * len(found.occupancy_thresholds),
        }
        for row, found in runs
    ]
    lowest = "; ".join(
        f"{row_text(row)}: lowest occupancy of {found.reports_evicting:,} evicting reports {found.occupancy_lowest:.3f}"
        for row, found in runs
        if found.occupancy_lowest is not None
    )
    most = max(100 * one.changed_share for _, found in runs for one in found.occupancy_thresholds)
    layout = {
        "xaxis": {"title": {"text": "Occupancy threshold θ"}},
        "yaxis": {"range": [0, max(5.0, 1.08 * most)]},
        "shapes": [
            {
                "type": "line", "x0": theta, "x1": theta, "yref": "paper", "y0": 0, "y1": 1,
                "line": {"width": 1, "dash": "dot", "color": "@quiet"},
            }
            for theta in {found.occupancy_threshold for _, found in runs}
        ],
    }  # fmt: skip
    return Panel("Decisions whose pressure changes (%)", f"By θ. {lowest}.", data, layout)


def _key(rows: Sequence[RunRow], dashes: Dashes) -> Html:
    """A line per run, once."""
    return key_of(
        element("li", line_swatch(*dashes[row.directory]), row_text(row))
        for row in {row.directory: row for row in rows}.values()
    )


def _line(dashes: Dashes, row: RunRow, *, marks: bool = True) -> dict[str, Any]:
    mark = marker(row.admission)
    line = {
        "type": "scatter",
        "mode": "lines",
        "line": {"width": 1.5, "dash": dashes[row.directory][1], "color": mark["color"]},
        "hoverinfo": "text",
    }
    return {**line, "mode": "lines+markers", "marker": {**mark, "size": 7}, "cliponaxis": False} if marks else line
