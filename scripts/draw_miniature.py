"""The README's picture: what the miniature's runs at A = 16 computed and wrote, from docs/results/miniature.md's table.

python scripts/draw_miniature.py
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_DOCS = Path(__file__).parent.parent / "docs"
_POLICIES = {  # the table's name: label, colour
    "offload": ("LMCache: store everything (none)", "#c44e52"),
    "fixed": ("store extensions only (fixed)", "#a8a8a8"),
    "conditioned": ("Efficient-LMCache (conditioned)", "#2a7f62"),
}
_PRESSURES = (2.28, 1.14, 0.28)
_BAR = 0.27  # of the distance between two pressures


class Run(NamedTuple):
    """One measured row: tokens in millions, stored ones per rank."""

    policy: str
    gamma_h: float | None
    computed: float
    stored: float


def main() -> None:
    runs = read_runs((_DOCS / "results" / "miniature.md").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    _bars(axes[0], "Prefill computed, M tokens", runs, "computed")
    _bars(axes[1], "Written to host memory, M tokens", runs, "stored")
    recomputed = mean(run.computed for run in runs if run.policy == "recompute")
    axes[0].axhline(recomputed, color="#777777", linestyle=":", linewidth=1)
    axes[0].annotate("without offloading", (2.45, recomputed), (0, 4), textcoords="offset points", ha="right")
    axes[1].legend(frameon=False, loc="upper right")
    figure.savefig(_DOCS / "images" / "miniature.png", dpi=130)


def _bars(axis: Axes, title: str, runs: list[Run], field: str) -> None:
    for number, (policy, (label, colour)) in enumerate(_POLICIES.items()):
        values = [
            [getattr(run, field) for run in runs if (run.policy, run.gamma_h) == (policy, pressure)]
            for pressure in _PRESSURES
        ]
        places = [place + (number - 1) * _BAR for place, measured in enumerate(values) if measured]
        bars = axis.bar(places, [mean(each) for each in values if each], _BAR * 0.92, color=colour, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
        for place, measured in enumerate(values):
            if not measured:
                axis.annotate("not run", (place + (number - 1) * _BAR, 0.08), rotation=90, ha="center", fontsize=8)
    axis.set_xticks(range(len(_PRESSURES)), [f"γ_H = {pressure:g}" for pressure in _PRESSURES])
    axis.set_ylim(0, 5.9)
    axis.set_title(title, loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)


def read_runs(page: str) -> list[Run]:
    """The table's rows at A = 16; LMCache's own connector and ours without admission are both `offload`."""
    runs = []
    for row in re.findall(r"^\| ((?:recompute|offload|fixed|conditioned).*) \|$", page, re.MULTILINE):
        name, pool, _, gamma_h, _, computed, _, _, _, stored, *_ = (cell.strip() for cell in row.split("|"))
        if pool == "16":
            policy = re.match(r"\w+", name)
            assert policy is not None
            runs.append(Run(policy[0], None if gamma_h == "–" else float(gamma_h), float(computed), float(stored)))
    return runs


if __name__ == "__main__":
    main()
