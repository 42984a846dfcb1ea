"""What all readers share: whole calls in batches, chunk numbers, bad records, and blocks regrouped into chunks."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.records import Progress, RecordingError
from efficient_lmcache.replay.importers.tasks import UniqueNames
from efficient_lmcache.replay.trace import common_prefix_tokens

_BATCH_REFERENCES = 1 << 20
_LARGEST_CHUNK_TOKENS = 1 << 40
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedCall:
    """One call of a stream; the fields are those of `References`."""

    keys: Ints
    lookup_chunks: int
    prompt_tokens: int
    output_tokens: int
    lane: int
    session: int
    start_s: float
    interval_s: float


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """What a lane's calls share with the call before, in tokens; one entry a call, 0 for a lane's first (Appendix B).

    Attributes:
        previous_prompt: longest common prefix with the lane's previous prompt.
        cache_stable: that with the previous prompt followed by its output.
    """

    previous_prompt: list[int]
    cache_stable: list[int]


class Recording(ABC):
    """A stream read from a file or a directory, again from the start in every iteration.

    Attributes:
        name: the file's or directory's name.
        chunk_tokens: b.
        notes: what the recording does not tell, and what is assumed instead.
        lanes: lane names by number, of the calls read so far.
        skipped: bad records left out so far; 0 unless `skip_bad`.
        has_shared_chunks: chunks of several sessions have one number; otherwise such sharing is not recorded.
        lanes_are_guessed: after an iteration: some lanes are a guess, as nothing in the recording tells them.
        shared: exact shares of the calls read so far, where the recording has tokens; None where it has blocks.
    """

    notes: tuple[str, ...] = ()
    has_shared_chunks: bool = True
    lanes_are_guessed: bool = False
    shared: SharedTokens | None = None

    def __init__(self, path: Path, chunk_tokens: int, *, skip_bad: bool, progress: Progress | None) -> None:
        if not 1 <= chunk_tokens <= _LARGEST_CHUNK_TOKENS:
            allowed = "at least 1" if chunk_tokens < 1 else f"at most {_LARGEST_CHUNK_TOKENS:,}"
            raise RecordingError(f"chunk_tokens is {chunk_tokens}; it must be {allowed}")
        self.path = path
        self.name = path.resolve().name
        self.chunk_tokens = chunk_tokens
        self.lanes: list[str] = []
        self._names = UniqueNames()
        self.skipped = 0
        self._skip_bad = skip_bad
        self._progress = progress

    def __iter__(self) -> Iterator[References]:
        """Batches of whole calls; RecordingError names the file, the record and the field that is at fault."""
        self.lanes.clear()
        self._names = UniqueNames()
        self.skipped = 0
        batch: list[ChunkedCall] = []
        references = 0
        has_calls = False
        for call in self._calls():
            has_calls = True
            batch.append(call)
            references += len(call.keys)
            if references >= _BATCH_REFERENCES:
                yield self._references(batch)
                batch, references = [], 0
        if batch:
            yield self._references(batch)
        if not has_calls:
            raise no_calls(self.path, self.skipped)

    @abstractmethod
    def _calls(self) -> Iterator[ChunkedCall]:
        """The calls, in recorded order."""

    def _new_lane(self, name: str) -> int:
        self.lanes.append(self._names.of(name))
        return len(self.lanes) - 1

    def _parsed(self, raw: Iterable[tuple[str, bytes]], parse: Callable[[bytes, str], _Record]) -> Iterator[_Record]:
        """The records that parse; the others end the reading, or are counted where bad records are skipped."""
        return records.kept((partial(parse, line, where) for where, line in raw), self._skip_or_raise)

    def _skip_or_raise(self, error: ValueError) -> None:
        """Count a bad record, where those are skipped."""
        if not self._skip_bad:
            raise error
        self.skipped += 1

    def _references(self, calls: list[ChunkedCall]) -> References:
        columns = {field.name: [getattr(call, field.name) for call in calls] for field in fields(ChunkedCall)}
        keys = columns.pop("keys")
        arrays: dict[str, Any] = {
            name: np.array(values, np.float64 if name.endswith("_s") else np.int64) for name, values in columns.items()
        }
        offsets = np.cumsum([0, *map(len, keys)], dtype=np.int64)
        return References(chunk_tokens=self.chunk_tokens, keys=np.concatenate(keys), offsets=offsets, **arrays)


def no_calls(path: Path, skipped: int) -> RecordingError:
    """The error for a recording without a call that can be read."""
    return RecordingError(
        f"{path}: has no calls to read" + (f"; {skipped} bad records were skipped" if skipped else "")
    )


class Numbering:
    """Chunk numbers, dense and in order of first appearance, over one or several tables of keys."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def table(self) -> defaultdict[Hashable, int]:
        """An empty table; looking up a key that it lacks gives it the next number."""
        return defaultdict(self._next.__next__)


