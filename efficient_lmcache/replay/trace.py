"""Trace format v1: recorded agent tasks as exact token ids, small on disk and streamed in bounded memory.

A file holds a manifest, one record per task, and a footer with the index and a SHA-256 of everything before it
(`frames` has the byte layout). Agents resend their conversation on every turn, so a call's prompt is stored as the
number of tokens it keeps of (previous prompt + previous output) and the tokens that follow: a trace costs what its
agents *add*, not what they submit.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from efficient_lmcache.replay import frames
from efficient_lmcache.replay.frames import NoTraceError, TraceError
from efficient_lmcache.replay.shapes import Count, Shape, problem

__all__ = [
    "MAX_VOCAB_SIZE",
    "Call",
    "Manifest",
    "NoTraceError",
    "TaskInfo",
    "Tokens",
    "Totals",
    "TraceError",
    "TraceReader",
    "TraceWriter",
    "common_prefix_tokens",
]

Tokens = npt.NDArray[np.uint32]  # one-dimensional
MAX_VOCAB_SIZE = 1 << 32
_UINT16_IDS = 1 << 16
_HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One model call of a task.

    Attributes:
        prompt_tokens: uint32 [n], n >= 1: the exact ids submitted.
        output_tokens: uint32 [m], m >= 1: the exact ids returned.
        interval_s: seconds >= 0 from the end of the previous response (the task's start for its first call) to this
            call's dispatch: the agent's and its tools' own time.
        start_s: recorded dispatch in seconds since the recording began, where known.
    """

    prompt_tokens: Tokens
    output_tokens: Tokens
    interval_s: float
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What the index says of one task; token counts are summed over its calls."""

    task_id: str
    calls: int
    prompt_tokens: int
    output_tokens: int
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Totals:
    """The whole trace, summed over its tasks (`max_prompt_tokens`: the longest prompt)."""

    tasks: int
    calls: int
    prompt_tokens: int
    output_tokens: int
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a trace says of itself.

    Attributes:
        vocab_size: every token id is below it; checked when writing and when reading.
        tokenizer: "tekken", "bpe:16384", a directory's name, or "synthetic".
        source: what it was made from: a format and a file's name, never an absolute path.
        assumptions: what the importer could not know and assumed.
        history: the steps applied, oldest first: ``{"step": "trim", …}``.
    """

    vocab_size: int
    tokenizer: str
    source: str
    assumptions: tuple[str, ...] = ()
    history: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return {**asdict(self), "assumptions": list(self.assumptions), "history": list(self.history)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`."""
        return cls(**{**fields, "assumptions": tuple(fields["assumptions"]), "history": tuple(fields["history"])})


def common_prefix_tokens(left: npt.NDArray[np.integer[Any]], right: npt.NDArray[np.integer[Any]]) -> int:
    """The length of the longest common prefix of two sequences of tokens, or of blocks' ids."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


class TraceWriter:
    """Writes ``PATH.partial`` and renames it to PATH when the ``with`` block ends well; removes it otherwise.

    Raises TraceError for what a trace may not hold: a repeated task id, a task without calls, an empty prompt or
    output, a token id outside the manifest's vocabulary, a negative or unknown interval.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest) -> None:
        if not 1 <= manifest.vocab_size <= MAX_VOCAB_SIZE:
            raise TraceError(f"{path}: vocab_size is {manifest.vocab_size}; it must be from 1 to {MAX_VOCAB_SIZE}")
        self.path = Path(path)
        self.manifest = manifest
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._index: list[tuple[TaskInfo, int]] = []
        self._ids: set[str] = set()
        self._sha256 = hashlib.sha256()
        self._offset = 0
        self._file: BinaryIO = open(self._partial, "wb")  # noqa: SIM115 - closed by __exit__
        self._write(frames.preamble())
        self._write(frames.pack_frame(manifest.to_json()))

    def write_task(self, task_id: str, calls: Iterable[Call]) -> None:
        """Append one task; `calls` is consumed one call at a time."""
        if task_id in self._ids:
            raise TraceError(f"{self.path}: task {task_id!r} occurs twice; task ids must be unique")
        rows: list[tuple[Any, ...]] = []
        prompt_lengths: list[int] = []
        output_tokens = 0
        known: Tokens = np.empty(0, np.uint32)
        for number, call in enumerate(calls):
            where = f"{self.path}: task {task_id!r}, call {number}"
            prompt = _checked_tokens(call.prompt_tokens, self.manifest.vocab_size, f"{where}: prompt")
            output = _checked_tokens(call.output_tokens, self.manifest.vocab_size, f"{where}: output")
            _check_seconds(call, where)
            keep = common_prefix_tokens(prompt, known)
            rows.append((keep, self._pack(prompt[keep:]), self._pack(output), call.interval_s, call.start_s))
            prompt_lengths.append(len(prompt))
            output_tokens += len(output)
            known = np.concatenate((prompt, output))
        if not rows:
            raise TraceError(f"{self.path}: task {task_id!r} has no calls; a task needs at least one")
        info = TaskInfo(task_id, len(rows), sum(prompt_lengths), output_tokens, max(prompt_lengths))
        self._ids.add(task_id)
        self._index.append((info, self._offset))
        self._write(frames.pack_frame({"task_id": task_id, "calls": rows}))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            return
        footer_offset = self._offset
        index = [{**asdict(info), "offset": offset} for info, offset in self._index]
        self._file.write(frames.pack_frame({"tasks": index, "sha256": self._sha256.digest()}))
        self._file.write(frames.pack_trailer(footer_offset))
        self._file.close()
        self._partial.replace(self.path)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self._offset += len(data)

    def _pack(self, tokens: Tokens) -> bytes:
        return tokens.astype(_id_type(self.manifest.vocab_size)).tobytes()


class TraceReader:
    """Reads a trace; opening reads the manifest and the index only, `calls` decodes one task when asked.

    Attributes:
        manifest, tasks (the index, in recorded order), totals.
        sha256: hex digest of everything before the footer; it identifies the workload.

    Raises TraceError, at opening or while reading, naming the file and the record that is at fault; NoTraceError
    where there is no trace at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115 - closed by __exit__
        except FileNotFoundError:
            partial = self.path.with_name(self.path.name + ".partial")
            hint = f"; {partial.name} beside it is an unfinished write, make it again" if partial.exists() else ""
            raise NoTraceError(f"{self.path}: no such trace{hint}") from None
        except IsADirectoryError:
            raise NoTraceError(f"{self.path}: is a directory, but `trace import` may make a trace of it") from None
        except OSError as error:
            raise NoTraceError(f"{self.path}: cannot be read: {error.strerror}") from error
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        first = frames.check_preamble(self._file, self.path)
        self._footer_offset = frames.find_footer(self._file, self.path)
        stored, _ = frames.read_frame(self._file, first, self.path, "the manifest")
        self.manifest = Manifest.from_json(_checked(stored, _ManifestFields, f"{self.path}: the manifest").model_dump())
        stored, _ = frames.read_frame(self._file, self._footer_offset, self.path, "the footer")
        footer = _checked(stored, _FooterFields, f"{self.path}: the footer")
        self.sha256 = footer.sha256.hex()
        self._offsets = [entry.offset for entry in footer.tasks]
        self.tasks = [TaskInfo(**entry.model_dump(exclude={"offset"})) for entry in footer.tasks]
        self.totals = Totals(
            tasks=len(self.tasks),
            calls=sum(task.calls for task in self.tasks),
            prompt_tokens=sum(task.prompt_tokens for task in self.tasks),
            output_tokens=sum(task.output_tokens for task in self.tasks),
            max_prompt_tokens=max((task.max_prompt_tokens for task in self.tasks), default=0),
        )

    def calls(self, task_index: int) -> Iterator[Call]:
        """The calls of one task, decoded one at a time; only the task's own record and its last call stay in memory.

        Iterators of several tasks may be advanced in any order.
        """
        info = self.tasks[task_index]
        where = f"task {info.task_id!r} (number {task_index + 1})"
        record, _ = frames.read_frame(self._file, self._offsets[task_index], self.path, where)
        rows = record.get("calls") if isinstance(record, dict) else None
        if not isinstance(rows, list) or len(rows) != info.calls or record.get("task_id") != info.task_id:
            raise TraceError(f"{self.path}: {where} is not the record that the index promises")
        known: Tokens = np.empty(0, np.uint32)
        for number, row in enumerate(rows):
            call = self._decode(row, known, f"{self.path}: task {info.task_id!r}, call {number}")
            known = np.concatenate((call.prompt_tokens, call.output_tokens))
            yield call

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Stream the whole file: the hash matches and every call decodes and agrees with the index.

        `progress` is called with (tasks checked, tasks in all). Raises TraceError at the first disagreement.
        """
        for number, info in enumerate(self.tasks):
            lengths = [(len(call.prompt_tokens), len(call.output_tokens)) for call in self.calls(number)]
            prompts, outputs = [prompt for prompt, _ in lengths], [output for _, output in lengths]
            if info != TaskInfo(info.task_id, len(lengths), sum(prompts), sum(outputs), max(prompts)):
                raise TraceError(f"{self.path}: task {info.task_id!r} does not have the token counts of the index")
            if progress is not None:
                progress(number + 1, len(self.tasks))
        digest = hashlib.sha256()
        self._file.seek(0)
        remaining = self._footer_offset
        while block := self._file.read(min(_HASH_BLOCK_BYTES, remaining)):
            digest.update(block)
            remaining -= len(block)
        if digest.hexdigest() != self.sha256:
            raise TraceError(f"{self.path}: its bytes do not hash to the SHA-256 in its footer")

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _decode(self, row: Any, known: Tokens, where: str) -> Call:
        try:
            keep, added, output, interval_s, start_s = row
            id_type = _id_type(self.manifest.vocab_size)
            added, output = (np.frombuffer(part, id_type).astype(np.uint32) for part in (added, output))
        except (TypeError, ValueError) as error:
            raise TraceError(f"{where}: not a call of format version {frames.VERSION}: {error}") from error
        if type(keep) is not int or not 0 <= keep <= len(known):
            raise TraceError(f"{where}: keeps {keep!r} of the {len(known)} tokens before it")
        prompt = _checked_tokens(np.concatenate((known[:keep], added)), self.manifest.vocab_size, f"{where}: prompt")
        call = Call(prompt, _checked_tokens(output, self.manifest.vocab_size, f"{where}: output"), interval_s, start_s)
        _check_seconds(call, where)
        return call


class _ManifestFields(Shape):
    """As `Manifest`."""

    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    tokenizer: str
    source: str
    assumptions: list[str]
    history: list[dict[str, Any]]


class _IndexEntry(Shape):
    """A `TaskInfo` and where its record begins."""

    task_id: str
    calls: Count
    prompt_tokens: Count
    output_tokens: Count
    max_prompt_tokens: Count
    offset: Count


class _FooterFields(Shape):
    tasks: list[_IndexEntry]
    sha256: bytes


_Fields = TypeVar("_Fields", bound=Shape)


def _checked(stored: Any, fields: type[_Fields], where: str) -> _Fields:
    try:
        return fields.model_validate(stored)
    except ValidationError as error:
        raise TraceError(f"{where} lacks a field or garbles it: {problem(error)}") from error


def _id_type(vocab_size: int) -> str:
    """The stored integer type of a token id, little-endian."""
    return "<u2" if vocab_size <= _UINT16_IDS else "<u4"


def _checked_tokens(tokens: Any, vocab_size: int, where: str) -> Tokens:
    array = np.asarray(tokens)
    if array.size == 0:
        raise TraceError(f"{where} is empty; it needs at least one token")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TraceError(f"{where} must be a one-dimensional sequence of integers")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= vocab_size:
        token = lowest if lowest < 0 else highest
        raise TraceError(f"{where} has token id {token}; the vocabulary allows 0 to {vocab_size - 1}")
    return array.astype(np.uint32, copy=False)


def _check_seconds(call: Call, where: str) -> None:
    interval_s, start_s = call.interval_s, call.start_s
    if not (isinstance(interval_s, (int, float)) and math.isfinite(interval_s) and interval_s >= 0):
        raise TraceError(f"{where}: interval_s is {interval_s!r}; it must be a finite number >= 0")
    if start_s is not None and not (isinstance(start_s, (int, float)) and math.isfinite(start_s)):
        raise TraceError(f"{where}: start_s is {start_s!r}; it must be a finite number or absent")
