"""Breaks, what reappears behind them, lanes with forks and side tasks, and blocks without text."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lint_agents import Agent, append_only, lint_agent

from efficient_lmcache.core.tasks import MAX_SUFFIX_TOKENS
from efficient_lmcache.sizing.lint import LaneReport, lint_calls
from efficient_lmcache.sizing.lint_align import MIN_RUN_TOKENS, Ids, in_order, reappearing_runs
from efficient_lmcache.sizing.lint_break import Break, Call, find_break

BLOCK = 64
ids = st.lists(st.integers(0, 3), max_size=200).map(lambda values: np.array(values, np.uint32))


def text(tokens: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 50_000, tokens)


def call(*parts: Ids, output: Ids | None = None) -> Call:
    prompt = np.concatenate(parts)
    return Call(prompt, len(prompt), output)


def blocks(*numbers: int) -> Call:
    return Call(np.array(numbers), len(numbers) * BLOCK + 5, unit_tokens=BLOCK)


def lint(*calls: Call) -> LaneReport:
    return lint_calls("test", [("task", each) for each in calls], calls[0].unit_tokens).lanes[0]


def labels(lane: LaneReport) -> list[str]:
    return [each.diagnosis.label for each in lane.findings]


@given(ids, ids)
@settings(max_examples=200, deadline=None)
def test_runs_are_equal_text_and_disjoint(old: Ids, new: Ids) -> None:
    runs = reappearing_runs(old, new)
    seen: set[int] = set()
    end = 0
    for run in runs:
        assert run.tokens >= MIN_RUN_TOKENS
        assert (old[run.old : run.old_end] == new[run.new : run.new_end]).all()
        assert run.new >= end
        assert seen.isdisjoint(range(run.old, run.old_end))
        seen.update(range(run.old, run.old_end))
        end = run.new_end
    stayed = in_order(runs)
    assert all(before.old_end <= after.old for before, after in pairwise(stayed))


@given(st.integers(0, 90), st.integers(0, 90), st.integers(0, 90))
@settings(deadline=None)
def test_text_that_moved_is_found_wherever_it_stands(before: int, after: int, moved: int) -> None:
    passage = text(100)
    old = np.concatenate((text(before, 1), passage, text(50, 2)))
    new = np.concatenate((text(moved, 3), passage, text(after, 4)))
    (run,) = reappearing_runs(old, new)
    assert (run.old, run.new, run.tokens) == (before, moved, 100)


@given(ids, ids)
@settings(deadline=None)
def test_a_prompt_that_extends_prompt_and_output_is_no_break(prompt: Ids, output: Ids) -> None:
    assert find_break(call(prompt, output=output), call(prompt, output, text(50))) is None


@given(ids, ids, ids)
@settings(deadline=None)
def test_a_loss_is_at_most_what_an_extension_would_have_reused(prompt: Ids, output: Ids, following: Ids) -> None:
    found = find_break(call(prompt, output=output), call(following))
    assert found is None or 0 <= (found.lost_tokens or 0) <= found.at_most_lost_tokens


def test_another_generation_prompt_is_no_break() -> None:
    history, generation = text(500), text(MAX_SUFFIX_TOKENS, 1)
    assert find_break(call(history, generation), call(history, text(300, 2))) is None


def test_folding_as_in_the_papers_figure_8() -> None:
    """50K processed tokens; a summary of 3K takes the place of 34K, the recent 14K stay, 1K is new."""
    system, recent = text(2000, 1), text(14_000, 3)
    found = find_break(call(system, text(34_000, 2), recent), call(system, text(3000, 4), recent, text(1000, 5)))
    assert found is not None
    assert (found.stable_tokens, found.prompt_tokens - found.stable_tokens) == (2000, 18_000)
    assert (found.lost_tokens, found.at_most_lost_tokens) == (14_000, 18_000)


def test_a_file_that_is_read_again_behind_the_reply_is_no_loss() -> None:
    head, file, recent, reply = text(300), text(900, 1), text(200, 2), text(60, 3)
    found = find_break(call(head, file, recent, output=reply), call(head, text(9, 4), recent, reply, file))
    assert found is not None
    assert found.lost_tokens == len(recent) + len(reply)


@pytest.mark.parametrize("turns", [1, 2, 30])
def test_an_agent_that_only_appends_has_no_findings(turns: int) -> None:
    lane = lint_agent(Agent.random(turns=turns), append_only)
    assert (lane.findings, lane.forks, sum(lane.cost_tokens)) == ([], 0, 0)


def test_a_fork_and_a_retry_are_no_loss() -> None:
    opening, replies, answers = (
        text(300),
        [text(80, each) for each in range(4)],
        [text(90, 9 + each) for each in range(4)],
    )
    first = call(opening, output=replies[0])
    second = call(opening, replies[0], answers[0], output=replies[1])
    third = call(opening, replies[0], answers[0], replies[1], answers[1], output=replies[2])
    fork = call(opening, replies[0], answers[0], replies[1], answers[3], output=replies[3])
    lane = lint(first, second, second, third, fork)
    assert (lane.findings, lane.repeats, lane.forks) == ([], 1, 1)
    assert lane.stable_tokens[-1] == len(second.left_behind)


def test_a_clock_is_found_though_side_prompts_come_in_between() -> None:
    agent = Agent.random()
    calls = []
    for turn in range(6):
        history = [tokens for _, tokens in append_only(agent, turn)]
        history[0] = np.concatenate((history[0][:20], text(4, 50 + turn), history[0][24:]))
        calls += [call(*history, output=agent.turns[turn][0]), call(text(400, 70 + turn), output=text(30, turn))]
    lane = lint(*calls)
    assert labels(lane).count("volatile_head") == 5
    assert labels(lane).count("restarted") == 6


def test_blocks_are_judged_by_position_and_length_and_the_loss_is_a_bound() -> None:
    history = list(range(40))
    edited = [*history[:3], *range(100, 138)]
    condensed = [*edited[:30], *range(200, 204)]
    lane = lint(blocks(*history[:10]), blocks(*history), blocks(*edited), blocks(*condensed))
    assert labels(lane) == ["edited: near the top", "condensed"]
    found: Break = lane.findings[0].found
    assert (found.stable_tokens, found.lost_tokens, found.at_most_lost_tokens) == (3 * BLOCK, None, 37 * BLOCK)
    assert lane.cost_tokens[2] == 37 * BLOCK


def test_a_difference_in_the_last_block_is_no_break() -> None:
    assert not lint(blocks(1, 2, 3), blocks(1, 2, 4, 5, 6)).findings
