"""Which engine takes a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from efficient_lmcache.core.references import References
from efficient_lmcache.simulate._engine_kernel import cached_blocks
from efficient_lmcache.simulate._engine_state import Calls, Engine

#: (call, engines, calls, blocks) -> the engine's number.
Router = Callable[[int, Sequence[Engine], Calls, References], int]


def by_load(call: int, engines: Sequence[Engine], calls: Calls, blocks: References) -> int:
    """The engine with the fewest unanswered calls; the first one of several."""
    return min(range(len(engines)), key=lambda number: _load(engines[number]))


def by_session(call: int, engines: Sequence[Engine], calls: Calls, blocks: References) -> int:
    """A session's calls all go to one engine, sessions in turn."""
    return int(blocks.session[call]) % len(engines)


def by_prefix(call: int, engines: Sequence[Engine], calls: Calls, blocks: References) -> int:
    """The engine whose GPU caches most of the prompt; among equals the least loaded one."""
    keys = blocks.call_keys(call)

    def rank(number: int) -> tuple[int, int]:
        return -cached_blocks(engines[number].holder, keys), _load(engines[number])

    return min(range(len(engines)), key=rank)


ROUTERS: dict[str, Router] = {"load": by_load, "session": by_session, "prefix": by_prefix}


def _load(engine: Engine) -> int:
    state = engine.state[0]
    return int(state["running"] + state["waiting"] + state["fetching"])
