"""Smaller traces from larger ones: fewer tasks or calls, shorter outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, takewhile

from efficient_lmcache.replay.spelling import option
from efficient_lmcache.replay.trace import Call, TraceError, TraceReader, TraceWriter


def trim(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tasks: int | None = None,
    calls: int | None = None,
    max_prompt: int | None = None,
    max_output: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the trimmed trace and add the step to its manifest's history.

    Args:
        tasks: keep the first so many tasks.
        calls: keep the first so many calls of each.
        max_prompt: end a task before its first prompt of more tokens; a task that starts above it is dropped.
        max_output: cut outputs to so many tokens. Prompts stay as they were recorded: the next one still contains the
            whole original output, so that only the cut-off part of it becomes new work for prefill.
        progress: called with (tasks read, tasks in all).

    Raises TraceError for a limit below 1, for more tasks than there are, or when nothing is left.
    """
    limits = {"tasks": tasks, "calls": calls, "max_prompt": max_prompt, "max_output": max_output}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if not given:
        raise TraceError(f"nothing to trim; give at least one of {', '.join(map(option, limits))}")
    for name, limit in given.items():
        if limit < 1:
            raise TraceError(f"{option(name)} is {limit}; it must be at least 1")
    with TraceReader(source) as reader:
        history = (*reader.manifest.history, {"step": "trim", **given})
        total = len(reader.tasks) if tasks is None else tasks
        if total > len(reader.tasks):
            raise TraceError(f"{source}: cannot keep {tasks} tasks; it has {len(reader.tasks)}")
        written = 0
        with TraceWriter(out, replace(reader.manifest, history=history)) as writer:
            for number, task in enumerate(reader.tasks[:total]):
                kept = _kept(reader.calls(number), calls, max_prompt, max_output)
                first = next(kept, None)
                if first is not None:
                    writer.write_task(task.task_id, chain([first], kept))
                    written += 1
                if progress is not None:
                    progress(number + 1, total)
            if not written:
                why = f"every task starts with more than {max_prompt} prompt tokens" if total else "it has no tasks"
                raise TraceError(f"{source}: nothing is left: {why}")


def _kept(calls: Iterable[Call], limit: int | None, max_prompt: int | None, max_output: int | None) -> Iterator[Call]:
    fitting = takewhile(lambda call: max_prompt is None or len(call.prompt_tokens) <= max_prompt, islice(calls, limit))
    return (replace(call, output_tokens=call.output_tokens[:max_output]) for call in fitting)
