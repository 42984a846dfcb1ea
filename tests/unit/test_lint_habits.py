"""Every habit, put into synthetic and into recorded agents by code: lint names it, and finds what it costs."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from lint_agents import TOOLS, Agent, Piece, Render, append_only, known_losses, lint_agent

from efficient_lmcache.sizing.lint_align import Ids

RECORDED_TASKS = 4
TELLING_TOKENS = 40  # half of a shorter reply is too little to be recognised


def noise(tokens: int, *seed: int) -> Ids:
    return np.random.default_rng((99, *seed)).integers(0, 4000, tokens)


def clock_at_the_top(agent: Agent, call: int) -> list[Piece]:
    return [*agent.head(top=(("clock", call), noise(10, call))), *agent.history(0, call)]


def tools_in_any_order(agent: Agent, call: int) -> list[Piece]:
    order = np.random.default_rng(call).permutation(TOOLS).tolist()
    return [*agent.head(order), *agent.history(0, call)]


def tools_rotated(agent: Agent, call: int) -> list[Piece]:
    order = [(tool + call) % TOOLS for tool in range(TOOLS)]
    return [*agent.head(order), *agent.history(0, call)]


def old_replies_dropped(agent: Agent, call: int) -> list[Piece]:
    answers = [agent.answer(turn) for turn in range(call)]
    return [*agent.head(), *answers[:-1], *(agent.reply(call - 1) if call else []), *answers[-1:]]


def replies_dropped_at_once(agent: Agent, call: int) -> list[Piece]:
    return [*agent.head(), *(agent.answer(turn) for turn in range(call))]


def reasoning_stripped(agent: Agent, call: int) -> list[Piece]:
    pieces = agent.head()
    for turn in range(call):
        pieces += [agent.reply(turn)[1], agent.answer(turn)]
    return pieces


def oldest_answers_masked(agent: Agent, call: int) -> list[Piece]:
    pieces = agent.head()
    for turn in range(call):
        masked: Piece = (("mask", turn), noise(6, 5))
        pieces += [*agent.reply(turn), agent.answer(turn) if turn >= call - 3 else masked]
    return pieces


def recent_turns_only(agent: Agent, call: int) -> list[Piece]:
    return [*agent.head(), *agent.history(max(0, call - 4), call)]


def first_and_recent_turns_only(agent: Agent, call: int) -> list[Piece]:
    return [*agent.head(), *agent.history(0, min(2, call)), *agent.history(max(2, call - 3), call)]


def summarised_every_fifth_call(agent: Agent, call: int) -> list[Piece]:
    folded = call // 5 * 5 - 2
    if folded < 0:
        return append_only(agent, call)
    return [*agent.head(), (("summary", folded), noise(150, folded)), *agent.history(folded, call)]


def reminder_at_the_end(agent: Agent, call: int) -> list[Piece]:
    return [*append_only(agent, call), (("reminder", call), noise(70, call))]


def one_answer_corrected(agent: Agent, call: int) -> list[Piece]:
    pieces = append_only(agent, call)
    if call < 5:
        return pieces
    at = next(number for number, (name, _) in enumerate(pieces) if name == ("answer", 4))
    answer = pieces[at][1]
    third = len(answer) // 3
    middle: Piece = ("as it was", answer[third : 2 * third]) if call < 8 else ("corrected", noise(third))
    return [*pieces[:at], ("before", answer[:third]), middle, ("behind", answer[2 * third :]), *pieces[at + 1 :]]


def listing_near_the_top(agent: Agent, call: int) -> list[Piece]:
    system, *rest = agent.head()
    return [system, (("listing", call), noise(700, call)), *rest, *agent.history(0, call)]


def started_over(agent: Agent, call: int) -> list[Piece]:
    if call < 6:
        return append_only(agent, call)
    other: Piece = ("other task", noise(400))
    return [*agent.head()[:1], other, *agent.history(6, call)]


HABITS: list[tuple[Render, str]] = [
    (clock_at_the_top, "volatile_head"),
    (tools_in_any_order, "tools_reordered"),
    (tools_rotated, "tools_reordered"),
    (old_replies_dropped, "reply_dropped"),
    (replies_dropped_at_once, "reply_dropped"),
    (reasoning_stripped, "reply_rewritten"),
    (oldest_answers_masked, "condensed: observation masking"),
    (recent_turns_only, "condensed: truncation"),
    (first_and_recent_turns_only, "condensed: truncation"),
    (summarised_every_fifth_call, "condensed: summary"),
    (reminder_at_the_end, "tail_replaced"),
    (listing_near_the_top, "edited: near the top"),
    (started_over, "restarted"),
]
parametrized = pytest.mark.parametrize(("render", "label"), HABITS, ids=[render.__name__ for render, _ in HABITS])


@parametrized
@pytest.mark.parametrize("seed", range(3))
def test_a_habit_is_named_and_its_cost_is_what_the_pieces_say(render: Render, label: str, seed: int) -> None:
    agent = Agent.random(seed)
    lane = lint_agent(agent, render)
    assert {each.diagnosis.label for each in lane.findings} == {label}
    assert lane.cost_tokens == pytest.approx(known_losses(agent, render), abs=16)


def test_a_message_corrected_in_place_is_an_edit() -> None:
    agent = Agent.random()
    lane = lint_agent(agent, one_answer_corrected)
    assert [(each.call, each.diagnosis.label) for each in lane.findings] == [(8, "edited")]
    assert lane.cost_tokens == pytest.approx(known_losses(agent, one_answer_corrected), abs=16)


@pytest.fixture(scope="module")
def recorded_agents(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Agent]:
    """Real SWE-bench trajectories."""
    pytest.importorskip("tokenizers", reason="needs the package tokenizers, which the extras cpu and gpu bring")
    from efficient_lmcache.sizing.readers.tokens import TokenRecording
    from efficient_lmcache.sizing.streams import open_stream

    sample = tmp_path_factory.mktemp("lint") / "sample.jsonl"
    with gzip.open(data_dir / "traces" / "swebench-verified-mini-swe-agent.jsonl.gz", "rb") as file:
        sample.write_bytes(b"".join(file.readline() for _ in range(RECORDED_TASKS)))
    stream = open_stream(sample, tokenizer="bpe:4096")
    assert isinstance(stream, TokenRecording)
    tasks = [[(call.prompt_tokens, call.output_tokens) for call in calls] for _, calls in stream.tasks()]
    return [Agent.recorded(calls) for calls in tasks]


def test_real_trajectories_have_no_breaks(recorded_agents: list[Agent]) -> None:
    assert len(recorded_agents) == RECORDED_TASKS
    for agent in recorded_agents:
        assert not lint_agent(agent, append_only).findings


@parametrized
def test_a_habit_put_into_real_trajectories_is_named_and_priced(
    render: Render, label: str, recorded_agents: list[Agent]
) -> None:
    labels: list[str] = []
    found = known = 0
    for agent in recorded_agents:
        lane = lint_agent(agent, render)
        labels += [
            each.diagnosis.label for each in lane.findings if len(agent.turns[each.call - 1][0]) >= TELLING_TOKENS
        ]
        found += sum(lane.cost_tokens)
        known += sum(known_losses(agent, render))
    assert labels.count(label) >= 0.9 * len(labels) > 0
    assert found == pytest.approx(known, rel=0.1, abs=16 * len(labels))
