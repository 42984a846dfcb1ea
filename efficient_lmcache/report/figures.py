"""What all figures of the page share: panels, the marks of the admissions, axes, units.

A figure is plain Plotly JSON. Under a key that ends in `color`, `"@name"` stands for the colour `--name` of page.css,
so that one figure is drawn in light and in dark mode. What comes from runs is escaped: Plotly reads markup in text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.report.markup import Html, element, escaped, joined

GIB = 2**30
MEBI = 1024.0


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Attributes:
        title: above it, with the quantity and its unit.
        description: what it shows, for those who cannot see it.
        data, layout: Plotly's.
        height_rem: None for the usual one.
    """

    title: str
    description: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height_rem: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that are read together, with their common key and caption."""

    panels: tuple[Panel, ...]
    caption: str
    key: Html | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """How the runs of an admission are drawn everywhere.

    Attributes:
        colour: its name in page.css.
        symbol, size: Plotly's.
        path: of an SVG of 14 x 14 with the same shape.
    """

    label: str
    colour: str
    symbol: str
    size: int
    path: str


MARKS = {
    "recompute": Mark("Recompute (no host tier)", "recompute", "square", 9, "M2.5 2.5h9v9h-9z"),
    "none": Mark(
        "Offload (no write admission)", "none", "circle", 10, "M7 1.6a5.4 5.4 0 1 0 0 10.8a5.4 5.4 0 1 0 0-10.8z"
    ),
    "lmcache": Mark("Offload, LMCache's own connector", "none", "cross", 10, "M5 2h4v3h3v4h-3v3h-4v-3h-3v-4h3z"),
    "fixed": Mark("Fixed write admission", "fixed", "triangle-up", 11, "M7 1.2l6 10.8h-12z"),
    "conditioned": Mark("Conditioned admission", "conditioned", "diamond", 11, "M7 .6l6.4 6.4l-6.4 6.4l-6.4-6.4z"),
}


def mark_name(admission: str, connector: str) -> str:
    """The key into MARKS of a run."""
    return "lmcache" if connector == "lmcache" and admission == "none" else admission


def marker(name: str, *, hollow: bool = False) -> dict[str, Any]:
    """Plotly's marker of runs of MARKS[name]; repeats are hollow."""
    mark = MARKS[name]
    colour = f"@{mark.colour}"
    symbol = mark.symbol + ("-open" if hollow else "")
    return {"symbol": symbol, "size": mark.size, "color": colour, "line": {"width": 1.75, "color": colour}}


def key(names: Iterable[str], *more: Html, repeated: str | None = None, shade: bool = False) -> Html:
    """The figure's key: the marks in the paper's order, a hollow one of `repeated`, `more`, the shaded region."""
    used = set(names)
    items = [element("li", swatch(mark.path, mark.colour), mark.label) for name, mark in MARKS.items() if name in used]
    if repeated:
        mark = MARKS[repeated]
        items.append(element("li", swatch(mark.path, mark.colour, hollow=True), "hollow: independent repeat"))
    items += more
    if shade:
        items.append(element("li", element("span", class_="swatch"), "capacity above the working-set estimate"))
    return key_of(items)


def key_of(items: Iterable[Html]) -> Html:
    return element("ul", joined(items), class_="key")


def swatch(path: str, colour: str, *, hollow: bool = False) -> Html:
    name = f"var(--{colour})"
    style = f"fill:none;stroke:{name};stroke-width:1.75" if hollow else f"fill:{name}"
    return element(
        "svg", element("path", d=path, style=style), class_="marker", viewBox="0 0 14 14", aria_hidden="true"
    )


def line_swatch(colour: str, dash: str = "solid") -> Html:
    """A line as Plotly dashes it."""
    pattern = {"dash": "5 3.5", "dot": "1.5 2.5", "dashdot": "6 2.5 1.5 2.5"}.get(dash)
    style = f"fill:none;stroke:var(--{colour});stroke-width:2"
    path = element("path", d="M0 7h22", style=style, stroke_dasharray=pattern)
    return element("svg", path, class_="marker long", viewBox="0 0 22 14", aria_hidden="true")


BAR_PATH = "M1 3h12v8h-12z"


def hover(title: str, *lines: str) -> str:
    """A hover text: its title in bold, then a line each."""
    return "<br>".join([f"<b>{escaped(title)}</b>", *map(escaped, lines)])


@dataclass(frozen=True, slots=True)
class Unit:
    """What an axis counts in: `scale` of the base unit each."""

    scale: float
    suffix: str

    def of_value(self, value: float | None) -> float | None:
        return None if value is None else value / self.scale

    def text(self, value: float | None) -> str:
        return "unknown" if value is None else f"{value / self.scale:,.3g} {self.suffix}"


