"""What happens to calls, written down: times, tasks, lanes, ids. The proxy's memory of a recording."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from efficient_lmcache.replay.recorder.journal import (
    CallRecord,
    FailedRecord,
    Header,
    Journal,
    JournalError,
    JournalReader,
    Record,
    UnrecordedRecord,
    journal_path,
)
from efficient_lmcache.replay.recorder.key_file import key_path, new_key, read_key
from efficient_lmcache.replay.recorder.lanes import Lanes
from efficient_lmcache.replay.recorder.privacy import task_pseudonym
from efficient_lmcache.replay.recorder.sealing import Seal
from efficient_lmcache.replay.recorder.tasks import INFERRED, LABELLED, InferredTasks
from efficient_lmcache.replay.trace import Tokens


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What a recording is told.

    Attributes:
        out: the trace; its journal and, in private mode, its key lie beside it until it is complete.
        vocab_size: ids are below it; None: the highest recorded id decides.
        tokenizer: the model's name for the trace's manifest, if known.
        private: replace ids and tasks' names by pseudonyms.
    """

    out: Path
    vocab_size: int | None = None
    tokenizer: str | None = None
    private: bool = False


@dataclass(slots=True)
class Tally:
    """What the journal holds. Reasons of failed and unrecorded calls are counted one by one."""

    calls: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unrecorded: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        if isinstance(record, CallRecord):
            self.calls += 1
        elif isinstance(record, FailedRecord):
            self.failed[record.reason] += 1
        else:
            self.unrecorded[record.reason] += 1


