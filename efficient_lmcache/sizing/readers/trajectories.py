"""Recordings of text: agent trajectories, as the tokens that a tokenizer makes of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from efficient_lmcache.replay.importers import mini_swe_agent, swe_agent
from efficient_lmcache.replay.importers.records import Progress, RecordingError, Skip, ignore
from efficient_lmcache.replay.importers.rendering import rendered_calls
from efficient_lmcache.replay.importers.tasks import TextTask
from efficient_lmcache.replay.tokenizers import ALLOWED, Tokenizer, load_tokenizer
from efficient_lmcache.replay.trace import Call
from efficient_lmcache.sizing.readers.tokens import TokenRecording


class TextRecording(TokenRecording):
    """A recording of messages. The tokenizer is loaded (or, for ``bpe:VOCAB``, trained) once, when first needed."""

    def __init__(
        self,
        path: Path,
        chunk_tokens: int,
        *,
        tokenizer: str | None,
        skip_bad: bool,
        progress: Progress | None,
        with_outputs: bool,
    ) -> None:
        super().__init__(path, chunk_tokens, skip_bad=skip_bad, progress=progress, with_outputs=with_outputs)
        if tokenizer is None:
            raise RecordingError(f"{path}: is a recording of text, which needs a tokenizer; {ALLOWED}")
        self._tokenizer_name = tokenizer
        self._tokenizer: Tokenizer | None = None

    @abstractmethod
    def _texts(self) -> Iterable[str]:
        """What a BPE learns from: the texts of tasks with calls, as in an import."""

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of this recording, and of every iteration over it."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._tokenizer_name, self._texts)
        return self._tokenizer


class _Trajectories(TextRecording):
    """Trajectories as the trace importer reads them: one is one lane and one session."""

    @abstractmethod
    def _read(self, skip: Skip) -> Iterator[TextTask]:
        """Every trajectory; `skip` is called with the error of each that is malformed."""

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        tokenizer = self.load_tokenizer()
        began_s, total = self._look_ahead()
        done = 0
        for task in self._read(self._skip_or_raise):
            if not task.calls:
                continue
            yield task.task_id, rendered_calls(task.calls, tokenizer, began_s=began_s)
            done += 1
            if self._progress is not None:
                self._progress(done, total)

    def _texts(self) -> Iterator[str]:
        return (text for task in self._read(ignore) if task.calls for text in task.texts)

    def _look_ahead(self) -> tuple[float, int]:
        """When the first call was made, and how many trajectories have calls."""
        began_s, total = math.inf, 0
        for task in self._read(ignore):
            began_s = min([began_s, *(call.start_s for call in task.calls if call.start_s is not None)])
            total += bool(task.calls)
        return began_s, total


class MiniSweAgent(_Trajectories):
    """mini-swe-agent's trajectories."""

    notes: tuple[str, ...] = mini_swe_agent.ASSUMPTIONS

    def _read(self, skip: Skip) -> Iterator[TextTask]:
        return mini_swe_agent.tasks(self.path, skip)


class SweAgent(_Trajectories):
    """SWE-agent's trajectories."""

    notes: tuple[str, ...] = swe_agent.ASSUMPTIONS

    def _read(self, skip: Skip) -> Iterator[TextTask]:
        return swe_agent.tasks(self.path, skip)
