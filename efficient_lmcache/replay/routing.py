"""Which of several engines a call goes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ROUTES = ("load", "session")


class Router:
    """Hands each call to the engine with the fewest calls in flight; those with equally few take turns.

    Args:
        base_urls: of the engines.
        route: load: every call anew. session: a task's first call, and its later ones go where that went.
    """

    def __init__(self, base_urls: Sequence[str], route: str = "load") -> None:
        self.base_urls = tuple(base_urls)
        self._in_flight = [0] * len(self.base_urls)
        self._latest = -1
        self._engines_of_tasks: dict[str, int] | None = {} if route == "session" else None

    @contextmanager
    def sending(self, task: str) -> Iterator[int]:
        """The number of the engine that takes the task's next call, which is in flight while the block runs."""
        engine = self._choose(task)
        self._in_flight[engine] += 1
        try:
            yield engine
        finally:
            self._in_flight[engine] -= 1

    def _choose(self, task: str) -> int:
        if self._engines_of_tasks is None:
            return self._least_loaded()
        if task not in self._engines_of_tasks:
            self._engines_of_tasks[task] = self._least_loaded()
        return self._engines_of_tasks[task]

    def _least_loaded(self) -> int:
        count = len(self._in_flight)
        in_turn = [(self._latest + 1 + step) % count for step in range(count)]
        self._latest = min(in_turn, key=self._in_flight.__getitem__)
        return self._latest
