"""The capacity curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from efficient_lmcache.sizing.plan import Plan
from efficient_lmcache.sizing.prediction import GIB, Prediction, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COMPUTED, _RESTORED, _MARK = "#b5432f", "#1f6f78", "#333333"
_SHOWN_BEYOND = 4.0  # times the larger of working set and recommendation
_SHOWN_BELOW = 6.0  # the smaller of them over the axis' left end


def draw(plan: Plan, path: Path) -> None:
    """Write computed prefill and restored tokens by host capacity, with their ranges, as PNG, SVG or PDF."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    low, high = _limits(plan)
    # A log axis has no zero: the tier of no size is drawn at its left end.
    points = [plan.curve[0]._replace(host_gib=low), *(point for point in plan.curve if point.host_gib > low)]
    unit, suffix = _unit(plan)
    for label, colour, spans in (
        ("computed prefill", _COMPUTED, [point.computed_prefill_tokens for point in points]),
        ("restored from host", _RESTORED, [point.restored_tokens for point in points]),
    ):
        _band(axes, points, spans, unit, label, colour)
    if plan.transition_gib is not None:
        axes.axvspan(*plan.transition_gib, color="#000000", alpha=0.07, linewidth=0, label="10–90 % of the saving")
    if plan.working_set_bytes:
        scale = plan.working_set_bytes / GIB
        axes.axvline(scale, color=_MARK, linewidth=1.2, linestyle="--", label=f"working set (Eq. 5): {scale:.3g} GiB")
    if plan.recommended_gib:
        axes.axvline(
            plan.recommended_gib, color=_MARK, linewidth=1.6, label=f"recommended: {plan.recommended_gib:g} GiB"
        )
    _style(axes, plan, low, high, suffix)
    figure.savefig(path, dpi=160)


def _band(axes: Axes, points: list[Prediction], spans: list[Span], unit: float, label: str, colour: str) -> None:
    capacities = [point.host_gib for point in points]
    axes.fill_between(
        capacities,
        [span.low / unit for span in spans],
        [span.high / unit for span in spans],
        color=colour,
        alpha=0.18,
        linewidth=0,
    )
    axes.plot(
        capacities, [span.expected / unit for span in spans], color=colour, linewidth=2, marker="o", ms=3, label=label
    )


def _style(axes: Axes, plan: Plan, low: float, high: float, suffix: str) -> None:
    deployment = plan.deployment
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(bottom=0)
    ticks = _ticks(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("host tier per rank (GiB)")
    axes.set_ylabel(f"tokens ({suffix})")
    axes.set_title(
        f"{plan.workload}: {deployment.pool.active_pool} agents of {plan.mean_prompt_tokens:,.0f} tokens "
        f"on {deployment.ranks} x {deployment.hardware.name}",
        fontsize=10,
    )
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    legend: Any = axes.figure
    legend.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _limits(plan: Plan) -> tuple[float, float]:
    """The capacities shown: around the transition, not up to a tier that holds everything ever sent."""
    marks = [mark for mark in (plan.working_set_bytes / GIB, plan.recommended_gib) if mark > 0]
    marks += [gib for gib in plan.deployment.host_gib if gib > 0]
    largest = plan.curve[-1].host_gib
    if not marks:
        return largest / 100, largest
    return min(marks) / _SHOWN_BELOW, max(min(largest, max(marks) * _SHOWN_BEYOND), max(marks) * 1.1)


def _unit(plan: Plan) -> tuple[float, str]:
    most = max(
        max(point.computed_prefill_tokens.high for point in plan.curve),
        max(point.restored_tokens.high for point in plan.curve),
    )
    return (1e9, "billions") if most >= 2e9 else (1e6, "millions") if most >= 2e6 else (1e3, "thousands")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    exponents = range(-6, 9)
    return [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
