"""Import of a recording, whatever its format: choose tasks, make tokens, write the trace."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from efficient_lmcache.replay.importers.blocks import BlockTokens
from efficient_lmcache.replay.importers.formats import IMPORTERS, BlockFormat, TextFormat, detect
from efficient_lmcache.replay.importers.records import RecordError, RecordingError, Skip, ignore, stop
from efficient_lmcache.replay.importers.rendering import rendered_calls
from efficient_lmcache.replay.importers.tasks import BlockTask, TextTask, UniqueNames
from efficient_lmcache.replay.model import DEFAULT_VOCAB_SIZE
from efficient_lmcache.replay.tokenizers import ALLOWED, load_tokenizer
from efficient_lmcache.replay.trace import Call, Manifest, TraceWriter

_Task = TypeVar("_Task", TextTask, BlockTask)

AUTO = "auto"
_UNKNOWN_INTERVALS = "interval_s of a task's first call, and any other that the recording does not tell, is 0"
_BLOCK_ASSUMPTIONS = (
    "tokens are made up: a block id stands for the same tokens wherever it occurs, different ids for different ones",
    "a prompt's partial last block is taken for the beginning of the block in its place in the task's next prompt, if "
    "that has all blocks before it and is at least as long",
    "an output is taken for what follows in that next prompt, if that is long enough, which makes the cache-stable "
    "length as large as the recording allows; any other output is made up, in no prompt",
    "an output of 0 tokens becomes 1",
)


def import_recording(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format_: str = AUTO,
    tokenizer: str | None = None,
    tasks: int | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
    skip: Skip = stop,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the tasks of a recording as a trace; those without a call are skipped and counted.

    Args:
        source: a file or directory.
        format_: one of `IMPORTERS`, or "auto" to tell it from the files.
        tokenizer: for recordings of text, which need it: what `load_tokenizer` takes; a BPE learns from the chosen
            tasks.
        tasks: how many tasks, sampled by `seed` and kept in recorded order; all by default.
        vocab_size: recordings of text: fold token ids into this many (id modulo vocab_size) when the tokenizer has
            more; equal text stays equal tokens, so that shared prefixes stay what they were. Recordings of blocks: the
            made-up ids are below it; 16,384 by default.
        skip: called with the error of each malformed record, which is left out and counted unless this raises it.
        progress: called with (tasks written, tasks in all).

    Raises ValueError (RecordingError or TraceError) naming file, record and field of what is malformed, or saying which
    argument does not fit.
    """
    source = Path(source)
    if vocab_size is not None and vocab_size < 1:
        raise RecordingError(f"--vocab is {vocab_size}; it must be at least 1")
    if format_ not in (AUTO, *IMPORTERS):
        raise RecordingError(f"--format {format_!r} is unknown; allowed are {AUTO}, {', '.join(IMPORTERS)}")
    name = detect(source, skip_bad=skip is not stop) if format_ == AUTO else format_
    _check_tokenizer(source, name, tokenizer)
    chosen = _choose(source, name, tasks, seed, skip)
    encoding = _encoding(source, name, tokenizer, vocab_size, chosen)
    step = {"step": "import", "tasks": len(chosen.numbers), "seed": seed, "skipped_without_calls": chosen.skipped}
    counted = ("bad_records", "repeated_names", "unknown_intervals")
    step |= {name: count for name in counted if (count := getattr(chosen, name))}
    manifest = Manifest(
        vocab_size=encoding.vocab_size,
        tokenizer=encoding.tokenizer,
        source=f"{name}: {source.resolve().name}",
        assumptions=(*IMPORTERS[name].assumptions, _UNKNOWN_INTERVALS, *encoding.assumptions),
        history=(step,),
    )
    with TraceWriter(out, manifest) as writer:
        for done, (task_id, calls) in enumerate(encoding.tasks, start=1):
            writer.write_task(task_id, (_with_interval(call) for call in calls))
            if progress is not None:
                progress(done, len(chosen.numbers))


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Which of a recording's tasks are imported.

    Attributes:
        numbers: of the tasks with calls.
        skipped: tasks that have none.
        bad_records: left out, as they are malformed.
        repeated_names: tasks with calls that are named as one before them.
        unknown_intervals: calls of the chosen tasks whose interval the recording does not tell.
        began_s: when the recording's earliest call was made; 0 where none is told.
    """

    numbers: frozenset[int]
    skipped: int
    bad_records: int
    repeated_names: int
    unknown_intervals: int
    began_s: float


@dataclass(frozen=True, slots=True)
class _Encoding:
    """The chosen tasks as tokens, and what the manifest says of those."""

    tokenizer: str
    vocab_size: int
    assumptions: tuple[str, ...]
    tasks: Iterator[tuple[str, Iterator[Call]]]


def _check_tokenizer(source: Path, name: str, tokenizer: str | None) -> None:
    if isinstance(IMPORTERS[name], TextFormat) and tokenizer is None:
        raise RecordingError(f"{source}: is a recording of text ({name}), which needs a --tokenizer; {ALLOWED}")
    if isinstance(IMPORTERS[name], BlockFormat) and tokenizer is not None:
        raise RecordingError(
            f"--tokenizer {tokenizer}: {source} has ids of blocks ({name}), whose tokens are made up; leave it out"
        )


def _choose(source: Path, name: str, tasks: int | None, seed: int, skip: Skip) -> _Chosen:
    names = UniqueNames()
    bad: list[RecordError] = []

    def leave_out(error: RecordError) -> None:
        skip(error)
        bad.append(error)

    unknown_intervals: list[int] = []
    skipped, began_s = 0, math.inf
    for task in IMPORTERS[name].tasks(source, leave_out):
        if not task.calls:
            skipped += 1
            continue
        names.of(task.task_id)
        unknown_intervals.append(sum(math.isnan(call.interval_s) for call in task.calls))
        began_s = min([began_s, *(call.start_s for call in task.calls if call.start_s is not None)])
    available = len(unknown_intervals)
    if not available:
        raise RecordingError(f"{source}: has no call to import")
    count = available if tasks is None else tasks
    if not 1 <= count <= available:
        raise RecordingError(f"{source}: cannot take {tasks} tasks; it has {available} with calls")
    numbers = frozenset(random.Random(seed).sample(range(available), count))
    unknown = sum(unknown_intervals[number] for number in numbers)
    return _Chosen(numbers, skipped, len(bad), names.repeated, unknown, began_s if math.isfinite(began_s) else 0.0)


def _encoding(source: Path, name: str, tokenizer: str | None, vocab_size: int | None, chosen: _Chosen) -> _Encoding:
    recording = IMPORTERS[name]
    if isinstance(recording, BlockFormat):
        return _block_encoding(source, recording, vocab_size or DEFAULT_VOCAB_SIZE, chosen)
    assert tokenizer is not None  # _check_tokenizer
    return _text_encoding(source, recording, tokenizer, vocab_size, chosen)


def _text_encoding(
    source: Path, recording: TextFormat, tokenizer: str, vocab_size: int | None, chosen: _Chosen
) -> _Encoding:
    def tasks() -> Iterator[TextTask]:
        return _picked(recording.tasks(source, ignore), chosen)

    encoder = load_tokenizer(tokenizer, lambda: (text for task in tasks() for text in task.texts))
    size = min(vocab_size or encoder.vocab_size, encoder.vocab_size)
    return _Encoding(
        tokenizer=encoder.name,
        vocab_size=size,
        assumptions=(f"token ids are folded: id modulo {size}",) if size < encoder.vocab_size else (),
        tasks=((task.task_id, rendered_calls(task.calls, encoder, size, chosen.began_s)) for task in tasks()),
    )


def _block_encoding(source: Path, recording: BlockFormat, vocab_size: int, chosen: _Chosen) -> _Encoding:
    tokens = BlockTokens(vocab_size)
    tasks = _picked(recording.tasks(source, ignore), chosen)
    return _Encoding(
        tokenizer="synthetic",
        vocab_size=vocab_size,
        assumptions=_BLOCK_ASSUMPTIONS,
        tasks=((task.task_id, tokens.calls(task, chosen.began_s)) for task in tasks),
    )


def _picked(tasks: Iterator[_Task], chosen: _Chosen) -> Iterator[_Task]:
    names = UniqueNames()
    with_calls = (replace(task, task_id=names.of(task.task_id)) for task in tasks if task.calls)
    return (task for number, task in enumerate(with_calls) if number in chosen.numbers)


def _with_interval(call: Call) -> Call:
    return replace(call, interval_s=0.0) if math.isnan(call.interval_s) else call
