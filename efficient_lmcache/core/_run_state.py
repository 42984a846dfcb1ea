"""The tables of recency by runs, and how they grow."""

from __future__ import annotations

import numpy as np

from efficient_lmcache.core import _run_kernels as kernels
from efficient_lmcache.core._compiled import enlarged
from efficient_lmcache.core.references import Ints


class RunState:
    """Which call promoted each chunk last, in tables that `_run_kernels` describes."""

    def __init__(self) -> None:
        self.last: Ints = np.zeros(0, np.int64)
        self.calls: Ints = np.zeros((1, 4), np.int64)
        self.intervals: Ints = np.zeros((0, 3), np.int64)
        self.counters: Ints = np.array([kernels.NEVER + 1, 0, kernels.NO_INTERVAL, 0], np.int64)

    def make_room(self, keys: Ints, chunks: int, at_promotion: bool) -> None:
        """Enlarge the tables for a call with these keys, and for `chunks` numbers at least."""
        self.last = enlarged(self.last, max(int(keys.max(initial=-1)) + 1, chunks))
        kernels.forget_dead_calls(self.calls, self.counters)
        # Half of the rows stay free, so calls are numbered anew no more often than once per as many calls.
        self.calls = enlarged(self.calls, 2 * (int(self.counters[kernels.USE]) + (len(keys) if at_promotion else 1)))
        kernels.build_tree(self.calls, self.counters)
        missing = 2 * len(keys) - int(self.counters[kernels.FREE_COUNT])
        if missing > 0:
            self._add_intervals(missing)

    def _add_intervals(self, at_least: int) -> None:
        before = len(self.intervals)
        self.intervals = enlarged(self.intervals, before + at_least)
        self.intervals[before:, kernels.OLDER] = np.arange(before + 1, len(self.intervals) + 1)
        self.intervals[-1, kernels.OLDER] = self.counters[kernels.FREE]
        self.counters[kernels.FREE] = before
        self.counters[kernels.FREE_COUNT] += len(self.intervals) - before
