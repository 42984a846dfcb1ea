"""When do prompts return? A distribution learned from the calls so far, and an order of eviction that follows from it.

    return      a call asks again for at least half of what an earlier call was the last one to ask for
    age         seconds since that earlier call's lookup
    survival    S(a), the share of calls that have not returned at age a: Kaplan and Meier's estimate (1958), for which
                calls that have not returned yet count for as long as they have waited
    index       Gittins' (1979): the best rate of returns per second that keeping a prompt of age a can have,
                max over t of (S(a) - S(a + t)) / (integral of S from a to a + t)
    tail        ages at which nothing has returned yet: as if the next of the calls that are so old were about to, and
                as if to wait twice as long were as likely at any age (a rate of 1 / (calls * a))

Where agents take turns, the index grows with age until the usual turn is over, and falls to almost nothing behind it:
finished agents' prompts go first, then the most recent ones. Where pauses have long tails it falls with age: LRU.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from efficient_lmcache.core.references import Floats
from efficient_lmcache.simulate.policies.exclusive import ExclusiveTier
from efficient_lmcache.sizing.workload import Workload

_CALLS = 1024
_REFRESH_CALLS = 16
# The distribution is resolved as finely as so many returns in each step allow: a rate is then known within a quarter.
_STEP_RETURNS = 16
# What writing a chunk costs of computing it, about.
_COPY_SHARE = 0.01
_SHORTEST_S = 1e-3


class ReturnTimes:
    """The distribution of the latest calls' return times."""

    def __init__(self) -> None:
        self._returns_s: deque[float] = deque(maxlen=_CALLS)
        # When each of the latest calls was looked up, while it has not returned.
        self._open: dict[int, float] = {}
        # Until enough is known, the tail is all.
        self._ages_s: Floats = np.zeros(1)
        self._index: Floats = np.ones(1)
        self._tail = 1.0
        self._fresh_calls = 0

    def opened(self, call: int, now_s: float) -> None:
        """A call is looked up."""
        self._open[call] = now_s
        if len(self._open) > _CALLS:
            del self._open[next(iter(self._open))]
        self._fresh_calls -= 1

    def returned(self, call: int, now_s: float) -> None:
        """An earlier call's prompt is asked for again."""
        opened_s = self._open.pop(call, None)
        if opened_s is not None:
            self._returns_s.append(now_s - opened_s)

    def index(self, ages_s: Floats) -> Floats:
        """Returns per second at these ages."""
        beyond = self._tail / np.maximum(ages_s, _SHORTEST_S)
        return np.where(ages_s < self._ages_s[-1], np.interp(ages_s, self._ages_s, self._index), beyond)

    def refresh(self, now_s: float) -> None:
        """Bring the index up to date, now and then."""
        if self._fresh_calls > 0 or len(self._returns_s) < _STEP_RETURNS:
            return
        self._fresh_calls = _REFRESH_CALLS
        returns_s = np.sort(np.fromiter(self._returns_s, np.float64))
        waits_s = np.sort(now_s - np.fromiter(self._open.values(), np.float64))
        steps = returns_s[_STEP_RETURNS - 1 :: _STEP_RETURNS]
        steps[-1] = returns_s[-1]
        self._ages_s = np.unique(np.concatenate(([0.0], steps)))
        self._index = _gittins(self._ages_s, _survival(self._ages_s, returns_s, waits_s))
        self._tail = 1.0 / (1 + np.count_nonzero(waits_s > self._ages_s[-1]))


def _survival(ages_s: Floats, returns_s: Floats, waits_s: Floats) -> Floats:
    """S at these ages."""
    returned = np.searchsorted(returns_s, ages_s, "right")
    waited = np.searchsorted(waits_s, ages_s, "right")
    at_risk = len(returns_s) - returned[:-1] + len(waits_s) - (waited[:-1] + waited[1:]) / 2
    return np.concatenate(([1.0], np.cumprod(1.0 - np.diff(returned) / np.maximum(at_risk, 1.0))))


