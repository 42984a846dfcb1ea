"""A plan for people: what to buy, why, and what it rests on."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from efficient_lmcache.sizing.plan import Deployment, Plan
from efficient_lmcache.sizing.prediction import GIB, Prediction, Span

_STEP = 0.03  # of the largest computed prefill: rows of the curve that differ by less are left out


def show(plan: Plan, console: Console) -> None:
    """Print the plan."""
    console.print(_summary(plan))
    console.print(_curve(plan))
    for row in plan.advice:
        console.print(Text.assemble("• ", (f"{row.regime}: ", "bold"), f"{row.finding}: ", (row.action, "bold"), "."))
    console.print()
    for note in (plan.rule, *plan.notes):
        console.print(Text(f"- {note}", style="dim"))


def _summary(plan: Plan) -> Table:
    deployment = plan.deployment
    working_set_gib = plan.working_set_bytes / GIB
    table = Table(show_header=False, box=None)
    rows = {
        "workload": f"{plan.workload}: A = {deployment.pool.active_pool:,}, N = {plan.mean_prompt_tokens:,.0f} tokens",
        "KV per token and rank": f"{deployment.bytes_per_token / 1024:g} KiB",
        "working set per rank": f"{_gib(working_set_gib)} GiB (Eq. 5)",
        "γ_G": f"{plan.gamma_g:,.2f} of {deployment.gpu_kv_tokens:,} GPU KV tokens",
        "γ_H": "no tier given" if plan.gamma_h is None else f"{plan.gamma_h:,.2f} of {deployment.host_gib[0]:,g} GiB",
        "offload benefit ratio": f"{_benefit(deployment)} ({deployment.hardware.name}, {deployment.hardware.source})",
        "transition": _transition(plan),
        "recommended": f"{plan.recommended_gib:,g} GiB per rank, "
        f"{plan.recommended_gib * deployment.tiers:,g} GiB per node of {deployment.ranks}",
    }
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _benefit(deployment: Deployment) -> str:
    if deployment.benefit_range is None:
        return "unknown: give --activated-params or --prefill-tokens-per-s"
    least, most = deployment.benefit_range
    return f"{least:.2f} to {most:.2f}"


def _transition(plan: Plan) -> str:
    if plan.transition_gib is None:
        return "none: a host tier saves next to nothing"
    low, high = plan.transition_gib
    return f"{_gib(low)} to {_gib(high)} GiB per rank (10 % to 90 % of what a tier can save)"


def _curve(plan: Plan) -> Table:
    table = Table("host GiB", "γ_H", "computed prefill, M", "restored, M", "", box=SIMPLE_HEAD)
    for column in table.columns[:-1]:
        column.justify = "right"
        column.no_wrap = True
    for point in _telling(plan):
        ratio = plan.working_set_bytes / (point.host_gib * GIB) if point.host_gib else None
        table.add_row(
            _gib(point.host_gib),
            "–" if ratio is None else f"{ratio:,.2f}",
            _cell(point.computed_prefill_tokens),
            _cell(point.restored_tokens),
            _mark(plan, point),
        )
    return table


def _telling(plan: Plan) -> list[Prediction]:
    """The rows that were asked for, the ends, and those where something happened since the row before."""
    step = _STEP * plan.curve[0].computed_prefill_tokens.expected
    rows: list[Prediction] = []
    for point in plan.curve:
        asked = point.host_gib in (*plan.deployment.host_gib, 0.0, plan.curve[-1].host_gib)
        moved = rows and abs(rows[-1].computed_prefill_tokens.expected - point.computed_prefill_tokens.expected) > step
        if asked or moved:
            rows.append(point)
    return rows


def _mark(plan: Plan, point: Prediction) -> str:
    if point.host_gib in plan.deployment.host_gib:
        return "given"
    if plan.transition_gib and plan.transition_gib[0] <= point.host_gib <= plan.transition_gib[1]:
        return "transition"
    return "all fits" if point is plan.curve[-1] else ""


def _gib(size: float) -> str:
    """Three digits, and never an exponent."""
    return f"{size:.3g}" if size < 999.5 else f"{size:,.0f}"


def _cell(span: Span) -> str:
    """Expectation and range in millions."""
    if span.high == 0:
        return "0"
    digits = 3 if span.high < 10e6 else 1
    low, expected, high = (f"{tokens / 1e6:,.{digits}f}" for tokens in (span.low, span.expected, span.high))
    return expected if low == high else f"{expected} ({low} – {high})"
