"""Streams of token recordings: chunk numbers are what hashing every prefix afresh would give; lanes are tasks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_lmcache.core.references import References
from efficient_lmcache.replay.describe import describe
from efficient_lmcache.replay.trace import Call, Manifest, TraceReader, TraceWriter
from efficient_lmcache.sizing.streams import RecordingError, open_stream

Task = list[tuple[list[int], list[int]]]

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)  # few ids, so that prefixes meet


@st.composite
def tasks(draw: st.DrawFn) -> list[Task]:
    """Calls that extend, cut back or rewrite what came before, in one to three tasks."""
    made: list[Task] = []
    for _ in range(draw(st.integers(1, 3))):
        task: Task = []
        known: list[int] = []
        for _ in range(draw(st.integers(1, 4))):
            prompt = known[: draw(st.integers(0, len(known)))] + draw(tokens)
            task.append((prompt, draw(tokens)))
            known = prompt + task[-1][1]
        made.append(task)
    return made


def write_trace(path: Path, made: list[Task]) -> Path:
    with TraceWriter(path, Manifest(3, "synthetic", "test")) as writer:
        for number, task in enumerate(made):
            calls = [Call(np.array(prompt), np.array(output), 1.5, 10.0) for prompt, output in task]
            writer.write_task(f"task-{number}", calls)
    return path


def keys_by_definition(sequences: list[list[int]], chunk_tokens: int) -> list[list[int]]:
    """A chunk is the tuple of all tokens up to its end; numbers follow first appearance."""
    numbers: dict[tuple[int, ...], int] = {}
    return [
        [
            numbers.setdefault(tuple(tokens[: end + chunk_tokens]), len(numbers))
            for end in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens)
        ]
        for tokens in sequences
    ]


def keys_of(references: References) -> list[list[int]]:
    return [references.call_keys(call).tolist() for call in range(len(references))]


@settings(deadline=None)
@given(made=tasks(), chunk_tokens=st.integers(1, 4))
def test_a_chunk_of_a_trace_is_its_prefix(
    made: list[Task], chunk_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_trace(tmp_path_factory.mktemp("streams") / "t.trace", made)
    prompts = References.concatenate(open_stream(path, chunk_tokens))
    assert keys_of(prompts) == keys_by_definition([prompt for task in made for prompt, _ in task], chunk_tokens)
    assert prompts.lookup_chunks.tolist() == [len(keys) for keys in keys_of(prompts)]

    both = References.concatenate(open_stream(path, chunk_tokens, with_outputs=True))
    left_behind = [prompt + output[:-1] for task in made for prompt, output in task]
    assert keys_of(both) == keys_by_definition(left_behind, chunk_tokens)
    assert both.lookup_chunks.tolist() == [len(prompt) // chunk_tokens for task in made for prompt, _ in task]


def test_a_task_of_a_trace_is_a_lane_and_a_session(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.trace", [[([1, 2], [1]), ([1, 2, 1, 0], [2, 2])], [([0], [1])]])
    stream = open_stream(path, 2)
    references = References.concatenate(stream)
    assert stream.lanes == ["task-0", "task-1"]
    assert stream.name == "t.trace"
    assert references.lane.tolist() == references.session.tolist() == [0, 0, 1]
    assert references.prompt_tokens.tolist() == [2, 4, 1]
    assert references.output_tokens.tolist() == [1, 2, 1]
    assert references.start_s.tolist() == [10.0] * 3
    assert references.interval_s.tolist() == [1.5] * 3


def test_shares_with_the_call_before_are_those_that_trace_info_reports(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.trace", [[([1, 2], [1]), ([1, 2, 1, 0], [2]), ([1, 0], [1])], [([0], [1])]])
    stream = open_stream(path, 2)
    for _ in range(2):  # an iteration starts afresh
        References.concatenate(stream)
    assert stream.shared is not None
    with TraceReader(path) as reader:
        shares = describe(reader)["shared_prefix"]
    assert sum(stream.shared.previous_prompt) == shares["previous_prompt_tokens"]
    assert sum(stream.shared.cache_stable) == shares["cache_stable_tokens"]


def test_a_long_trace_comes_in_batches_that_share_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "t.trace", [[([1, 2, 0, 1], [1])] * 3, [([1, 2, 0, 1], [1])]])
    whole = References.concatenate(open_stream(path, 2))
    monkeypatch.setattr("efficient_lmcache.sizing.readers.recording._BATCH_REFERENCES", 1)
    batches = list(open_stream(path, 2))
    assert len(batches) == 4
    assert keys_of(References.concatenate(batches)) == keys_of(whole) == [[0, 1]] * 4


def test_a_damaged_task_of_a_trace_is_skipped_and_counted(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.trace", [[([1], [1])], [([0, 1], [1])]])
    with TraceReader(path) as reader:
        offset = reader._offsets[0]
    content = bytearray(path.read_bytes())
    content[offset + 12] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match="task-0"):
        list(open_stream(path, 2))
    stream = open_stream(path, 2, skip_bad=True)
    assert len(References.concatenate(stream)) == 1
    assert (stream.skipped, stream.lanes) == (1, ["task-1"])


def test_progress_counts_tasks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.trace", [[([1], [1])], [([0], [1])]])
    seen: list[tuple[int, int]] = []
    list(open_stream(path, 2, progress=lambda done, total: seen.append((done, total))))
    assert seen == [(1, 2), (2, 2)]


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "other.jsonl").write_text('{"a": 1, "b": 2}\n')
    (tmp_path / "folder").mkdir()
    for name, expected in {
        "missing": "no such file",
        "empty.jsonl": "no record to tell its format; allowed are a trace",
        "other.jsonl": "line 1: of an unknown format, with the fields a, b; allowed are a trace",
        "folder": "a directory without a recording; allowed are a trace",
    }.items():
        with pytest.raises(RecordingError, match=expected):
            open_stream(tmp_path / name)
    with pytest.raises(RecordingError, match="chunk_tokens is 0; it must be at least 1"):
        open_stream(write_trace(tmp_path / "t.trace", [[([1], [1])]]), 0)
    with pytest.raises(RecordingError, match=r"chunk_tokens is 10+; it must be at most 1,099,511,627,776"):
        open_stream(tmp_path / "t.trace", 10**30)


def test_a_tokenizer_for_ids_of_blocks_is_refused(tmp_path: Path) -> None:
    """It would change nothing, and whoever gives one expects it to."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n')
    with pytest.raises(RecordingError, match=r"--tokenizer tekken: .* has ids of blocks, which no tokenizer can read"):
        open_stream(path, tokenizer="tekken")


def test_times_that_are_not_recorded_are_nan(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.trace", Manifest(3, "synthetic", "test")) as writer:
        writer.write_task("a", [Call(np.array([1]), np.array([1]), 0.0)])
    assert math.isnan(References.concatenate(open_stream(tmp_path / "t.trace")).start_s[0])