class NumberedPath:
    """The block ids of a lane's latest call, and their chunk numbers.

    A chunk is its blocks and the chunk before it: some traces give equal blocks one id wherever they are, but a block's
    KV depends on all before it. Agents resend their conversation, so only what is behind the common prefix with the
    call before is looked up.
    """

    def __init__(self, table: defaultdict[Hashable, int], blocks_per_chunk: int) -> None:
        self._table = table
        self._blocks_per_chunk = blocks_per_chunk
        self._ids: Ints = np.empty(0, np.int64)
        self._numbers: Ints = np.empty(0, np.int64)

    def move_to(self, ids: Ints) -> Ints:
        """The chunk numbers of full blocks' `ids`, which become the latest call's."""
        shared = common_prefix_tokens(self._ids, ids) // self._blocks_per_chunk
        width = self._blocks_per_chunk * ids.itemsize
        content = ids.tobytes()
        number = int(self._numbers[shared - 1]) if shared else -1
        new: list[int] = []
        for begin in range(shared * width, len(content) - width + 1, width):
            number = self._table[content[begin : begin + width] + number.to_bytes(8, "little", signed=True)]
            new.append(number)
        self._ids, self._numbers = ids, np.concatenate((self._numbers[:shared], np.array(new, np.int64)))
        return self._numbers


class BlockRecording(Recording):
    """A recording whose prompts are lists of block ids, of one size throughout; chunks are runs of blocks."""

    def __init__(
        self, path: Path, chunk_tokens: int, *, block_tokens: int, skip_bad: bool, progress: Progress | None
    ) -> None:
        super().__init__(path, chunk_tokens, skip_bad=skip_bad, progress=progress)
        self._block_tokens = block_tokens
        self._blocks_per_chunk = blocks_per_chunk(path, block_tokens, chunk_tokens)


class BlockRequest(Protocol):
    """What requests of all block recordings have; see `ChunkedCall`."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def interval_s(self) -> float: ...


def block_call(request: BlockRequest, keys: Ints, lane: int, session: int) -> ChunkedCall:
    """A request that looks all of its chunks up."""
    return ChunkedCall(
        keys=keys,
        lookup_chunks=len(keys),
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        lane=lane,
        session=session,
        start_s=request.start_s,
        interval_s=request.interval_s,
    )


def blocks_per_chunk(path: Path, block_tokens: int, chunk_tokens: int) -> int:
    """How many blocks make a chunk.

    Raises RecordingError where blocks do not regroup into such chunks.
    """
    if chunk_tokens < block_tokens or chunk_tokens % block_tokens:
        allowed = ", ".join(str(block_tokens * count) for count in (1, 2, 4))
        raise RecordingError(
            f"{path}: has blocks of {block_tokens} tokens, which do not regroup into chunks of {chunk_tokens}; "
            f"allowed are multiples of {block_tokens}: {allowed}, ..."
        )
    return chunk_tokens // block_tokens
