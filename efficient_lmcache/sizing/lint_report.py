"""A lint report as JSON and as tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from efficient_lmcache.sizing.lint import Finding, LaneReport, Report
from efficient_lmcache.sizing.lint_sources import Decode

_SHOWN_CHARACTERS = 160


def to_json(report: Report, top: int, decode: Decode | None = None) -> dict[str, Any]:
    """The whole report, JSON-able, with the `top` worst tasks and calls.

    `lost_tokens` are null where the recording cannot tell, `breaks` where lanes are guesses.
    """
    return {
        "source": report.source,
        "unit_tokens": report.unit_tokens,
        "tasks": len(report.lanes),
        "calls": report.calls,
        "prompt_tokens": report.prompt_tokens,
        "cache_stable_tokens": report.stable_tokens,
        "breaks": None if report.lanes_are_guessed else sum(len(lane.findings) for lane in report.lanes),
        "forks": sum(lane.forks for lane in report.lanes),
        "repeats": sum(lane.repeats for lane in report.lanes),
        **_loss(report, report.cost_tokens, _at_most(report.worst_calls())),
        "habits": [
            {
                "habit": total.label,
                "breaks": total.breaks,
                "tasks": total.tasks,
                **_loss(report, total.cost_tokens, total.at_most_lost_tokens),
                "advice": total.advice,
            }
            for total in report.habits()
        ],
        "worst_tasks": [_lane_json(report, lane) for lane in report.worst_lanes()[:top]],
        "worst_calls": [_finding_json(report, each, decode) for each in report.worst_calls()[:top]],
        "notes": list(report.notes),
    }


def to_tables(report: Report, top: int, decode: Decode | None = None) -> RenderableType:
    """What a person reads: totals, habits with advice, worst tasks, worst calls."""
    parts: list[RenderableType] = [_summary(report)]
    if report.habits():
        parts += [_habits(report), _worst_tasks(report, top), _worst_calls(report, top, decode)]
    parts += [Text(f"note: {note}", style="dim") for note in report.notes]
    return Group(*parts)


def _at_most(findings: list[Finding]) -> int:
    return sum(each.found.at_most_lost_tokens for each in findings)


def _loss(report: Report, cost_tokens: int, at_most_tokens: int) -> dict[str, int | None]:
    return {"lost_tokens": cost_tokens if report.knows_text else None, "at_most_lost_tokens": at_most_tokens}


def _lane_json(report: Report, lane: LaneReport) -> dict[str, Any]:
    return {
        "task": lane.task,
        "calls": len(lane.prompt_tokens),
        "prompt_tokens": sum(lane.prompt_tokens),
        "breaks": len(lane.findings),
        **_loss(report, sum(lane.cost_tokens), _at_most(lane.findings)),
        "habits": dict(Counter(each.diagnosis.label for each in lane.findings).most_common()),
    }


def _finding_json(report: Report, finding: Finding, decode: Decode | None) -> dict[str, Any]:
    found, diagnosis = finding.found, finding.diagnosis
    shown: dict[str, Any] = {}
    if finding.old or finding.new:
        shown = {"old_ids": list(finding.old), "new_ids": list(finding.new)}
        if decode is not None:
            shown |= {"old_text": decode(list(finding.old)), "new_text": decode(list(finding.new))}
    return {
        "task": finding.task,
        "call": finding.call,
        "habit": diagnosis.habit.value,
        "variant": diagnosis.variant and diagnosis.variant.value,
        "break_at_token": found.stable_tokens,
        "prompt_tokens": found.prompt_tokens,
        "previous_prompt_tokens": found.previous_prompt_tokens,
        "previous_prompt_and_output_tokens": found.previous_tokens,
        **_loss(report, finding.cost_tokens, found.at_most_lost_tokens),
        **({} if found.runs is None else {k: v for k, v in asdict(diagnosis.edit).items() if k.endswith("_tokens")}),
        **shown,
    }


def _summary(report: Report) -> RenderableType:
    breaks = sum(len(lane.findings) for lane in report.lanes)
    total = max(1, report.prompt_tokens)
    rows = {
        "recording": f"{report.source}: {len(report.lanes):,} tasks, {report.calls:,} calls, "
        f"{report.prompt_tokens:,} prompt tokens",
        "cache-stable": f"{report.stable_tokens:,} tokens ({report.stable_tokens / total:.1%})",
        "prefix breaks": f"{breaks:,}",
    }
    if breaks:
        most = "" if report.knows_text else "at most "
        lost = f"{report.cost_tokens:,} tokens ({report.cost_tokens / total:.1%})"
        rows["prefix breaks"] = f"{breaks:,}, which lose {most}{lost} that were processed before"
    elif report.lanes_are_guessed:
        rows["prefix breaks"] = (
            "cannot be seen: the recording names no tasks, so whatever extends no earlier prompt counts as a new task"
        )
    else:
        rows["prefix breaks"] = "none: every prompt extends an earlier one of its task"
    forks, repeats = (sum(getattr(lane, name) for lane in report.lanes) for name in ("forks", "repeats"))
    if forks or repeats:
        rows["no loss"] = f"{forks:,} calls continue an earlier call of their task, {repeats:,} repeat the previous one"
    table = Table(show_header=False, box=None)
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _habits(report: Report) -> RenderableType:
    table = Table("likely habit", "what to do about it", title="Habits", title_justify="left")
    for name in ("breaks", "tasks", "tokens lost" if report.knows_text else "lost at most", "of prompts"):
        table.add_column(name, justify="right")
    for total in report.habits():
        table.add_row(
            total.label,
            total.advice,
            f"{total.breaks:,}",
            f"{total.tasks:,}",
            f"{total.cost_tokens:,}",
            f"{total.cost_tokens / max(1, report.prompt_tokens):.1%}",
        )
    return Padding(table, (1, 0, 0, 0))


def _worst_tasks(report: Report, top: int) -> RenderableType:
    lanes = report.worst_lanes()
    table = Table("task", "mostly", title=_title("Worst tasks", top, len(lanes)), title_justify="left")
    for name in ("breaks", "calls", "tokens lost" if report.knows_text else "lost at most", "of its prompts"):
        table.add_column(name, justify="right")
    for lane in lanes[:top]:
        lost = sum(lane.cost_tokens)
        table.add_row(
            Text(lane.task),
            Counter(each.diagnosis.label for each in lane.findings).most_common(1)[0][0],
            f"{len(lane.findings):,}",
            f"{len(lane.prompt_tokens):,}",
            f"{lost:,}",
            f"{lost / max(1, sum(lane.prompt_tokens)):.1%}",
        )
    return Padding(table, (1, 0, 0, 0))


def _worst_calls(report: Report, top: int, decode: Decode | None) -> RenderableType:
    findings = report.worst_calls()
    title = _title("Worst calls", top, len(findings))
    table = Table("task, call", "likely habit", "what happened", title=title, title_justify="left")
    table.add_column("tokens lost" if report.knows_text else "lost at most", justify="right")
    for each in findings[:top]:
        table.add_row(
            Text(f"{each.task}, {each.call}"),
            each.diagnosis.label,
            Text("\n".join(_story(each, decode))),
            f"{each.cost_tokens:,}",
        )
    return Padding(table, (1, 0, 1, 0))


def _title(name: str, top: int, count: int) -> str:
    return f"{name} ({min(top, count)} of {count:,})"


def _story(finding: Finding, decode: Decode | None) -> list[str]:
    found, edit = finding.found, finding.diagnosis.edit
    length = f"prompt of {found.prompt_tokens:,} after {found.previous_tokens:,}"
    if found.runs is None:
        return [f"breaks near token {found.stable_tokens:,}; {length}"]
    what = f"{edit.removed_tokens:,} old tokens became {edit.inserted_tokens:,}, then old text goes on"
    if not edit.continues:
        what = "nothing of the old text follows"
    lines = [f"breaks at token {found.stable_tokens:,}: {what}; {length}"]
    if decode is not None:
        lines += [f"- {_shown(decode(list(finding.old)))}", f"+ {_shown(decode(list(finding.new)))}"]
    return lines


def _shown(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 1]}…"