def _gittins(ages_s: Floats, survival: Floats) -> Floats:
    """The index at these ages; 0 at the last one."""
    lived_s = np.concatenate(([0.0], np.cumsum(np.diff(ages_s) * (survival[:-1] + survival[1:]) / 2)))
    gain = survival[:, None] - survival[None, :]
    cost_s = lived_s[None, :] - lived_s[:, None]
    index: Floats = np.max(np.divide(gain, cost_s, out=np.zeros_like(gain), where=cost_s > 0), axis=1)
    return index


class ReturnTier(ExclusiveTier):
    """An exclusive tier that keeps the prompts that are expected back soonest."""

    def __init__(self, workload: Workload, capacity_chunks: int) -> None:
        super().__init__(workload, capacity_chunks)
        self.returns = ReturnTimes()
        self._caller: dict[int, int] = {}  # of each chunk: the last call to ask for it
        self._asked: dict[int, int] = {}  # of each call: chunks whose caller it is
        self._looked_up_s: dict[int, float] = {}
        self._held: dict[int, dict[int, None]] = {}  # of each caller: its sole chunks by arrival
        # Callers by rank, the next one to give up last; made when it is needed.
        self._queue: list[tuple[float, float, int]] | None = None
        self._ranks: dict[int, tuple[float, float]] = {}
        self._now_s = 0.0
        self._resident_s = 1.0  # how long the GPU keeps a chunk, on average

    def _seen(self, call: int, keys: list[int], now_s: float) -> None:
        if call in self._looked_up_s:
            return
        self._looked_up_s[call] = now_s
        taken: dict[int, int] = {}
        for key in keys:
            caller = self._caller.get(key)
            if caller is not None:
                taken[caller] = taken.get(caller, 0) + 1
                if key in self.sole:
                    self._release(caller, key)
            self._caller[key] = call
            if key in self.sole:
                self._held.setdefault(call, {})[key] = None
        for caller, count in taken.items():
            if 2 * count >= self._asked[caller]:
                self.returns.returned(caller, now_s)
            self._asked[caller] -= count
        self._asked[call] = len(keys)
        self.returns.opened(call, now_s)

    def _begin(self, now_s: float) -> None:
        self._now_s = now_s
        self._queue = None
        self._ranks.clear()
        self.returns.refresh(now_s)

    def _ranked(self) -> list[tuple[float, float, int]]:
        looked_up_s = np.fromiter((self._looked_up_s[call] for call in self._held), np.float64, len(self._held))
        index = self.returns.index(self._now_s - looked_up_s)
        return sorted(zip(index.tolist(), looked_up_s.tolist(), self._held, strict=True), reverse=True)

    def _rank(self, key: int) -> tuple[float, float]:
        """Index and, among equals, LRU; nothing for what no prompt has asked for yet."""
        call = self._caller.get(key)
        if call is None:
            return 0.0, 0.0
        if call not in self._ranks:
            looked_up_s = self._looked_up_s[call]
            self._ranks[call] = float(self.returns.index(np.array(self._now_s - looked_up_s))), looked_up_s
        return self._ranks[call]

    def _arrive(self, key: int) -> None:
        super()._arrive(key)
        caller = self._caller.get(key)
        if caller is not None:
            self._resident_s += (self._now_s - self._looked_up_s[caller] - self._resident_s) / _CALLS
            if caller not in self._held:
                self._queue = None
            self._held.setdefault(caller, {})[key] = None

    def _leave(self, key: int) -> None:
        super()._leave(key)
        caller = self._caller.get(key)
        if caller is not None:
            self._release(caller, key)

    def _release(self, caller: int, key: int) -> None:
        held = self._held[caller]
        del held[key]
        if not held:
            del self._held[caller]

    def _victim(self, key: int) -> int | None:
        spare, incoming = self._latest_spare(), self._rank(key)
        if self._queue is None:
            self._queue = self._ranked()
        while self._queue:
            index, looked_up_s, call = self._queue[-1]
            if spare is not None and index >= _COPY_SHARE / self._resident_s:
                return spare
            if (index, looked_up_s) > incoming and not self._is_awaited(key):
                return None
            victim = next(self._not_awaited(self._held.get(call, {})), None)
            if victim is not None:
                return victim
            self._queue.pop()
        return spare
