"""How long to wait before trying again."""

from __future__ import annotations

import random


class Backoff:
    """Doubles from `first_s` to `most_s`, of which a random half is left out, so that engines do not return in step."""

    def __init__(self, first_s: float = 0.5, most_s: float = 10.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return wait_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked."""
        self._next_s = self._first_s
