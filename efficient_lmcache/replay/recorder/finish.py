"""From a journal to a trace: lanes become tasks, in the order in which they began."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from efficient_lmcache.replay.recorder.journal import CallRecord, FailedRecord, Header, JournalReader, journal_path
from efficient_lmcache.replay.recorder.key_file import key_path, read_key
from efficient_lmcache.replay.recorder.privacy import Pseudonyms
from efficient_lmcache.replay.recorder.recorder import Tally, extend
from efficient_lmcache.replay.recorder.sealing import Seal
from efficient_lmcache.replay.recorder.tasks import INFERRED, display_name
from efficient_lmcache.replay.trace import Call, Manifest, Tokens, TraceWriter

_NOTHING: Tokens = np.empty(0, np.uint32)


@dataclass(slots=True)
class _Lane:
    """A trace's task to be: the places of its calls' records, in order, and when the first of them began."""

    start_s: float
    offsets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Contents:
    """What a journal holds, its ids left out.

    Attributes:
        lanes: of each task its lanes.
        failed_since_s: when a labelled task's first failed call began.
        vocab_size: the header's, else the highest id + 1.
    """

    header: Header
    tally: Tally
    lanes: dict[str, dict[int, _Lane]]
    failed_since_s: dict[str, float]
    vocab_size: int


def write_trace(out: Path, progress: Callable[[int, int], None] | None = None) -> Tally:
    """Build the trace from its journal; once it is complete, the journal and the key are gone.

    Without a single finished call no trace is written, and the journal goes too. `progress` is called with (tasks
    written, tasks in all).

    Raises:
        JournalError: no journal, a damaged one, one that a recorder is writing, or a private one without its key;
            nothing is changed.
        OSError: the trace cannot be written; the journal is kept.
    """
    with JournalReader(journal_path(out)) as reader:
        reader.lock()
        contents = _read(reader)
        if contents.tally.calls:
            _write(out, reader, contents, progress)
        for path in (key_path(out), journal_path(out)):
            path.unlink(missing_ok=True)
    return contents.tally


def _read(reader: JournalReader) -> _Contents:
    lanes: dict[str, dict[int, _Lane]] = defaultdict(dict)
    failed_since_s: dict[str, float] = {}
    tally, highest = Tally(), 0
    for offset, record in reader.records():
        tally.add(record)
        if isinstance(record, CallRecord):
            lane = lanes[record.task].setdefault(record.lane, _Lane(record.start_s))
            lane.offsets.append(offset)
            for ids in (record.added, record.output):
                highest = max(highest, int(np.frombuffer(ids, "<u4").max(initial=0)))
        elif isinstance(record, FailedRecord) and record.task is not None:
            failed_since_s.setdefault(record.task, record.start_s)
    return _Contents(reader.header, tally, lanes, failed_since_s, reader.header.vocab_size or highest + 1)


def _write(out: Path, reader: JournalReader, contents: _Contents, progress: Callable[[int, int], None] | None) -> None:
    pseudonyms = _unsealed(out, reader) if contents.header.private else None
    ordered = sorted(
        ((task, number, lane) for task, lanes in contents.lanes.items() for number, lane in lanes.items()),
        key=lambda entry: entry[2].start_s,
    )
    taken: set[str] = set()
    with TraceWriter(out, _manifest(contents)) as writer:
        for done, (task, number, lane) in enumerate(ordered):
            name = _unique(display_name(task) + (f"#{number + 1}" if number else ""), taken)
            # A lane beside the first begins when its first call does: what came before is not its own time.
            began_s = lane.start_s if number else min(lane.start_s, contents.failed_since_s.get(task, lane.start_s))
            writer.write_task(name, _calls(reader, lane, began_s, pseudonyms))
            if progress is not None:
                progress(done + 1, len(ordered))
    with open(out, "rb") as file:
        os.fsync(file.fileno())  # before the journal goes


def _unsealed(out: Path, reader: JournalReader) -> Pseudonyms:
    """Let a private journal's ids be read, and say what the trace shows of them."""
    key, vocab_size = read_key(key_path(out)), reader.header.vocab_size
    assert vocab_size is not None
    reader.seal = Seal(key)
    return Pseudonyms(key, vocab_size)


def _calls(reader: JournalReader, lane: _Lane, began_s: float, pseudonyms: Pseudonyms | None) -> Iterator[Call]:
    known, ready_s = _NOTHING, began_s
    for offset in lane.offsets:
        record = reader.record(offset)
        assert isinstance(record, CallRecord)
        known = extend(known, record, reader.path)
        shown = known if pseudonyms is None else pseudonyms.replace(known)
        prompt_tokens = len(known) - len(record.output) // known.itemsize
        yield Call(shown[:prompt_tokens], shown[prompt_tokens:], record.start_s - ready_s, record.start_s)
        ready_s = record.end_s


def _unique(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "#"
    taken.add(name)
    return name


def _manifest(contents: _Contents) -> Manifest:
    header, tally = contents.header, contents.tally
    inferred = sum(task.startswith(INFERRED) for task in contents.lanes)
    lanes = sum(len(lanes) - 1 for lanes in contents.lanes.values())
    said = {
        f"{inferred} of {len(contents.lanes)} tasks were told by their prompts' prefixes": inferred,
        f"{lanes} tasks (NAME#2, …) hold calls that overlapped others of their task": lanes,
        "the vocabulary ends at the highest recorded id": header.vocab_size is None,
        "token ids and tasks' names are pseudonyms": header.private,
        f"{tally.failed.total()} calls failed or were aborted; their time is part of the intervals": tally.failed,
        **{f"{count} calls are not recorded: {reason}": count for reason, count in tally.unrecorded.items()},
    }
    return Manifest(
        vocab_size=contents.vocab_size,
        tokenizer=header.tokenizer or "the recorded server's",
        source="recorded live",
        assumptions=tuple(text for text, holds in said.items() if holds),
        history=({"step": "record", "private": header.private},),
    )
