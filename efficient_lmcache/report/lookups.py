"""Which call each logged decision was taken for: the run's calls in the order of their first lookups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.report.runs import Run, Unavailable


@dataclass(frozen=True, slots=True)
class Lookup:
    """A call's first resolved lookup.

    Attributes:
        task, call: of the trace.
        prompt_tokens: n.
        host_match_tokens: h.
        save: whether the call's new KV was admitted.
        now_s: on the server's clock.
    """

    task: str
    call: int
    prompt_tokens: int
    host_match_tokens: int
    save: bool
    now_s: float


def lookups(run: Run) -> list[Lookup]:
    """In the order of the decisions. A task's k-th decision is its call k's: calls follow one another.

    Raises:
        Unavailable: no decisions, or not of the calls that calls.jsonl has.
    """
    prompts = {(row["task"], row["call"]): row["prompt_tokens"] for row in run.calls}
    tasks = {task for task, _ in prompts}
    numbers: Counter[str] = Counter()
    found = []
    for decision in run.decisions:
        task = decision["task"]
        if task not in tasks and not run.options.get("label_tasks", True):
            raise Unavailable("the decisions do not name the trace's tasks: replayed with --no-label-tasks")
        lookup = _lookup(decision, numbers[task])
        numbers[task] += 1
        # A call without a row was in flight when the run was killed.
        expected = prompts.get((lookup.task, lookup.call), lookup.prompt_tokens)
        if expected != lookup.prompt_tokens:
            raise Unavailable(
                f"decision {lookup.call} of task {task!r} has {lookup.prompt_tokens} prompt tokens, its call {expected}"
            )
        found.append(lookup)
    return found


def _lookup(decision: dict[str, Any], call: int) -> Lookup:
    return Lookup(
        decision["task"],
        call,
        decision["prompt_tokens"],
        decision["host_match_tokens"],
        decision["save"],
        decision["now_s"],
    )
