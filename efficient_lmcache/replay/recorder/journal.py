"""The append-only journal beside a trace: every call that has ended, written before its client sees the end.

Layout: ``magic (8)``, then frames as in a trace (`replay.frames`): the header, then one record per call. What a killed
process was writing is at most a last frame that is cut off; reading stops before it, and continuing drops it. A call
keeps its first `keep` tokens of its lane's last call (prompt and output), as in a trace. In a private recording ids are
on disk as ciphertext (`sealing`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from efficient_lmcache.replay import frames
from efficient_lmcache.replay.frames import TraceError
from efficient_lmcache.replay.recorder.sealing import Seal

MAGIC = b"ELMJRNL2"
_LEVEL = -5  # compression: a first prompt of 33 K tokens must not take a millisecond


class JournalError(ValueError):
    """A journal that cannot be continued or finished; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a recording was started with; a restart must agree.

    Attributes:
        vocab_size: ids are below it; None: not told, and taken from the highest id in the end.
        tokenizer: the model directory's name, if one was given.
        private: tasks' names are pseudonyms, ids are sealed, and become pseudonyms in the trace.
        started_at: Unix time, seconds; all times of the records count from it.
    """

    vocab_size: int | None
    tokenizer: str | None
    private: bool
    started_at: float


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A finished call. `task` is "label:NAME" or "inferred:NUMBER"; `lane` counts from 0; ids are little-endian u32."""

    task: str
    lane: int
    start_s: float
    end_s: float
    keep: int
    added: bytes
    output: bytes


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A call without an answer to the client: an error, or aborted. `task` is None where it was never known."""

    task: str | None
    start_s: float
    end_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class UnrecordedRecord:
    """An answered call whose exact ids are not known, and why."""

    task: str | None
    start_s: float
    end_s: float
    reason: str


Record = CallRecord | FailedRecord | UnrecordedRecord
_KINDS: dict[str, type[Record]] = {"call": CallRecord, "failed": FailedRecord, "unrecorded": UnrecordedRecord}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def journal_path(out: Path) -> Path:
    return out.with_name(out.name + ".journal")


class JournalReader:
    """Reads a journal's records, whole ones only.

    Attributes:
        header: what the recording was started with.
        torn_bytes: how much of a cut-off last record follows the whole ones; known once `records` has ended.
        seal: of a private journal; without it, its ids are read as they are on disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0
        self.seal: Seal | None = None
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        except FileNotFoundError:
            raise JournalError(f"{path}: no such journal; there is nothing to finish") from None
        except OSError as error:
            raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            if self._file.read(len(MAGIC)) != MAGIC:
                raise JournalError(f"{path}: not a journal: it does not start with {MAGIC.decode()!r}")
            header, self._first = frames.read_frame(self._file, len(MAGIC), path, "the header")
            self.header = Header(**header)
        except (TraceError, TypeError) as error:
            self._file.close()
            raise JournalError(str(error)) from error
        except JournalError:
            self._file.close()
            raise

    def records(self) -> Iterator[tuple[int, Record]]:
        """(offset, record) in the order of writing. JournalError for damage anywhere but at the very end."""
        offset, size = self._first, os.fstat(self._file.fileno()).st_size
        number = 0
        while offset < size:
            number += 1
            try:
                record, next_offset = self._read(offset, f"record {number}")
            except _CutOff:
                self.torn_bytes = size - offset
                return
            yield offset, record
            offset = next_offset

    def lock(self) -> None:
        """Keep recorders out until this is closed. JournalError if there is one."""
        _lock(self._file.fileno(), self.path)

    def record(self, offset: int) -> Record:
        """The record at an offset that `records` has given."""
        return self._read(offset, f"the record at byte {offset}")[0]

    def _read(self, offset: int, name: str) -> tuple[Record, int]:
        try:
            frame, end = frames.read_frame(self._file, offset, self.path, name)
            record = _KINDS[frame.pop("kind")](**frame)
        except TraceError as error:
            if "cut off" in str(error):
                raise _CutOff(str(error)) from error
            raise JournalError(str(error)) from error
        except (KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"{self.path}: {name} is not a record of this version: {error}") from error
        if self.seal is not None and isinstance(record, CallRecord):
            record = replace(record, added=self.seal.open(record.added), output=self.seal.open(record.output))
        return record, end

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise JournalError(f"{path}: another recorder is writing it") from None
    if not os.fstat(fd).st_nlink:
        raise JournalError(f"{path}: became a trace just now; start again")


class _CutOff(JournalError):
    """The file ends inside a record."""


class Journal:
    """The journal of a running recorder: one process at a time, one write per record.

    A record that has been written survives the end of the process in any form; against a power cut it is not synced.

    Attributes:
        seal: for the ids of a private recording.
    """

    def __init__(self, path: Path, header: Header) -> None:
        """Create the journal, or open it behind its last whole record. `header` must be that of an existing one."""
        self.path = path
        self.seal: Seal | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(self._fd, path)
        except JournalError:
            os.close(self._fd)
            raise
        self._end = os.fstat(self._fd).st_size
        if not self._end:
            self._write(MAGIC + frames.pack_frame(asdict(header), _LEVEL))

    def drop_tail(self, torn_bytes: int) -> None:
        """Remove what follows the last whole record."""
        self._end -= torn_bytes
        os.ftruncate(self._fd, self._end)

    def append(self, record: Record) -> None:
        """OSError if it cannot be written; the journal is then as it was."""
        if self.seal is not None and isinstance(record, CallRecord):
            record = replace(record, added=self.seal.close(record.added), output=self.seal.close(record.output))
        entries: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
        self._write(frames.pack_frame({"kind": _NAMES[type(record)], **entries}, _LEVEL))

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.pwrite(self._fd, view, self._end + len(data) - len(view)) :]
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)
