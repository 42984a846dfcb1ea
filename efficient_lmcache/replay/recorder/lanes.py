"""Calls of one task that overlap, laid out in lanes of calls that follow one another.

A trace's task is a sequence, but an agent may have several calls in flight (sub-agents). A call that overlaps all of
its task's lanes opens a new one. Of several free lanes it takes the one whose last call it shares the longest prefix
with: that one's conversation goes on.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import numpy as np

from efficient_lmcache.replay.trace import Tokens, common_prefix_tokens

MEMORY_TOKENS = 1 << 24

_NOTHING: Tokens = np.empty(0, np.uint32)


class Lanes:
    """Places finished calls, in the order in which they ended.

    Remembers each lane's end, and the tokens of the latest lanes up to `memory_tokens` together. What it remembers is
    decided by the sequence of `remember` alone, so that a journal read again leads to the same state.
    """

    def __init__(self, memory_tokens: int = MEMORY_TOKENS) -> None:
        self._memory_tokens = memory_tokens
        self._ends_s: dict[str, list[float]] = defaultdict(list)
        self._tokens: OrderedDict[tuple[str, int], Tokens] = OrderedDict()
        self._total_tokens = 0

    def place(self, task: str, start_s: float, prompt: Tokens) -> tuple[int, int]:
        """The lane (from 0) of a call that started at `start_s`, and how many tokens it keeps of that lane's last."""
        free = [lane for lane, end_s in enumerate(self._ends_s[task]) if end_s <= start_s]
        if not free:
            return len(self._ends_s[task]), 0
        kept = {lane: common_prefix_tokens(prompt, self.last(task, lane)) for lane in free}
        # Among equals the one that ended last: its client is the one that waited least.
        lane = max(free, key=lambda lane: (kept[lane], self._ends_s[task][lane]))
        return lane, kept[lane]

    def last(self, task: str, lane: int) -> Tokens:
        """Prompt and output of the lane's last call; empty if they are no longer remembered."""
        return self._tokens.get((task, lane), _NOTHING)

    def remember(self, task: str, lane: int, end_s: float, tokens: Tokens) -> None:
        """The lane's last call is now one that ended at `end_s` with these tokens (prompt and output)."""
        ends_s = self._ends_s[task]
        if lane == len(ends_s):
            ends_s.append(end_s)
        ends_s[lane] = max(ends_s[lane], end_s)
        old = self._tokens.pop((task, lane), _NOTHING)
        self._tokens[task, lane] = tokens
        self._total_tokens += len(tokens) - len(old)
        while self._total_tokens > self._memory_tokens and len(self._tokens) > 1:
            self._total_tokens -= len(self._tokens.popitem(last=False)[1])