def token_unit(tokens: Iterable[float | None]) -> Unit:
    """Millions, thousands or single tokens, whichever suits the largest of them."""
    largest = max((value for value in tokens if value is not None), default=0)
    return Unit(1e6, "M tokens") if largest >= 1e6 else Unit(1e3, "K tokens") if largest >= 1e4 else Unit(1, "tokens")


def time_unit(seconds: Iterable[float | None]) -> Unit:
    """Minutes or seconds, whichever suits the longest."""
    return Unit(60, "min") if max((value for value in seconds if value is not None), default=0) >= 600 else Unit(1, "s")


@dataclass(frozen=True, slots=True)
class CapacityAxis:
    """Host capacity on a logarithmic axis, "GPU only" one step left of the smallest tier, as in the paper's Figure 2.

    Attributes:
        tiers_gib: the tiers on it, ascending and without zero.
        gpu_only: runs without a tier have a place on it.
    """

    tiers_gib: tuple[float, ...]
    gpu_only: bool

    @classmethod
    def of(cls, host_gib: Iterable[float]) -> CapacityAxis:
        sizes = sorted(set(host_gib))
        return cls(tuple(size for size in sizes if size > 0), 0.0 in sizes)

    def place(self, gib: float) -> float:
        return math.log2(gib) if gib > 0 else self._left - self._step

    @property
    def _left(self) -> float:
        return math.log2(self.tiers_gib[0]) if self.tiers_gib else 0.0

    @property
    def _step(self) -> float:
        """As wide as the mean step between tiers, so that the left end looks like one of them."""
        places = [math.log2(size) for size in self.tiers_gib]
        return min(max((places[-1] - places[0]) / (len(places) - 1), 0.4), 1.2) if len(places) > 1 else 1.0

    @property
    def limits(self) -> tuple[float, float]:
        places = [self.place(size) for size in self.tiers_gib] + ([self.place(0.0)] if self.gpu_only else [])
        margin = 0.35 * self._step
        return min(places, default=0.0) - margin, max(places, default=0.0) + margin

    def layout(self) -> dict[str, Any]:
        labels = {self.place(size): tier_number(size, self.tiers_gib) for size in self._labelled()}
        if self.gpu_only:
            labels[self.place(0.0)] = "GPU<br>only"
        places = sorted(labels)
        return {
            "title": {"text": f"Host tier ({tier_unit(self.tiers_gib)} per rank)"},
            "range": list(self.limits),
            "tickvals": places,
            "ticktext": [labels[place] for place in places],
            "tickangle": 0,
        }

    def words(self, gib: float) -> str:
        return f"{tier_number(gib, self.tiers_gib)} {tier_unit(self.tiers_gib)}" if gib else "GPU only"

    def _labelled(self) -> list[float]:
        """The tiers, but for those whose labels would run into their left neighbour's."""
        kept: list[float] = []
        low, high = self.limits
        for size in self.tiers_gib:
            if not kept or math.log2(size / kept[-1]) > 0.09 * (high - low):
                kept.append(size)
        return kept

    def shade_above(self, gib: float | None) -> list[dict[str, Any]]:
        """The region of tiers above the working-set estimate; none where it is left or right of everything shown."""
        low, high = self.limits
        if not gib or gib <= 0 or math.log2(gib) >= high:
            return []
        left = max(math.log2(gib), low)
        edge = {"type": "line", "x0": left, "x1": left, "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
        return [
            {
                "type": "rect", "x0": left, "x1": high, "yref": "paper", "y0": 0, "y1": 1,
                "fillcolor": "@shade", "line": {"width": 0}, "layer": "below",
            },
            {**edge, "line": {"width": 1, "dash": "dot", "color": "@quiet"}},
        ]  # fmt: skip


def tier_unit(tiers_gib: Sequence[float]) -> str:
    return "MiB" if tiers_gib and max(tiers_gib) < 1 else "GiB"


def tier_number(gib: float, tiers_gib: Sequence[float]) -> str:
    """A tier's size in the unit that suits all of them."""
    return _mebi(gib) if tier_unit(tiers_gib) == "MiB" else f"{gib:,.4g}"


def tier_text(gib: float | None) -> str:
    """A tier's size with its unit; "none" for no tier."""
    if gib is None:
        return "–"
    if gib == 0:
        return "none"
    return f"{_mebi(gib)} MiB" if gib < 1 else f"{gib:,.3g} GiB"


def _mebi(gib: float) -> str:
    return f"{gib * MEBI:,.0f}" if gib * MEBI >= 10 else f"{gib * MEBI:.2g}"
