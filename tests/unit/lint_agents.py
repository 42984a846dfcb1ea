"""Agents whose prompts are made of named pieces, so that what a habit costs is known without looking at tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from efficient_lmcache.sizing.lint import LaneReport, lint_calls
from efficient_lmcache.sizing.lint_align import Ids
from efficient_lmcache.sizing.lint_break import Call

Piece = tuple[Hashable, Ids]
"""A name, and its tokens; two pieces of one name have the same tokens."""
Turn = tuple[Ids, Ids]
"""A reply, and what its tool answered."""
Render = Callable[["Agent", int], list[Piece]]

TOOLS = 6


@dataclass(frozen=True)
class Agent:
    """An opening of a system text, tools and a task, and turns."""

    system: Ids
    tools: tuple[Ids, ...]
    task: Ids
    turns: tuple[Turn, ...]

    @classmethod
    def random(cls, seed: int = 0, turns: int = 12) -> Agent:
        rng = np.random.default_rng(seed)

        def text(tokens: int) -> Ids:
            return rng.integers(100, 50_000, tokens)

        lengths = rng.integers(40, 400, (turns, 2))
        return cls(
            system=text(300),
            tools=tuple(text(int(tokens)) for tokens in rng.integers(60, 200, TOOLS)),
            task=text(250),
            turns=tuple((text(int(reply)), text(int(answer))) for reply, answer in lengths),
        )

    @classmethod
    def recorded(cls, calls: list[tuple[Ids, Ids]]) -> Agent:
        """From a task's append-only prompts and outputs; its opening is cut into pieces."""
        opening = calls[0][0]
        system, *tools, task = np.array_split(opening, TOOLS + 2)
        turns = [
            (output, following[len(prompt) + len(output) :]) for (prompt, output), (following, _) in pairwise(calls)
        ]
        return cls(system, tuple(tools), task, tuple(turns))

    def head(self, order: list[int] | None = None, top: Piece | None = None) -> list[Piece]:
        """The opening; `top` takes the place of the system text's tokens 20 to 30."""
        tools: list[Piece] = [(("tool", number), self.tools[number]) for number in order or range(len(self.tools))]
        system: list[Piece] = [("system", self.system)]
        if top is not None:
            system = [("system 1", self.system[:20]), top, ("system 2", self.system[30:])]
        return [*system, *tools, ("task", self.task)]

    def reply(self, turn: int) -> list[Piece]:
        reply = self.turns[turn][0]
        return [(("reasoning", turn), reply[: len(reply) // 2]), (("reply", turn), reply[len(reply) // 2 :])]

    def answer(self, turn: int) -> Piece:
        return ("answer", turn), self.turns[turn][1]

    def history(self, start: int, end: int) -> list[Piece]:
        return [piece for turn in range(start, end) for piece in (*self.reply(turn), self.answer(turn))]


def append_only(agent: Agent, call: int) -> list[Piece]:
    return [*agent.head(), *agent.history(0, call)]


def lint_agent(agent: Agent, render: Render) -> LaneReport:
    """Lint one call a turn."""
    prompts = [_joined(render(agent, call)) for call in range(len(agent.turns))]
    calls = [
        ("task", Call(prompt, len(prompt), reply)) for prompt, (reply, _) in zip(prompts, agent.turns, strict=True)
    ]
    return lint_calls("test", calls).lanes[0]


def known_losses(agent: Agent, render: Render) -> list[int]:
    """Of every call: tokens of pieces behind the first new or missing one that the previous call processed as well."""
    losses = [0]
    for call in range(1, len(agent.turns)):
        old = [*render(agent, call - 1), *agent.reply(call - 1)]
        new = render(agent, call)
        same = 0
        while same < min(len(old), len(new)) and old[same][0] == new[same][0]:
            same += 1
        left = {name for name, _ in old[same:]}
        losses.append(sum(len(tokens) for name, tokens in new[same:] if name in left))
    return losses


def _joined(pieces: list[Piece]) -> Ids:
    return np.concatenate([tokens for _, tokens in pieces])
