"""Plots with a row per run: the axis of runs, and quantiles drawn along it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.report.figures import tier_text
from efficient_lmcache.report.figures_runs import Link, thresholds_text
from efficient_lmcache.report.latency import Quantiles
from efficient_lmcache.report.table import RunRow


@dataclass(frozen=True, slots=True)
class RowAxis:
    """Runs from top to bottom, named by what was varied."""

    rows: tuple[RunRow, ...]

    @classmethod
    def of(cls, rows: Sequence[RunRow]) -> RowAxis:
        return cls(tuple(rows))

    def place(self, row: RunRow) -> int:
        return next(index for index, one in enumerate(self.rows) if one.directory == row.directory)

    def label(self, row: RunRow) -> str:
        """Admission and tier, the pool where it varies, and the repeat."""
        words = {"none": "offload", "recompute": "recompute"}.get(row.admission, row.admission)
        if row.connector == "lmcache":
            words += " (LMCache)"
        thresholds = thresholds_text(row)
        words += f" {thresholds}" if thresholds else ""
        tier = f", {tier_text(row.host_gib_per_rank)}" if row.host_gib_per_rank else ""
        pool = f", A {row.active_pool}" if len({one.active_pool for one in self.rows}) > 1 else ""
        repeat = f", run {row.repeat}" if row.repeat > 1 else ""
        return words + tier + pool + repeat

    def layout(self) -> dict[str, Any]:
        return {
            "tickvals": list(range(len(self.rows))),
            "ticktext": [self.label(row) for row in self.rows],
            "range": [len(self.rows) - 0.4, -0.7],
            "showgrid": False,
        }

    @property
    def height_rem(self) -> float:
        return 5.5 + 2.6 * len(self.rows)

    @property
    def above_px(self) -> int:
        """From a row's middle to just above its bar of half a row."""
        return 10

    def mark_at(self, value: float) -> dict[str, Any]:
        return {
            "type": "line", "x0": value, "x1": value, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
            "line": {"width": 1, "dash": "dash", "color": "@quiet"},
        }  # fmt: skip


def whiskers(
    runs: Sequence[tuple[RunRow, Quantiles]],
    axis: RowAxis,
    colour: Callable[[RunRow], str],
    text: Callable[[RunRow, Quantiles], str],
    link: Link,
) -> list[dict[str, Any]]:
    """Per run a thin line p10 to p90, a thick one p25 to p75, and the median, which carries the hover text."""
    traces: list[dict[str, Any]] = []
    for row, found in runs:
        for low, high, width in ((found.p10, found.p90, 1.5), (found.p25, found.p75, 9)):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [low, high],
                    "y": [axis.place(row)] * 2,
                    "line": {"width": width, "color": f"@{colour(row)}"},
                    "opacity": 1 if width < 2 else 0.45,
                    "hoverinfo": "skip",
                }
            )
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [found.p50 for _, found in runs],
            "y": [axis.place(row) for row, _ in runs],
            "marker": {"symbol": "line-ns", "size": 15, "line": {"width": 2.5, "color": "@ink"}},
            "hoverinfo": "text",
            "hovertext": [text(row, found) for row, found in runs],
            "customdata": [link(row.directory) for row, _ in runs],
        }
    )
    return traces
