"""Counts the evictions of the last minute (e_t of the paper's Eq. 10)."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

#: Evictions this close together share a bucket, which bounds the window's memory whatever the eviction rate.
RESOLUTION_S = 0.25


@dataclass(slots=True)
class _Bucket:
    first_s: float
    evictions: int


class EvictionWindow:
    """A sliding count: an eviction counts for `window_s` at least and for `window_s + RESOLUTION_S` at most.

    O(1) amortised per call, at most `window_s / RESOLUTION_S + 2` buckets. Thread safe: chunks are allocated on worker
    threads, the probe runs on the publisher's. All times are seconds on one clock of the caller.
    """

    def __init__(self, window_s: float = 60.0) -> None:
        if not window_s > 0:
            raise ValueError(f"window_s is {window_s}; it must be positive")
        self._window_s = window_s
        self._buckets: deque[_Bucket] = deque()
        self._total = 0
        self._grand_total = 0
        self._lock = threading.Lock()

    def add(self, count: int, now_s: float) -> None:
        """Counts `count` evictions at `now_s`. Two threads may arrive in the other order than they read the clock."""
        if count < 0:
            raise ValueError(f"count is {count}; it must not be negative")
        if count == 0:
            return
        with self._lock:
            self._expire(now_s)
            if self._buckets and now_s < self._buckets[-1].first_s + RESOLUTION_S:
                self._buckets[-1].evictions += count
            else:
                self._buckets.append(_Bucket(now_s, count))
            self._total += count
            self._grand_total += count

    def total(self, now_s: float) -> int:
        """Evictions in the window that ends at `now_s`."""
        with self._lock:
            self._expire(now_s)
            return self._total

    @property
    def grand_total(self) -> int:
        """Evictions since the start."""
        return self._grand_total

    def _expire(self, now_s: float) -> None:
        # The bucket's youngest eviction is nearly RESOLUTION_S younger than its first, and must still live window_s.
        while self._buckets and self._buckets[0].first_s + RESOLUTION_S + self._window_s <= now_s:
            self._total -= self._buckets.popleft().evictions
