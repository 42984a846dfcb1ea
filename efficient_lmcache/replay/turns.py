"""One piece of work at a time in an event loop: the one whose result is due first, and one per turn of the loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class Turns:
    """Spreads pieces of work that may wait over the loop's turns, so that what may not wait never waits for several.

    An event loop runs whatever is ready before it looks at its clock again. Agents that were answered together would
    have all their next requests made ready in one turn, and a call that is due meanwhile would wait for all of them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._giving = False

    async def wait(self, due_s: float) -> None:
        """Return in a turn of the loop that is given to the caller alone; earlier `due_s` first, then as they came."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (due_s, next(self._arrivals), mine))
        if not self._giving:
            self._give_next()
        await mine

    def _give_next(self) -> None:
        """Runs once per turn of the loop while somebody waits."""
        self._giving = bool(self._waiting)
        if not self._giving:
            return
        asyncio.get_running_loop().call_soon(self._give_next)
        while self._waiting:
            _, _, first = heapq.heappop(self._waiting)
            if not first.done():  # it was cancelled
                first.set_result(None)
                return
