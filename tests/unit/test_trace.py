"""The trace format: what is written is read back exactly, what may not be written is refused, memory stays bounded."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_lmcache.replay import frames
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import Call, Manifest, TraceError, TraceReader, TraceWriter, common_prefix_tokens

VOCAB_SIZE = 70_000  # needs 32-bit ids

Recorded = tuple[list[int], list[int], float, "float | None"]

token_ids = st.integers(0, VOCAB_SIZE - 1)
tokens = st.lists(token_ids, min_size=1, max_size=30)
seconds = st.floats(0, 1e9)
fresh_call = st.tuples(tokens, tokens, seconds, st.none() | seconds)


@st.composite
def conversations(draw: st.DrawFn) -> list[Recorded]:
    """Calls that extend, cut back, rewrite or repeat what came before."""
    calls = [draw(fresh_call)]
    for _ in range(draw(st.integers(0, 5))):
        prompt, output, interval_s, start_s = draw(fresh_call)
        known = calls[-1][0] + calls[-1][1]
        keep = draw(st.integers(0, len(known)))
        added = draw(st.sampled_from([prompt, prompt, []]))
        calls.append(((known[:keep] + added) or prompt, output, interval_s, start_s))
    return calls


def as_calls(recorded: list[Recorded]) -> list[Call]:
    return [
        Call(np.array(prompt, np.uint32), np.array(output, np.uint32), interval_s, start_s)
        for prompt, output, interval_s, start_s in recorded
    ]


def recorded_of(calls: list[Call]) -> list[Recorded]:
    return [(c.prompt_tokens.tolist(), c.output_tokens.tolist(), c.interval_s, c.start_s) for c in calls]


def write(path: Path, tasks: dict[str, list[Call]], vocab_size: int = VOCAB_SIZE) -> None:
    with TraceWriter(path, Manifest(vocab_size, "synthetic", "test")) as writer:
        for task_id, calls in tasks.items():
            writer.write_task(task_id, calls)


def call(prompt: list[int], output: list[int], interval_s: float = 0.0) -> Call:
    return Call(np.array(prompt), np.array(output), interval_s)


@settings(max_examples=60, deadline=None)
@given(tasks=st.lists(conversations(), min_size=1, max_size=4), small_ids=st.booleans())
def test_any_calls_round_trip_exactly(
    tmp_path_factory: pytest.TempPathFactory, tasks: list[list[Recorded]], small_ids: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.trace"
    vocab_size = 1 << 16 if small_ids else VOCAB_SIZE
    tasks = [
        [([t % vocab_size for t in p], [t % vocab_size for t in o], i, s) for p, o, i, s in task] for task in tasks
    ]
    write(path, {f"task-{number}": as_calls(task) for number, task in enumerate(tasks)}, vocab_size)
    with TraceReader(path) as reader:
        assert [recorded_of(list(reader.calls(number))) for number in range(len(tasks))] == tasks
        assert all(each.prompt_tokens.dtype == np.uint32 for each in reader.calls(0))
        assert reader.totals.prompt_tokens == sum(len(prompt) for task in tasks for prompt, *_ in task)
        assert reader.totals.output_tokens == sum(len(output) for task in tasks for _, output, *_ in task)
        assert [task.calls for task in reader.tasks] == [len(task) for task in tasks]
        reader.verify()


def test_the_manifest_round_trips(tmp_path: Path) -> None:
    manifest = Manifest(10, "bpe:10", "format: file.jsonl", ("one", "two"), ({"step": "trim", "calls": 3},))
    with TraceWriter(tmp_path / "t", manifest) as writer:
        writer.write_task("a", [call([1], [2])])
    with TraceReader(tmp_path / "t") as reader:
        assert reader.manifest == manifest


def test_the_content_hash_identifies_the_workload(tmp_path: Path) -> None:
    for name, output in (("one", [2]), ("same", [2]), ("other", [3])):
        write(tmp_path / name, {"a": [call([1], output)]})
    one, same, other = (TraceReader(tmp_path / name).sha256 for name in ("one", "same", "other"))
    assert one == same != other


def test_tasks_can_be_read_interleaved_and_in_any_order(tmp_path: Path) -> None:
    tasks = {name: [call([number], [1]), call([number, 1, 5], [2])] for number, name in enumerate("abc")}
    write(tmp_path / "t", tasks)
    with TraceReader(tmp_path / "t") as reader:
        iterators = [reader.calls(number) for number in (2, 0, 1)]
        turns = [[next(iterator).prompt_tokens.tolist() for iterator in iterators] for _ in range(2)]
    assert turns == [[[2], [0], [1]], [[2, 1, 5], [0, 1, 5], [1, 1, 5]]]


def test_an_append_only_conversation_costs_only_what_it_adds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(VOCAB_SIZE, size=50_000, dtype=np.uint32)
    calls = []
    for _ in range(20):
        output = rng.integers(VOCAB_SIZE, size=8, dtype=np.uint32)
        calls.append(Call(prompt, output, 0.0))
        prompt = np.concatenate((prompt, output))
    write(tmp_path / "t", {"a": calls})
    assert (tmp_path / "t").stat().st_size < 250_000  # 50,000 ids of four bytes once, not 20 times


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([], "task 'a' has no calls"),
        ([call([1], [1]), call([], [1])], "task 'a', call 1: prompt is empty"),
        ([call([1], [])], "task 'a', call 0: output is empty"),
        ([call([1, VOCAB_SIZE], [1])], "call 0: prompt has token id 70000; the vocabulary allows 0 to 69999"),
        ([call([1], [-1])], "call 0: output has token id -1"),
        ([Call(np.array([0.5]), np.array([1]), 0.0)], "must be a one-dimensional sequence of integers"),
        ([call([1], [1], -0.1)], "interval_s is -0.1; it must be a finite number >= 0"),
        ([call([1], [1], float("nan"))], "interval_s is nan"),
    ],
)
def test_what_a_trace_may_not_hold_is_refused_when_writing(tmp_path: Path, calls: list[Call], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        write(tmp_path / "t", {"a": calls})
    assert list(tmp_path.iterdir()) == []


def test_a_repeated_task_id_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Manifest(10, "", "")) as writer:
        writer.write_task("a", [call([1], [1])])
        with pytest.raises(TraceError, match="task 'a' occurs twice"):
            writer.write_task("a", [call([1], [1])])


def test_an_existing_trace_survives_a_failed_rewrite(tmp_path: Path) -> None:
    write(tmp_path / "t", {"a": [call([1], [1])]})
    with pytest.raises(TraceError):
        write(tmp_path / "t", {"b": []})
    with TraceReader(tmp_path / "t") as reader:
        assert reader.tasks[0].task_id == "a"


def test_a_token_outside_the_vocabulary_is_found_when_reading(tmp_path: Path) -> None:
    # No writer of ours makes such a file, hence by hand: a manifest that promises fewer ids than the task uses.
    rows = [(0, np.array([1], "<u2").tobytes(), np.array([2], "<u2").tobytes(), 0.0, None)]
    rows.append((2, np.array([9], "<u2").tobytes(), np.array([2], "<u2").tobytes(), 0.0, None))
    body = frames.preamble() + frames.pack_frame(Manifest(5, "", "").to_json())
    entry = {"task_id": "a", "calls": 2, "prompt_tokens": 4, "output_tokens": 2, "max_prompt_tokens": 3}
    index = {"tasks": [{**entry, "offset": len(body)}], "sha256": b""}
    body += frames.pack_frame({"task_id": "a", "calls": rows})
    (tmp_path / "t").write_bytes(body + frames.pack_frame(index) + frames.pack_trailer(len(body)))
    with TraceReader(tmp_path / "t") as reader:
        calls = reader.calls(0)
        next(calls)
        with pytest.raises(
            TraceError, match=r"t: task 'a', call 1: prompt has token id 9; the vocabulary allows 0 to 4"
        ):
            next(calls)


@given(left=st.lists(st.integers(0, 2), max_size=8), right=st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix_agrees_with_counting(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix_tokens(np.array(left, np.uint32), np.array(right, np.uint32)) == expected


def test_a_full_size_trace_streams_in_bounded_memory(tmp_path: Path) -> None:
    synthesize(tmp_path / "t", Workload())
    tracemalloc.start()
    try:
        with TraceReader(tmp_path / "t") as reader:
            prompt_tokens = sum(len(each.prompt_tokens) for n in range(len(reader.tasks)) for each in reader.calls(n))
            peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert prompt_tokens == reader.totals.prompt_tokens > 130_000_000
    assert peak_bytes < 32 << 20  # all prompts at once would be half a gibibyte
