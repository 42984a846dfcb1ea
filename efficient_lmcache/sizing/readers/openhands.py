"""OpenHands' histories and completions, as recordings of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.mini_swe_agent import trajectory_task
from efficient_lmcache.replay.importers.openhands import (
    ABSENT,
    HISTORY_INTERVALS,
    HISTORY_PROMPTS,
    completions_task,
)
from efficient_lmcache.replay.importers.openhands_files import (
    Completion,
    completion_files,
    completion_folders,
    parse_history,
    read_completion,
)
from efficient_lmcache.replay.importers.records import RecordError
from efficient_lmcache.replay.importers.rendering import RENDERED, rendered_calls
from efficient_lmcache.replay.importers.tasks import TextTask
from efficient_lmcache.replay.trace import Call
from efficient_lmcache.sizing.readers.trajectories import TextRecording


class OpenHandsHistories(TextRecording):
    """``output.jsonl``: one instance is one lane and one session."""

    notes: tuple[str, ...] = (RENDERED, ABSENT, HISTORY_PROMPTS, HISTORY_INTERVALS)

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        tokenizer = self.load_tokenizer()
        for task in self._parsed(records.lines(self.path, self._progress), _history_task):
            yield task.task_id, rendered_calls(task.calls, tokenizer)

    def _texts(self) -> Iterator[str]:
        for where, line in records.lines(self.path):
            try:
                task = _history_task(line, where)
            except RecordError:
                continue  # counted or raised in the pass that yields calls
            if task.calls:
                yield from task.texts


def _history_task(line: bytes, where: str) -> TextTask:
    return trajectory_task(parse_history(line, where))


class OpenHandsCompletions(TextRecording):
    """``llm_completions``: one folder of calls is one lane and one session; calls by timestamp."""

    notes: tuple[str, ...] = (
        RENDERED,
        ABSENT,
        "a call's file has the time of its response only, so interval_s and start_s are not known",
    )

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        tokenizer = self.load_tokenizer()
        folders = completion_folders(self.path)
        for number, folder in enumerate(folders):
            task = completions_task(folder, list(self._completions(folder)))
            calls = [replace(call, interval_s=math.nan) for call in task.calls]
            yield task.task_id, rendered_calls(calls, tokenizer)
            if self._progress is not None:
                self._progress(number + 1, len(folders))

    def _completions(self, folder: Path) -> Iterator[Completion]:
        for file in completion_files(folder):
            try:
                yield read_completion(file)
            except RecordError as error:
                self._skip_or_raise(error)

    def _texts(self) -> Iterator[str]:
        for folder in completion_folders(self.path):
            yield from completions_task(folder, list(self._good(folder))).texts

    def _good(self, folder: Path) -> Iterator[Completion]:
        """The calls that can be read; bad ones are reported (or counted) in the pass that yields calls."""
        for file in completion_files(folder):
            try:
                yield read_completion(file)
            except RecordError:
                continue
