"""Condensed traces: what stays, stays in order and in place; what is made up is the same wherever it stands."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from efficient_lmcache.replay.cli_condense import condense as condense_command
from efficient_lmcache.replay.condense import (
    INSTRUCTION_TOKENS,
    PLACEHOLDER_TOKENS,
    Condenser,
    Counts,
    MadeUp,
    ObservationMasking,
    RecentEvents,
    Summary,
    condense,
    condensed,
    per_call,
)
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import Call, Manifest, TraceError, TraceReader, TraceWriter
from efficient_lmcache.replay.trim import trim

VOCAB_SIZE = 1 << 20  # so large that random texts have nothing in common by chance
MADE_UP = MadeUp(VOCAB_SIZE)
PLACEHOLDER = MADE_UP.placeholder().tolist()

lengths = st.integers(1, 12)
tasks = st.builds(
    lambda prefix, turns, seed: _task(prefix, turns, seed),
    lengths,
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=25),
    st.integers(0, 1000),
)


def _task(prefix_tokens: int, turns: list[tuple[int, int]], seed: int) -> list[Call]:
    rng = np.random.default_rng(seed)

    def text(length: int) -> np.ndarray:
        return rng.integers(VOCAB_SIZE, size=length, dtype=np.uint32)

    prompt, calls = text(prefix_tokens), []
    for output_tokens, observation_tokens in turns:
        output = text(output_tokens)
        calls.append(Call(prompt, output, float(len(calls)), 10.0 * len(calls)))
        prompt = np.concatenate((prompt, output, text(observation_tokens)))
    return calls


def events(calls: list[Call]) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """First prompt, and (output, observation) between one call and the next."""
    turns = []
    for previous, call in itertools.pairwise(calls):
        added = call.prompt_tokens[len(previous.prompt_tokens) :].tolist()
        cut = len(previous.output_tokens)
        turns.append((added[:cut], added[cut:]))
    return calls[0].prompt_tokens.tolist(), turns


def flat(turns: list[tuple[list[int], list[int]]]) -> list[int]:
    return [token for turn in turns for tokens in turn for token in tokens]


def run(calls: list[Call], condenser: Condenser) -> tuple[list[Call], Counts]:
    counts = Counts()
    return list(condensed(calls, condenser, "task", MADE_UP, counts)), counts


@given(
    calls=tasks,
    condenser=st.sampled_from([RecentEvents(1000), ObservationMasking(1000), Summary(1000), Summary(51, 3)]),
)
def test_histories_within_the_limits_stay_as_recorded(calls: list[Call], condenser: Condenser) -> None:
    after, counts = run(calls, condenser)
    assert counts == Counts()
    assert [c.prompt_tokens.tolist() for c in after] == [c.prompt_tokens.tolist() for c in calls]
    assert [(c.interval_s, c.start_s) for c in after] == [(c.interval_s, c.start_s) for c in calls]


@given(
    calls=tasks,
    condenser=st.sampled_from(
        [RecentEvents(3), RecentEvents(8, 3), ObservationMasking(1), ObservationMasking(6), Summary(8), Summary(14, 4)]
    ),
)
def test_the_first_prompt_and_the_agents_outputs_and_pauses_stay(calls: list[Call], condenser: Condenser) -> None:
    after, counts = run(calls, condenser)
    first = calls[0].prompt_tokens
    agents = [call for call in after if call.start_s is not None]
    assert all(call.prompt_tokens[: len(first)].tolist() == first.tolist() for call in agents)
    assert [call.output_tokens.tolist() for call in agents] == [call.output_tokens.tolist() for call in calls]
    assert sum(call.interval_s for call in after) == sum(call.interval_s for call in calls)
    assert len(after) == len(calls) + counts.summarizing_calls


@given(calls=tasks, keep_first=st.integers(1, 6), more=st.integers(2, 9))
def test_recent_events_keeps_whole_turns_of_both_ends(calls: list[Call], keep_first: int, more: int) -> None:
    after, _ = run(calls, RecentEvents(keep_first + more, keep_first))
    prefix, turns = events(calls)
    head, tail = (keep_first - 1) // 2, more // 2
    for number, call in enumerate(after):
        seen = turns[:number]
        kept = seen if len(seen) <= head + tail else seen[:head] + seen[-tail:]
        assert call.prompt_tokens.tolist() == prefix + flat(kept)


@given(calls=tasks, window=st.integers(1, 12))
def test_masking_replaces_old_observations_and_nothing_else(calls: list[Call], window: int) -> None:
    after, _ = run(calls, ObservationMasking(window))
    prefix, turns = events(calls)
    for number, call in enumerate(after):
        # Events: the first prompt, then outputs and observations in turn.
        shown = [
            (output, seen if 2 + 2 * turn >= 1 + 2 * number - window else PLACEHOLDER)
            for turn, (output, seen) in enumerate(turns[:number])
        ]
        assert call.prompt_tokens.tolist() == prefix + flat(shown)


@given(calls=tasks, max_size=st.integers(8, 20), keep_first=st.integers(1, 4), summary_tokens=st.integers(1, 9))
@settings(deadline=None)
def test_a_summary_replaces_the_middle_until_there_is_too_much_again(
    calls: list[Call], max_size: int, keep_first: int, summary_tokens: int
) -> None:
    max_size = max(max_size, 2 * (keep_first + 3))
    after, counts = run(calls, Summary(max_size, keep_first, summary_tokens))
    prefix, turns = events(calls)
    head = (keep_first - 1) // 2
    summary: list[int] = []
    start, number, summarizing = head, 0, 0
    for call in after:
        if call.start_s is None:
            summarizing += 1
            prompt = call.prompt_tokens.tolist()
            assert prompt[:INSTRUCTION_TOKENS] == MADE_UP.instruction().tolist()
            assert 1 + 2 * head + bool(summary) + 2 * (number - start) > max_size
            forgotten = prompt[INSTRUCTION_TOKENS + len(summary) :]
            assert prompt[INSTRUCTION_TOKENS : INSTRUCTION_TOKENS + len(summary)] == summary
            count = next(n for n in range(start, number) if flat(turns[start:n]) == forgotten)
            start, summary = count, call.output_tokens.tolist()
            assert len(summary) == summary_tokens
            continue
        shown = prefix + flat(turns[: min(head, number)]) + summary + flat(turns[start:number])
        assert call.prompt_tokens.tolist() == shown
        assert 1 + 2 * min(head, number) + bool(summary) + 2 * max(0, number - start) <= max_size
        number += 1
    assert summarizing == counts.summarizing_calls


def test_summaries_differ_between_tasks_and_from_one_another() -> None:
    calls = _task(5, [(3, 3)] * 40, seed=1)
    summaries = [
        tuple(call.output_tokens.tolist())
        for task_id in ("one", "two")
        for call in condensed(calls, Summary(8), task_id, MADE_UP, Counts())
        if call.start_s is None
    ]
    assert len(summaries) > 10
    assert len(set(summaries)) == len(summaries)


def test_a_history_that_the_agent_rewrote_begins_anew() -> None:
    before, after = _task(5, [(3, 3)] * 6, seed=1), _task(40, [(3, 3)] * 6, seed=2)
    made, counts = run(before + after, RecentEvents(5))
    assert counts.rewritten == 1
    assert made[6].prompt_tokens.tolist() == after[0].prompt_tokens.tolist()
    assert made[11].prompt_tokens[:40].tolist() == after[0].prompt_tokens.tolist()


def test_what_differs_from_an_output_counts_as_observed() -> None:
    first = Call(np.arange(5), np.array([10, 11, 12]), 0.0, 0.0)
    prompts = [np.array([0, 1, 2, 3, 4, 10, 99, 98, 7])]
    prompts.append(np.concatenate((prompts[0], [20, 21])))
    calls = [first, *(Call(prompt, np.array([20]), 0.0, 0.0) for prompt in prompts)]
    made, counts = run(calls, ObservationMasking(1))
    assert (counts.altered_outputs, counts.rewritten) == (1, 0)
    assert made[2].prompt_tokens.tolist() == [0, 1, 2, 3, 4, 10, *PLACEHOLDER, 20, 21]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded"
    synthesize(path, Workload(tasks=3, calls_per_task=20, vocab_size=16_384, system_tokens=200, observation_tokens=90))
    return path


def test_a_condensed_trace_is_shorter_but_has_more_to_compute(recorded: Path, tmp_path: Path) -> None:
    with TraceReader(recorded) as reader:
        whole = per_call(reader)
    for condenser in (RecentEvents(12), ObservationMasking(12), Summary(12, summary_tokens=64)):
        condense(recorded, tmp_path / "out", condenser)
        with TraceReader(tmp_path / "out") as reader:
            reader.verify()
            shorter = per_call(reader)
        assert shorter.prompt_tokens < whole.prompt_tokens
        assert shorter.cache_stable_share < whole.cache_stable_share
        assert shorter.fresh_tokens > whole.fresh_tokens


def test_the_manifest_says_what_was_done_and_what_is_made_up(recorded: Path, tmp_path: Path) -> None:
    condense(recorded, tmp_path / "out", ObservationMasking(7))
    with TraceReader(tmp_path / "out") as reader:
        assert reader.manifest.history[-1] == {"step": "condense", "condenser": "masking", "attention_window": 7}
        assert f"{PLACEHOLDER_TOKENS} made-up tokens" in reader.manifest.assumptions[-1]


def test_the_same_options_give_the_same_trace(recorded: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        condense(recorded, tmp_path / name, Summary(10))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("condenser", "message"),
    [
        (RecentEvents(2), "--max-events is 2; it must be at least 3"),
        (RecentEvents(9, 0), "--keep-first is 0"),
        (ObservationMasking(0), "--attention-window is 0"),
        (Summary(9, 2), "--max-size is 9; it must be at least 10"),
        (Summary(summary_tokens=0), "--summary-tokens is 0"),
    ],
)
def test_an_option_out_of_range_is_named(recorded: Path, tmp_path: Path, condenser: Condenser, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        condense(recorded, tmp_path / "out", condenser)
    assert not list(tmp_path.glob("out*"))


def invoke(*arguments: object) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(condense_command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_the_command_shows_both_sides(recorded: Path, tmp_path: Path) -> None:
    options = ("--condenser", "summary", "--max-size", 12)
    code, output = invoke(recorded, "--out", tmp_path / "out", *options)
    assert code == 0
    assert "as recorded" in output
    assert "summarizing calls inserted" in output
    assert invoke(tmp_path / "out", "--out", tmp_path / "out", *options)[0] == 2
    shutil.copy(recorded, tmp_path / "in_place")
    assert invoke(tmp_path / "in_place", "--out", tmp_path / "in_place", "--force", *options) == (0, output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--condenser", "magic"), "error: --condenser 'magic' is unknown; allowed are recent, masking, summary"),
        (("--condenser", "recent", "--max-size", 9), "error: --max-size is not an option of recent"),
        (("--condenser", "recent", "--max-events", 1), "error: --max-events is 1; it must be at least 3"),
    ],
)
def test_a_users_error_is_one_line(recorded: Path, tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    code, output = invoke(recorded, "--out", tmp_path / "out", *options)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_masking_after_outputs_were_cut_says_that_it_masks_them(recorded: Path, tmp_path: Path) -> None:
    trim(recorded, tmp_path / "cut", max_output=2)
    for condenser, limit, is_said in (("masking", "--attention-window", True), ("recent", "--max-events", False)):
        options = ("--condenser", condenser, limit, 4, "--force", "--out", tmp_path / "out")
        assert ("condense first, then `trace trim --max-output`" in invoke(tmp_path / "cut", *options)[1]) == is_said
        assert "condense first" not in invoke(recorded, *options)[1]


def test_a_trace_without_tasks_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "empty", Manifest(4, "synthetic", "nothing")):
        pass
    code, output = invoke(tmp_path / "empty", "--out", tmp_path / "out", "--condenser", "recent")
    assert (code, output) == (2, f"error: {tmp_path / 'empty'}: has no tasks; there is nothing to condense\n")
