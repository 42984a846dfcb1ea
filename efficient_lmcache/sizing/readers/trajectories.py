"""Recordings of text: agent trajectories, as the tokens that a tokenizer makes of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from efficient_lmcache.replay.importers.mini_swe_agent import ASSUMPTIONS, trajectory_calls
from efficient_lmcache.replay.importers.trajectory_files import Trajectory, read_trajectories
from efficient_lmcache.replay.tokenizers import ALLOWED, Tokenizer, load_tokenizer
from efficient_lmcache.replay.trace import Call, TraceError
from efficient_lmcache.sizing.readers.records import Progress, RecordingError
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
        """What a BPE learns from."""

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of this recording, and of every iteration over it."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._tokenizer_name, self._texts)
        return self._tokenizer


class MiniSweAgent(TextRecording):
    """mini-swe-agent's trajectories, as the trace importer reads them."""

    notes: tuple[str, ...] = ASSUMPTIONS

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        tokenizer = self.load_tokenizer()
        began_s, total = self._look_ahead()
        done = 0
        for trajectory in read_trajectories(self.path, self._skip_or_raise):
            if not trajectory.calls:
                continue
            yield (
                trajectory.task_id,
                trajectory_calls(trajectory, tokenizer, tokenizer.vocab_size, began_s, needs_intervals=False),
            )
            done += 1
            if self._progress is not None:
                self._progress(done, total)

    def _texts(self) -> Iterator[str]:
        return (message.text for trajectory in self._good() for message in trajectory.messages)

    def _look_ahead(self) -> tuple[float, int]:
        """When the first call was made (s since 1970), and how many trajectories have calls."""
        began_s, total = math.inf, 0
        for trajectory in self._good():
            began_s = min([began_s, *(m.created_s for m in trajectory.messages if m.created_s is not None)])
            total += trajectory.calls > 0
        return began_s, total

    def _good(self) -> Iterator[Trajectory]:
        """The trajectories that can be read; bad ones are reported (or counted) in the pass that yields calls."""
        return read_trajectories(self.path, _ignore)


def _ignore(error: TraceError) -> None:
    """Another pass over the same file counts or raises it."""
