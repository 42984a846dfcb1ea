"""Import of OpenHands' recordings: an instance is a task, whose calls its history tells or its completions hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.mini_swe_agent import trajectory_task
from efficient_lmcache.replay.importers.openhands_files import (
    Completion,
    completion_files,
    completion_folders,
    parse_history,
    read_completion,
)
from efficient_lmcache.replay.importers.records import RecordingError, Skip, kept, stop
from efficient_lmcache.replay.importers.rendering import RENDERED
from efficient_lmcache.replay.importers.tasks import DECODE_TOKENS_PER_S, TextCall, TextTask, pause_s

ABSENT = "hidden reasoning and tool schemas are not rendered"
HISTORY_PROMPTS = "a call's prompt is all messages before its response, in the history's order"
HISTORY_INTERVALS = (
    "interval_s is from a response's event to the last event before the next; dispatches are not recorded"
)
_FAILED = "calls that failed or were repeated are not recorded, hence absent"

HISTORY_ASSUMPTIONS = (RENDERED, ABSENT, _FAILED, HISTORY_PROMPTS, HISTORY_INTERVALS)
COMPLETIONS_ASSUMPTIONS = (
    RENDERED,
    ABSENT,
    _FAILED,
    "calls of one folder follow one another by the times of their responses, whatever model they are to",
    "interval_s: only responses have a time, so a call is taken to last usage.completion_tokens / "
    f"{DECODE_TOKENS_PER_S:.0f} s, and what remains since the response before, at least 0, to be the agent's own time",
)


def history_tasks(source: Path, skip: Skip = stop) -> Iterator[TextTask]:
    """Every instance of an ``output.jsonl``; RecordError names file, line and field of what is malformed."""
    return kept((partial(history_task, line, where) for where, line in records.lines(source)), skip)


def history_task(line: bytes, where: str) -> TextTask:
    """A line's instance."""
    return trajectory_task(parse_history(line, where))


def completions_tasks(source: Path, skip: Skip = stop) -> Iterator[TextTask]:
    """Every folder of calls; RecordError names file and field of what is malformed, a call."""
    folders = completion_folders(source) if source.is_dir() else []
    if not folders:
        raise RecordingError(f"{source}: is no folder of llm_completions: it has no *.json, nor has a folder in it")
    for folder in folders:
        yield completions_task(folder, list(read_completions(folder, skip)))


def read_completions(folder: Path, skip: Skip) -> Iterator[Completion]:
    """A folder's calls, by name."""
    return kept((partial(read_completion, file) for file in completion_files(folder)), skip)


def completions_task(folder: Path, completions: Sequence[Completion]) -> TextTask:
    """A folder's calls, by time."""
    calls: list[TextCall] = []
    texts: dict[str, None] = {}
    previous_s = math.nan
    for each in sorted(completions, key=lambda completion: completion.timestamp_s):
        tokens = math.nan if each.completion_tokens is None else each.completion_tokens
        elapsed_s = each.timestamp_s - previous_s
        calls.append(TextCall(each.messages, each.response, pause_s(elapsed_s, tokens) if calls else 0.0))
        texts.update(dict.fromkeys([*(text for _, text in each.messages), each.response]))
        previous_s = each.timestamp_s
    return TextTask(folder.resolve().name, str(folder), calls, list(texts))
