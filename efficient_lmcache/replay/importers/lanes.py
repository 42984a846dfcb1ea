"""Lanes of recordings that name none."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class LaneGuess:
    """Takes a call for the next one of the lane whose latest call it extends.

    That is: its blocks contain the latest call's last full block, hence the whole prompt up to there, and its prompt
    is no shorter than that prompt and its output. Of several such lanes, the one that shares most. A call that extends
    none, or that has no full block, begins a lane.
    """

    def __init__(self) -> None:
        self._tips: dict[Hashable, tuple[int, int]] = {}

    def find(self, blocks: Sequence[Hashable], prompt_tokens: int) -> int | None:
        """The lane that a call with these full blocks, head to tail, continues."""
        for block in reversed(blocks):
            lane, least_tokens = self._tips.get(block, (-1, 0))
            if lane >= 0 and prompt_tokens >= least_tokens:
                del self._tips[block]
                return lane
        return None

    def set_tip(self, lane: int, blocks: Sequence[Hashable], tokens: int) -> None:
        """The lane's latest call has these full blocks, and so many tokens with its output."""
        if blocks:
            self._tips[blocks[-1]] = (lane, tokens)
