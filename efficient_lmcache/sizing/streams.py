"""One interface over every recording: `open_stream` recognises the format and gives a stream of `References`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from efficient_lmcache.core.references import References
from efficient_lmcache.replay.frames import MAGIC
from efficient_lmcache.sizing.readers import records
from efficient_lmcache.sizing.readers.mooncake import BLOCK_TOKENS as MOONCAKE_BLOCK_TOKENS
from efficient_lmcache.sizing.readers.mooncake import MooncakeRequests
from efficient_lmcache.sizing.readers.recording import Recording, SharedTokens
from efficient_lmcache.sizing.readers.records import Progress, RecordError, RecordingError
from efficient_lmcache.sizing.readers.trace_v1 import TraceV1
from efficient_lmcache.sizing.readers.weka import WekaSessions

__all__ = ["ALLOWED", "TOKEN_CHUNK_TOKENS", "RecordError", "RecordingError", "ReferenceStream", "open_stream"]

TOKEN_CHUNK_TOKENS = 256  # LMCache's default chunk_size
ALLOWED = "a trace, agentic Weka sessions or Mooncake requests"
_PROBED_LINES = 100


class ReferenceStream(Protocol):
    """A recording as the chunks that its calls reference; every iteration reads it from the start.

    Attributes:
        name: of the recording; never a path.
        chunk_tokens: b.
        notes: what the recording does not tell, and what is assumed instead.
        lanes: lane names by number; complete after an iteration.
        skipped: bad records that the iteration left out.
        shared: the tokens every call shares with the one before in its lane, where the recording has tokens, complete
            after an iteration; None where it has blocks.
    """

    name: str
    chunk_tokens: int
    notes: tuple[str, ...]
    lanes: list[str]
    skipped: int
    shared: SharedTokens | None

    def __iter__(self) -> Iterator[References]:
        """Batches of whole calls in recorded order, with chunk numbers consistent across batches."""
        ...


def open_stream(
    path: str | os.PathLike[str],
    chunk_tokens: int | None = None,
    *,
    tokenizer: str | None = None,
    skip_bad: bool = False,
    with_outputs: bool = False,
    progress: Progress | None = None,
) -> ReferenceStream:
    """The stream of a recording, whatever its format.

    Args:
        path: a file, plain or gzip, or a directory.
        chunk_tokens: b; by default the recording's own block size, 256 for recordings of tokens or text.
        tokenizer: for recordings of text: what `replay.tokenizers.load_tokenizer` takes.
        skip_bad: leave bad records out and count them in `skipped`, instead of raising at the first.
        with_outputs: keys go on to the chunks that outputs leave behind, where outputs' tokens are recorded.
        progress: called with how much is read and how much there is, in bytes or tasks.

    Raises RecordingError (a ValueError) for what cannot be read, naming file, record and field; while iterating, too.
    """
    path = Path(path)
    if not path.exists():
        raise RecordingError(f"{path}: no such file or directory")
    if _is_trace(path):
        size = TOKEN_CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
        return TraceV1(path, size, skip_bad=skip_bad, progress=progress, with_outputs=with_outputs)
    return _open_lines(path, chunk_tokens, skip_bad, progress)


def _is_trace(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _open_lines(path: Path, chunk_tokens: int | None, skip_bad: bool, progress: Progress | None) -> Recording:
    first, where = _first_object(path, skip_bad)
    if "requests" in first and "block_size" in first:
        block_tokens = records.integer(first, "block_size", where, least=1)
        size = block_tokens if chunk_tokens is None else chunk_tokens
        return WekaSessions(path, size, block_tokens=block_tokens, skip_bad=skip_bad, progress=progress)
    if "hash_ids" in first and "input_length" in first:
        size = MOONCAKE_BLOCK_TOKENS if chunk_tokens is None else chunk_tokens
        return MooncakeRequests(path, size, skip_bad=skip_bad, progress=progress)
    fields = ", ".join(list(first)[:8]) or "none"
    raise RecordingError(f"{where}: of an unknown format, with the fields {fields}; allowed are {ALLOWED}")


def _first_object(path: Path, skip_bad: bool) -> tuple[dict[str, Any], str]:
    """The first record, or where bad ones are skipped the first that is JSON, and where it is."""
    for where, line in islice(records.lines(path), _PROBED_LINES):
        try:
            return records.parse_object(line, where), where
        except RecordError:
            if not skip_bad:
                raise
    raise RecordingError(f"{path}: has no record to tell its format; allowed are {ALLOWED}")