class Recorder:
    """Opens a recording, or goes on with the journal that an earlier process left.

    Raises:
        JournalError: a journal of other options, of another process, or damaged; a private one without its key.
    """

    def __init__(self, options: RecordOptions, say: Callable[[str], None] = lambda _: None) -> None:
        self.tally = Tally()
        self._say = say
        self._lanes = Lanes()
        self._tasks = InferredTasks()
        path = journal_path(options.out)
        header = Header(options.vocab_size, options.tokenizer, options.private, time.time())
        continued = path.exists() and path.stat().st_size > 0
        if continued:
            header = _agreed_header(path, header)
        self._vocab_size = header.vocab_size
        self._key: bytes | None = None
        self._journal = Journal(path, header)
        try:
            if header.private:
                # Nobody else changes the key of a journal that is ours.
                self._key = (read_key if continued and _holds_records(path) else new_key)(key_path(options.out))
                self._journal.seal = Seal(self._key)
            latest_s = self._continue(path) if continued else 0.0
        except BaseException:
            self._journal.close()
            raise
        # The machine's clock may have been set back since an earlier process.
        self._monotonic_offset_s = max(time.time() - header.started_at, latest_s) - time.monotonic()

    def now_s(self) -> float:
        """Seconds since the recording began, over restarts; within one process it never goes back."""
        return self._monotonic_offset_s + time.monotonic()

    def begin(self, task: str | None = None, salt: str | None = None) -> LiveCall:
        """A call has arrived; `task` is its client's name for its task."""
        if task is not None:
            task = LABELLED + (task if self._key is None else task_pseudonym(self._key, task))
        return LiveCall(self, self.now_s(), task, salt)

    def close(self) -> None:
        self._journal.close()

    def _continue(self, path: Path) -> float:
        """Know what the journal knows; returns when the latest of its calls ended."""
        latest_s = 0.0
        with JournalReader(path) as reader:
            reader.seal = self._journal.seal
            for _, record in reader.records():
                self.tally.add(record)
                latest_s = max(latest_s, record.end_s)
                if isinstance(record, CallRecord):
                    self._recall(record, path)
            if reader.torn_bytes:
                self._journal.drop_tail(reader.torn_bytes)
                self._say(f"{path}: dropped a last record that was cut off ({reader.torn_bytes} bytes)")
        self._say(f"{path}: going on after {self.tally.calls} calls")
        return latest_s

    def _recall(self, record: CallRecord, path: Path) -> None:
        tokens = extend(self._lanes.last(record.task, record.lane), record, path)
        self._lanes.remember(record.task, record.lane, record.end_s, tokens)
        if record.task.startswith(INFERRED):
            self._tasks.recall(record.task, tokens[: len(tokens) - len(record.output) // tokens.itemsize])

    def _task_of(self, prompt: Tokens, salt: str | None) -> str:
        return self._tasks.assign(prompt, salt)

    def _finish(self, task: str, start_s: float, end_s: float, prompt: Tokens, output: Tokens) -> None:
        tokens = np.concatenate((prompt, output))
        if self._vocab_size is not None and int(tokens.max()) >= self._vocab_size:
            raise ValueError("a token id outside --vocab-size")
        lane, keep = self._lanes.place(task, start_s, tokens[: len(prompt)])
        added, answer = tokens[keep : len(prompt)], tokens[len(prompt) :]
        self._write(CallRecord(task, lane, start_s, end_s, keep, _packed(added), _packed(answer)))
        self._lanes.remember(task, lane, end_s, tokens)

    def _write(self, record: Record) -> None:
        try:
            self._journal.append(record)
        except OSError as error:
            # The agents must go on even if their recording cannot.
            reason = f"the journal cannot be written: {error.strerror}"
            self._say(f"{self._journal.path}: {reason}")
            self.tally.unrecorded[reason] += 1
            raise _NotWritten from error
        self.tally.add(record)


class LiveCall:
    """One call in flight. The first of `finish`, `fail` and `leave_out` decides what becomes of it."""

    def __init__(self, recorder: Recorder, start_s: float, task: str | None, salt: str | None) -> None:
        self._recorder = recorder
        self._start_s = start_s
        self._task = task
        self._salt = salt
        self._end_s: float | None = None
        self._ended = False

    def know_prompt(self, prompt: Tokens) -> None:
        """The prompt has been seen, which may tell the task before the output is there."""
        if self._task is None:
            self._task = self._recorder._task_of(prompt, self._salt)

    def know_output(self) -> None:
        """The output has been seen whole: its client may send the next call before the stream's last event."""
        if self._end_s is None:
            self._end_s = self._recorder.now_s()

    def finish(self, prompt: Tokens, output: Tokens) -> None:
        """It was answered, with exactly these ids (uint32 [n] and [m], n, m >= 1); written when this returns."""
        if self._ended:
            return
        try:
            self.know_prompt(prompt)
            self.know_output()
            assert self._task is not None
            assert self._end_s is not None
            self._recorder._finish(self._task, self._start_s, self._end_s, prompt, output)
        except ValueError as error:
            self.leave_out(str(error))
        except _NotWritten:
            pass
        self._ended = True

    def fail(self, reason: str) -> None:
        """It was not answered; its time becomes part of the interval to the task's next call."""
        self._end(FailedRecord, reason)

    def leave_out(self, reason: str) -> None:
        """It was answered, but its exact ids are not known."""
        self._end(UnrecordedRecord, reason)

    def _end(self, kind: type[FailedRecord] | type[UnrecordedRecord], reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(_NotWritten):
            self._recorder._write(kind(self._task, self._start_s, self._recorder.now_s(), reason))


class _NotWritten(Exception):
    """A record that is not in the journal, as has been said."""


def extend(known: Tokens, record: CallRecord, path: Path) -> Tokens:
    """uint32 [n + m]: a call's prompt and output, from those of its lane's last call."""
    if record.keep > len(known):
        raise JournalError(
            f"{path}: a call of {record.task!r} keeps {record.keep} of the {len(known)} tokens before it"
        )
    return np.concatenate((known[: record.keep], *(np.frombuffer(ids, "<u4") for ids in (record.added, record.output))))


def _packed(tokens: Tokens) -> bytes:
    return tokens.astype("<u4").tobytes()


def _agreed_header(path: Path, asked: Header) -> Header:
    with JournalReader(path) as reader:
        header = reader.header
    for name, option in (("vocab_size", "--vocab-size or --model"), ("private", "--private")):
        if getattr(header, name) != getattr(asked, name):
            raise JournalError(
                f"{path}: was begun with {name}={getattr(header, name)}, not {getattr(asked, name)}; repeat {option} "
                "as then, or finish it with --finish"
            )
    return header


def _holds_records(path: Path) -> bool:
    with JournalReader(path) as reader:
        return next(reader.records(), None) is not None
