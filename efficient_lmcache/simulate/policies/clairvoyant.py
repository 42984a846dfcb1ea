"""A bound: an exclusive tier that knows who comes next (Belady, 1966).

It knows the order of first lookups of an earlier simulation, and iterates, since what it keeps changes that order. A
prompt's head is asked for whenever its tail is, so the furthest next use takes tails first and leaves no gaps.
"""

from __future__ import annotations

import heapq

import numpy as np

from efficient_lmcache.core.references import Floats
from efficient_lmcache.simulate.policies.exclusive import ExclusiveTier
from efficient_lmcache.sizing.workload import Workload

_NEVER = np.iinfo(np.int64).max


class ClairvoyantTier(ExclusiveTier):
    """Evicts, or bypasses, the chunk whose next use is furthest away.

    Args:
        looked_up_s: float64 [calls]: first lookups of an earlier simulation.
    """

    def __init__(self, workload: Workload, capacity_chunks: int, looked_up_s: Floats) -> None:
        super().__init__(workload, capacity_chunks)
        chunks = workload.chunks
        self._place = np.argsort(np.argsort(looked_up_s, kind="stable"), kind="stable").tolist()
        self._done = [False] * len(chunks)
        # Of each chunk: who asks for it, last ones first, and how far from the prompt's start it is.
        self._users: list[list[int]] = [[] for _ in range(int(chunks.keys.max(initial=-1)) + 1)]
        self._depth = [0] * len(self._users)
        for call in np.argsort(looked_up_s, kind="stable")[::-1].tolist():
            for depth, key in enumerate(chunks.call_keys(call).tolist()):
                self._users[key].append(call)
                self._depth[key] = depth
        # (place of the next use, depth) negated, key; entries that are no longer true are skipped.
        self._furthest: list[tuple[int, int, int]] = []

    def _seen(self, call: int, keys: list[int], now_s: float) -> None:
        self._done[call] = True
        for key in keys:
            if key in self.sole:
                self._note(key)

    def _arrive(self, key: int) -> None:
        super()._arrive(key)
        self._note(key)

    def _note(self, key: int) -> None:
        heapq.heappush(self._furthest, (*self._nearness(key), key))

    def _nearness(self, key: int) -> tuple[int, int]:
        users = self._users[key]
        while users and self._done[users[-1]]:
            users.pop()
        return -self._place[users[-1]] if users else -_NEVER, -self._depth[key]

    def _makes_room(self, key: int) -> bool:
        return (self._nearness(key)[0] != -_NEVER or self._is_awaited(key)) and super()._makes_room(key)

    def _victim(self, key: int) -> int | None:
        spare, nearness, victim = self._latest_spare(), (0, 0), None
        awaited = []
        while self._furthest and victim is None:
            entry = self._furthest[0]
            if entry[2] not in self.sole or entry[:2] != self._nearness(entry[2]):
                heapq.heappop(self._furthest)
            elif self._is_awaited(entry[2]):
                awaited.append(heapq.heappop(self._furthest))
            else:
                nearness, victim = entry[:2], entry[2]
        for entry in awaited:
            heapq.heappush(self._furthest, entry)
        if spare is not None and nearness[0] != -_NEVER:
            return spare
        return victim if nearness < self._nearness(key) or self._is_awaited(key) else None
