"""The sources' points on the simulator's curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from trends_tables import CLIFFS, NAPKINS, TIERS, Row, by, select

mpl.use("Agg")
from matplotlib import pyplot as plt

_STYLES = {"write-through": "o-", "write-back": "s--", "LMCache": "d:"}
_MARK = {"linestyle": "none", "marker": "x", "markersize": 8, "markeredgewidth": 2}


def write_figures(rows: list[Row], directory: Path) -> None:
    """simulator-cliffs.png, simulator-tiers.png and simulator-cluster.png, of the studies that are there."""
    directory.mkdir(parents=True, exist_ok=True)
    if select(rows, "cliff"):
        _save(_cliffs(rows), directory / "simulator-cliffs.png")
    if select(rows, "tier"):
        _save(_tiers(rows), directory / "simulator-tiers.png")
    if all(select(rows, study) for study in ("retention", "routing", "link")):
        _save(_cluster(rows), directory / "simulator-cluster.png")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")


def _cliffs(rows: list[Row]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, server in zip(axes, ("Qwen3-8B", "Qwen3.5-9B"), strict=True):
        for number, traffic in enumerate(("synthetic", "AgentX")):
            sweep = select(rows, "cliff", server=server, traffic=traffic)
            color = f"C{number}"
            label = traffic if traffic == "synthetic" else "recorded sessions"
            axis.plot(*_columns(sweep, "agents", "hit_rate"), "o-", color=color, label=f"{label}, simulated")
            published = CLIFFS[server, traffic]
            axis.plot(*zip(*published.items(), strict=True), color=color, label=f"{traffic}, source", **_MARK)
            axis.axvline(NAPKINS[server, traffic], color=color, linestyle=":", linewidth=1)
        axis.set(title=f"{server} (dotted: pool / context)", xlabel="agents at once", ylim=(0, 1))
    axes[0].set_ylabel("hit rate")
    axes[0].legend(fontsize=8)
    return figure


def _tiers(rows: list[Row]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, server in zip(axes, ("Qwen3-8B", "Qwen3.5-9B, 256 state slots"), strict=True):
        for (ratio, policy), sweep in by(select(rows, "tier", server=server), "ratio", "policy").items():
            color, style = f"C{ratio:.0f}", _STYLES[policy]
            label = f"{ratio:.0f} × GPU pool, {policy}" if ratio else "none"
            axis.plot(*_columns(sweep, "agents", "hit_rate"), style, color=color, label=label)
            if published := TIERS[server, ratio, policy]:
                axis.plot(*zip(*published.items(), strict=True), color=color, **_MARK)
        axis.set(title=f"{server} (crosses: source)", xlabel="agents at once", ylim=(0, 1))
        axis.legend(fontsize=8, title="host tier", loc="lower left")
    axes[0].set_ylabel("hit rate")
    return figure


def _cluster(rows: list[Row]) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    retention, routes, links = select(rows, "retention"), select(rows, "routing"), select(rows, "link")
    _pair_of_curves(axes[0, 0], retention, "retention_s", ("tier_hit_rate", "held_tb"), "retention window, s")
    axes[0, 0].set_ylim(0, 1)
    for name, axis, label in (
        ("request_hit_rate", axes[0, 1], "request hit rate"),
        ("latency_p90_s", axes[1, 0], "p90 latency, s"),
    ):
        for (shared, route), sweep in by(routes, "shared", "route").items():
            name_of = f"{'shared' if shared else 'local'}, by {route}"
            axis.plot(*_columns(sweep, "per_hour_and_node", name), "o-", label=name_of)
        axis.set(xlabel="new sessions an hour and node", ylabel=label, ylim=(0, None))
        axis.legend(fontsize=8)
    limited = [{**row, "times": row["link_gb_s"] / links[0]["read_gb_s"]} for row in links[1:]]
    _pair_of_curves(axes[1, 1], limited, "times", ("ttft_p99_s", "latency_p90_s"), "link / mean read demand")
    axes[1, 1].set_yscale("log")
    return figure


def _pair_of_curves(axis: Any, rows: list[Row], x: str, names: tuple[str, str], label: str) -> None:
    second = axis.twinx()
    for number, (name, where) in enumerate(zip(names, (axis, second), strict=True)):
        where.plot(*_columns(rows, x, name), "o-", color=f"C{number}")
        where.set_ylabel(name, color=f"C{number}")
    axis.set(xscale="log", xlabel=label)


def _columns(rows: list[Row], *names: str) -> list[list[float]]:
    ordered = sorted(rows, key=lambda row: float(row[names[0]]))
    return [[row[name] for row in ordered] for name in names]
