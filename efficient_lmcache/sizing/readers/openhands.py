"""OpenHands' histories and completions, as recordings of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.openhands import (
    ABSENT,
    HISTORY_INTERVALS,
    HISTORY_PROMPTS,
    completions_task,
    completions_tasks,
    history_task,
    history_tasks,
    read_completions,
)
from efficient_lmcache.replay.importers.openhands_files import completion_folders
from efficient_lmcache.replay.importers.records import ignore
from efficient_lmcache.replay.importers.rendering import RENDERED, rendered_calls
from efficient_lmcache.replay.trace import Call
from efficient_lmcache.sizing.readers.trajectories import TextRecording


class OpenHandsHistories(TextRecording):
    """``output.jsonl``: one instance is one lane and one session."""

    notes: tuple[str, ...] = (RENDERED, ABSENT, HISTORY_PROMPTS, HISTORY_INTERVALS)

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        tokenizer = self.load_tokenizer()
        for task in self._parsed(records.lines(self.path, self._progress), history_task):
            yield task.task_id, rendered_calls(task.calls, tokenizer)

    def _texts(self) -> Iterator[str]:
        return (text for task in history_tasks(self.path, ignore) if task.calls for text in task.texts)


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
            task = completions_task(folder, list(read_completions(folder, self._skip_or_raise)))
            calls = [replace(call, interval_s=math.nan) for call in task.calls]
            yield task.task_id, rendered_calls(calls, tokenizer)
            if self._progress is not None:
                self._progress(number + 1, len(folders))

    def _texts(self) -> Iterator[str]:
        return (text for task in completions_tasks(self.path, ignore) for text in task.texts)
