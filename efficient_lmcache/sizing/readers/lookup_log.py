"""LMCache's lookup-hash logs: what a real server was asked for.

A line a lookup: ``{"timestamp": s since 1970, "request_id", "model_name", "chunk_size", "seq_len", "chunk_hashes"}``,
in a file or a directory of ``lookup_hashes_*.jsonl``. Full chunks have hashes; a prompt without one leaves no line.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.lanes import LaneGuess
from efficient_lmcache.replay.importers.records import RecordError, RecordingError
from efficient_lmcache.sizing.readers.recording import BlockRecording, ChunkedCall, Numbering

FILES = "lookup_hashes_*.jsonl*"
_REORDERED_LINES = 256


@dataclass(frozen=True, slots=True)
class _Lookup:
    timestamp_s: float
    request_id: str
    model: str
    prompt_tokens: int
    hashes: list[str]


class LookupLog(BlockRecording):
    """Lookups by time; a lane is a guess, a session is a lane. A chunk is a model's and a hash's."""

    notes: tuple[str, ...] = (
        "no conversations are recorded: a lookup is taken for the next of the lane whose last prompt it extends; any "
        "other begins a lane",
        "outputs are not recorded, and prompts without a full chunk are not logged",
        "responses' ends are not recorded, so interval_s is not known",
        "start_s counts from the first lookup; a lookup that the engine repeated counts again",
    )

    lanes_are_guessed = True

    def _calls(self) -> Iterator[ChunkedCall]:
        numbering = Numbering()
        tables: dict[str, dict[Hashable, int]] = defaultdict(numbering.table)
        guesses: dict[str, LaneGuess] = defaultdict(LaneGuess)
        began_s: float | None = None
        files = log_files(self.path)
        # Servers that log side by side have files that overlap in time.
        by_file = [self._by_time(file, number, len(files)) for number, file in enumerate(files)]
        for lookup in heapq.merge(*by_file, key=lambda lookup: lookup.timestamp_s):
            began_s = lookup.timestamp_s if began_s is None else began_s
            table, guess, blocks = tables[lookup.model], guesses[lookup.model], lookup.hashes
            lane = guess.find(blocks, lookup.prompt_tokens)
            if lane is None:
                lane = self._new_lane(lookup.request_id)
            guess.set_tip(lane, blocks, lookup.prompt_tokens)
            keys = [table[block] for block in blocks[self._blocks_per_chunk - 1 :: self._blocks_per_chunk]]
            yield ChunkedCall(
                keys=np.array(keys, np.int64),
                lookup_chunks=len(keys),
                prompt_tokens=lookup.prompt_tokens,
                output_tokens=0,
                lane=lane,
                session=lane,
                start_s=lookup.timestamp_s - began_s,
                interval_s=math.nan,
            )

    def _by_time(self, file: Path, number: int, files: int) -> Iterator[_Lookup]:
        progress = self._progress if files == 1 else None
        yield from _sorted_nearby(self._parsed(records.lines(file, progress), self._lookup))
        if self._progress is not None and files > 1:
            self._progress(number + 1, files)

    def _lookup(self, line: bytes, where: str) -> _Lookup:
        record = records.parse_object(line, where)
        block_tokens = records.integer(record, "chunk_size", where, least=1)
        if block_tokens != self._block_tokens:
            raise RecordError(
                f"{where}: chunk_size is {block_tokens}; it must be {self._block_tokens}, as in the first record"
            )
        hashes = record.get("chunk_hashes")
        if not isinstance(hashes, list) or not all(isinstance(each, str) and each for each in hashes):
            raise RecordError(f"{where}: chunk_hashes must be a list of non-empty texts")
        prompt_tokens = records.integer(record, "seq_len", where, least=1)
        if len(hashes) * block_tokens > prompt_tokens:
            raise RecordError(
                f"{where}: chunk_hashes has {len(hashes)} entries; {prompt_tokens} tokens have at most "
                f"{prompt_tokens // block_tokens} full chunks of {block_tokens}"
            )
        return _Lookup(
            timestamp_s=records.clock_s(record, "timestamp", where),
            request_id=records.text(record, "request_id", where),
            model=records.text(record, "model_name", where),
            prompt_tokens=prompt_tokens,
            hashes=hashes,
        )


def log_files(path: Path) -> list[Path]:
    """The log's files, a directory's by name; RecordingError where it has none."""
    files = sorted(path.glob(FILES)) if path.is_dir() else [path]
    if not files:
        raise RecordingError(f"{path}: holds no {FILES}")
    return files


def _sorted_nearby(lookups: Iterable[_Lookup]) -> Iterator[_Lookup]:
    """By time, equal times in recorded order. Threads log side by side, so lines are out of order by a few only."""
    waiting: list[tuple[float, int, _Lookup]] = []
    for number, lookup in enumerate(lookups):
        heapq.heappush(waiting, (lookup.timestamp_s, number, lookup))
        if len(waiting) > _REORDERED_LINES:
            yield heapq.heappop(waiting)[-1]
    while waiting:
        yield heapq.heappop(waiting)[-1]
