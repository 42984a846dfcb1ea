"""Our own traces: exact tokens, hashed into chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from efficient_lmcache.replay.importers.records import Progress
from efficient_lmcache.replay.trace import Call, TraceReader
from efficient_lmcache.sizing.readers.tokens import TokenRecording


class TraceV1(TokenRecording):
    """A trace; one task is one lane and one session."""

    def __init__(
        self, path: Path, chunk_tokens: int, *, skip_bad: bool, progress: Progress | None, with_outputs: bool
    ) -> None:
        super().__init__(path, chunk_tokens, skip_bad=skip_bad, progress=progress, with_outputs=with_outputs)
        with TraceReader(path) as reader:
            self.notes = reader.manifest.assumptions

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        with TraceReader(self.path) as reader:
            for number, info in enumerate(reader.tasks):
                yield info.task_id, reader.calls(number)
                if self._progress is not None:
                    self._progress(number + 1, len(reader.tasks))
