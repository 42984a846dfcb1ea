"""Lanes of recordings that name none."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class _Tip(NamedTuple):
    """A lane's latest call: its tokens with its output, how many full blocks it has, and their hash."""

    lane: int
    tokens: int
    depth: int
    path: int


class LaneGuess:
    """Takes a call for the next one of the lane whose latest call it extends.

    That is: its blocks begin with all of the latest call's full blocks, and its prompt is no shorter than that prompt
    and its output. Of several such lanes, the one that shares most. A call that extends none, or that has no full
    block, begins a lane.
    """

    def __init__(self) -> None:
        self._tips: dict[Hashable, _Tip] = {}

    def find(self, blocks: Sequence[Hashable], prompt_tokens: int) -> int | None:
        """The lane that a call with these full blocks, head to tail, continues."""
        for depth in range(len(blocks), 0, -1):
            tip = self._tips.get(blocks[depth - 1])
            if tip is None or tip.depth != depth or tip.tokens > prompt_tokens:
                continue
            # Equal blocks have one id wherever they are in some traces, so the last one alone tells no prompt.
            if tip.path == hash(tuple(blocks[:depth])):
                del self._tips[blocks[depth - 1]]
                return tip.lane
        return None

    def set_tip(self, lane: int, blocks: Sequence[Hashable], tokens: int) -> None:
        """The lane's latest call has these full blocks, and so many tokens with its output."""
        if blocks:
            self._tips[blocks[-1]] = _Tip(lane, tokens, len(blocks), hash(tuple(blocks)))
