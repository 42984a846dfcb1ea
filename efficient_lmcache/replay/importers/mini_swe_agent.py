"""Import of mini-swe-agent trajectories: one call for every assistant message.

The prompt of a call is all messages before it, its output the assistant message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from efficient_lmcache.replay.importers.records import RecordError, Skip, kept, stop
from efficient_lmcache.replay.importers.tasks import DECODE_TOKENS_PER_S, TextCall, TextTask, pause_s
from efficient_lmcache.replay.importers.trajectory_files import Message, Trajectory, read_trajectories

ASSUMPTIONS = (
    "messages are rendered as ChatML; an output is the assistant's text, its tool calls and the end-of-turn marker",
    "hidden reasoning, tool schemas and calls that left no assistant message are not recorded, hence absent",
    "interval_s where messages have timestamps: from an assistant message to the last one before the next call",
    "interval_s elsewhere: `created` is taken as the dispatch, in whole seconds (its differences grow with the "
    f"preceding call's completion tokens), a call to last completion_tokens / {DECODE_TOKENS_PER_S:.0f} s, and what "
    "remains until the next `created`, at least 0, to be the agent's own time",
)


def tasks(source: Path, skip: Skip = stop) -> Iterator[TextTask]:
    """Every trajectory as a task; intervals that its messages do not tell are nan.

    RecordError names file, line and field of what is malformed.
    """
    return kept((partial(trajectory_task, each) for each in read_trajectories(source, skip)), skip)


def trajectory_task(trajectory: Trajectory) -> TextTask:
    """A trajectory's calls; intervals that the messages do not tell are nan."""
    said = [(message.role, message.text) for message in trajectory.messages]
    calls: list[TextCall] = []
    previous: int | None = None
    for number, message in enumerate(trajectory.messages):
        if message.role != "assistant":
            continue
        if number == 0:
            raise RecordError(f"{trajectory.where}: messages[0] is the assistant's; a call needs a prompt before it")
        interval_s = 0.0 if previous is None else _interval_s(trajectory, previous, number)
        calls.append(TextCall(said[:number], message.text, interval_s, message.created_s))
        previous = number
    return TextTask(trajectory.task_id, trajectory.where, calls, [text for _, text in said])


def _interval_s(trajectory: Trajectory, previous: int, number: int) -> float:
    """The agent's own time before call `number`, by the rules that the manifest states; nan if none applies."""
    before, now = trajectory.messages[previous], trajectory.messages[number]
    observed: Message = trajectory.messages[number - 1]
    if before.timestamp_s is not None and observed.timestamp_s is not None:
        return max(0.0, observed.timestamp_s - before.timestamp_s)
    if before.created_s is None or now.created_s is None or before.completion_tokens is None:
        return math.nan
    return pause_s(now.created_s - before.created_s, before.completion_tokens)
