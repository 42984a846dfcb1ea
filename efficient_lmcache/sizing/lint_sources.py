"""Any recording as calls to lint: token ids where it has tokens or text, chunk numbers where it only has blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from efficient_lmcache.replay import trace
from efficient_lmcache.replay.importers.records import RecordError, RecordingError
from efficient_lmcache.replay.importers.tasks import UniqueNames
from efficient_lmcache.replay.tokenizers import ALLOWED, Tokenizer, load_tokenizer
from efficient_lmcache.sizing.lint import Report, lint_calls
from efficient_lmcache.sizing.lint_break import Call
from efficient_lmcache.sizing.readers.recording import no_calls
from efficient_lmcache.sizing.readers.tokens import TokenRecording
from efficient_lmcache.sizing.readers.trace_v1 import TraceV1
from efficient_lmcache.sizing.readers.trajectories import TextRecording
from efficient_lmcache.sizing.streams import ReferenceStream, open_stream

Progress = Callable[[int, int], None]
Decode = Callable[[list[int]], str]

_BLOCKS_NOTE = (
    "only ids of blocks of {unit} tokens are recorded, each standing for all text up to its end: what an edit brings "
    "back behind it cannot be seen, so losses are upper bounds, breaks are placed to a block, and clocks, reordered "
    "tools and changed replies all show as 'edited'"
)


def lint_recording(
    path: Path, *, tokenizer: str | None = None, skip_bad: bool = False, progress: Progress | None = None
) -> tuple[Report, Decode | None]:
    """Lint a recording, whatever its format; also what shows its token ids as text, where a tokenizer is known.

    Args:
        tokenizer: what `load_tokenizer` takes; recordings of text need it, for a trace it must be the one it was made
            with.
        skip_bad: leave damaged tasks and records out and count them in a note.

    Raises ValueError for what cannot be read, naming file, record and field.
    """
    stream = open_stream(path, tokenizer=tokenizer, skip_bad=skip_bad, progress=progress)
    if not isinstance(stream, TokenRecording):
        return _lint_blocks(stream), None
    decode = _trace_decoder(path, tokenizer) if isinstance(stream, TraceV1) and tokenizer is not None else None
    report = _lint_tokens(stream, skip_bad)
    if isinstance(stream, TextRecording):
        decode = stream.load_tokenizer().decode
    return report, decode


def _lint_tokens(stream: TokenRecording, skip_bad: bool) -> Report:
    skipped = 0
    names = UniqueNames()

    def calls() -> Iterator[tuple[str, Call]]:
        nonlocal skipped
        for name, recorded in stream.tasks():
            task = names.of(name)
            try:
                # A damaged task is left out as a whole; else only its latest prompts need be in memory.
                whole = list(recorded) if skip_bad else recorded
            except (trace.TraceError, RecordError):
                skipped += 1
                continue
            for call in whole:
                yield task, Call(call.prompt_tokens, len(call.prompt_tokens), call.output_tokens)

    report = lint_calls(stream.name, calls(), notes=lambda: (*_notes(stream), *_skipped_note(skipped + stream.skipped)))
    if not report.calls:
        raise no_calls(stream.path, skipped + stream.skipped)
    return report


def _lint_blocks(stream: ReferenceStream) -> Report:
    def calls() -> Iterator[tuple[str, Call]]:
        for batch in stream:
            for call in range(len(batch)):
                keys = batch.call_keys(call)[: batch.lookup_chunks[call]].copy()
                yield (
                    stream.lanes[int(batch.lane[call])],
                    Call(keys, int(batch.prompt_tokens[call]), unit_tokens=stream.chunk_tokens),
                )

    unit = stream.chunk_tokens

    def notes() -> tuple[str, ...]:
        blocks = () if stream.lanes_are_guessed else (_BLOCKS_NOTE.format(unit=unit),)
        return (*blocks, *_notes(stream), *_skipped_note(stream.skipped))

    report = lint_calls(stream.name, calls(), unit, notes)
    return replace(report, lanes_are_guessed=stream.lanes_are_guessed)


def _notes(stream: ReferenceStream) -> tuple[str, ...]:
    """What the recording does not tell, of which lint needs no times."""
    return tuple(note for note in stream.notes if "interval_s" not in note and "start_s" not in note)


def _skipped_note(skipped: int) -> tuple[str, ...]:
    return (f"{skipped} bad records were left out",) if skipped else ()


def _trace_decoder(path: Path, spec: str) -> Decode:
    """The text of a trace's ids, if `spec` is the tokenizer that made them."""

    def no_texts() -> Iterable[str]:
        raise RecordingError(f"--tokenizer {spec}: a trace has no text to train it on; {ALLOWED}")

    tokenizer = load_tokenizer(spec, no_texts)
    with trace.TraceReader(path) as reader:
        _check_made_by(tokenizer, reader)
    return tokenizer.decode


def _check_made_by(tokenizer: Tokenizer, reader: trace.TraceReader) -> None:
    manifest = reader.manifest
    if (tokenizer.name, tokenizer.vocab_size) != (manifest.tokenizer, manifest.vocab_size):
        raise RecordingError(
            f"--tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} ids): {reader.path} was made with "
            f"{manifest.tokenizer} and {manifest.vocab_size:,} ids, so its ids are other text; leave the option out"
        )
