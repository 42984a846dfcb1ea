"""One interface over every recording: `open_stream` recognises the format and gives a stream of `References`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from efficient_lmcache.core.references import References
from efficient_lmcache.replay.frames import MAGIC
from efficient_lmcache.replay.importers import bailian_files, mooncake_files, records
from efficient_lmcache.replay.importers.block_requests import block_tokens
from efficient_lmcache.replay.importers.formats import (
    directory_format,
    first_object,
    first_session,
    named_format,
    no_recording,
    record_format,
    unknown_record,
)
from efficient_lmcache.replay.importers.records import Progress, RecordError, RecordingError
from efficient_lmcache.replay.importers.weka_files import blocks_of as weka_blocks_of
from efficient_lmcache.sizing.readers.block_requests import BailianRequests, MooncakeRequests
from efficient_lmcache.sizing.readers.lookup_log import FILES as LOG_FILES
from efficient_lmcache.sizing.readers.lookup_log import LookupLog, log_files
from efficient_lmcache.sizing.readers.openhands import OpenHandsCompletions, OpenHandsHistories
from efficient_lmcache.sizing.readers.recording import SharedTokens
from efficient_lmcache.sizing.readers.trace_v1 import TraceV1
from efficient_lmcache.sizing.readers.trajectories import MiniSweAgent, SweAgent, TextRecording
from efficient_lmcache.sizing.readers.weka import WekaSessions

__all__ = ["ALLOWED", "TOKEN_CHUNK_TOKENS", "RecordError", "RecordingError", "ReferenceStream", "open_stream"]

TOKEN_CHUNK_TOKENS = 256  # LMCache's default chunk_size
ALLOWED = (
    "allowed are a trace, agentic Weka sessions, Mooncake or Qwen-Bailian requests, LMCache lookup-hash logs, "
    "trajectories of mini-swe-agent or SWE-agent, and OpenHands' output.jsonl or llm_completions"
)


class ReferenceStream(Protocol):
    """A recording as the chunks that its calls reference; every iteration reads it from the start.

    Attributes:
        name: of the recording; never a path.
        chunk_tokens: b.
        notes: what the recording does not tell, and what is assumed instead.
        lanes: lane names by number; complete after an iteration.
        skipped: bad records that the iteration left out.
        has_shared_chunks: chunks of several sessions have one number; otherwise such sharing is not recorded.
        lanes_are_guessed: after an iteration: some lanes are a guess, as nothing in the recording tells them.
        shared: the tokens every call shares with the one before in its lane, where the recording has tokens, complete
            after an iteration; None where it has blocks.
    """

    name: str
    chunk_tokens: int
    notes: tuple[str, ...]
    lanes: list[str]
    skipped: int
    has_shared_chunks: bool
    lanes_are_guessed: bool
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
    kind = _directory_kind(path) if path.is_dir() else _file_kind(path, skip_bad)
    if kind.block_tokens and tokenizer is not None:
        raise RecordingError(f"--tokenizer {tokenizer}: {path} has ids of blocks, which no tokenizer can read")
    size = kind.block_tokens or TOKEN_CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    common: dict[str, Any] = {"skip_bad": skip_bad, "progress": progress}
    if kind.block_tokens:
        common["block_tokens"] = kind.block_tokens
    else:
        common["with_outputs"] = with_outputs
    if kind.reader in _TEXT_READERS.values():
        common["tokenizer"] = tokenizer
    return kind.reader(path, size, **common)


class _Kind(NamedTuple):
    """A format: its reader, and the tokens of a block where it has blocks."""

    reader: Callable[..., ReferenceStream]
    block_tokens: int = 0


_TEXT_READERS: dict[str, type[TextRecording]] = {
    "mini-swe-agent": MiniSweAgent,
    "swe-agent": SweAgent,
    "openhands-completions": OpenHandsCompletions,
    "openhands-history": OpenHandsHistories,
}


def _file_kind(path: Path, skip_bad: bool) -> _Kind:
    if (name := named_format(path)) is not None:
        return _Kind(_TEXT_READERS[name])
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return _Kind(TraceV1)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from error
    first, where = _first_object(path, skip_bad)
    if "chunk_hashes" in first:
        return _Kind(LookupLog, records.integer(first, "chunk_size", where, least=1))
    name = record_format(first)
    if name == "mooncake":
        return _Kind(MooncakeRequests, block_tokens(path, mooncake_files.BLOCK_TOKENS))
    if name == "qwen-bailian":
        return _Kind(BailianRequests, block_tokens(path, bailian_files.BLOCK_TOKENS))
    if name == "weka":
        return _weka_kind(first, where)
    if name in _TEXT_READERS:
        return _Kind(_TEXT_READERS[name])
    raise unknown_record(first, where, ALLOWED)


def _directory_kind(path: Path) -> _Kind:
    if any(path.glob(LOG_FILES)):
        first, where = _first_object(log_files(path)[0], skip_bad=True)
        return _Kind(LookupLog, records.integer(first, "chunk_size", where, least=1))
    name = directory_format(path)
    if name == "weka" and (session := first_session(path)) is not None:
        return _weka_kind(*session)
    if name is not None:
        return _Kind(_TEXT_READERS[name])
    raise no_recording(path, ALLOWED)


def _weka_kind(first: dict[str, Any], where: str) -> _Kind:
    blocks = weka_blocks_of(first, where)
    return _Kind(partial(WekaSessions, are_global=blocks.are_global), blocks.tokens)


def _first_object(path: Path, skip_bad: bool) -> tuple[dict[str, Any], str]:
    found = first_object(path, skip_bad)
    if found is None:
        raise RecordingError(f"{path}: has no record to tell its format; {ALLOWED}")
    return found
