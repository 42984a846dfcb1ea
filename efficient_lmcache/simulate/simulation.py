"""Agents in closed loops on engines with tiers: the event loop.

    pool      A sessions at a time, in the work's order; when one ends, the next one starts
    lane      a call is sent once the lane's previous response has arrived and the recorded interval has passed
    router    chooses an engine for each call when it is sent
    remote    what a call needs from afar is fetched before its engine queues it, so that no engine waits for it

Engines take turns, each a step's plan or its end, in the order of time, until an arrival is due. So everything that
touches what engines share happens in that order. Turns that concern nobody else follow one another in compiled code.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints
from efficient_lmcache.simulate import _engine_kernel as kernel
from efficient_lmcache.simulate._engine_state import LOOKUP, NONE, STUCK, Calls, Engine
from efficient_lmcache.simulate.costs import Costs
from efficient_lmcache.simulate.engine import EngineSettings, new_calls, new_engines
from efficient_lmcache.simulate.routing import Router, by_load
from efficient_lmcache.simulate.tiers import KVTier, Remote
from efficient_lmcache.sizing.pool import chain
from efficient_lmcache.sizing.workload import Workload

Progress = Callable[[int, int], None]
_PROGRESS_CALLS = 64


@dataclass(frozen=True, slots=True)
class Pool:
    """The agents.

    Attributes:
        active_pool: A, sessions in progress.
        time_scale: multiplies recorded intervals.
    """

    active_pool: int
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.active_pool < 1:
            raise ValueError(f"Pool.active_pool is {self.active_pool}; it must be at least 1")
        if not 0 <= self.time_scale < math.inf:
            raise ValueError(f"Pool.time_scale is {self.time_scale}; it must be a finite number >= 0")


class Outcome(NamedTuple):
    """What happened to every call; arrays of [calls], seconds since the pool's start.

    Attributes:
        calls: as the engines left them.
        arrived_s: when the call was sent.
        looked_up_s: at its first lookup.
        host_tokens: h at its first lookup.
        engine: which one served it.
        engines: the engines' last states.
        makespan_s: when the last call was answered.
    """

    calls: Calls
    arrived_s: Floats
    looked_up_s: Floats
    host_tokens: Ints
    engine: Ints
    engines: list[Engine]
    makespan_s: float


class Simulation:
    """One run; to be run once.

    Args:
        tiers: each engine's; several engines may share one.
        remote: where calls wait for KV from afar.
        logs_evictions: tell the tiers what the GPUs' caches lose.
        sent_s: when each call is sent, float64 [calls], instead of when the loop would send it.
    """

    def __init__(
        self,
        workload: Workload,
        pool: Pool,
        engines: Sequence[EngineSettings],
        tiers: Sequence[KVTier],
        costs: Costs,
        *,
        router: Router = by_load,
        remote: Remote | None = None,
        logs_evictions: bool = False,
        sent_s: Floats | None = None,
    ) -> None:
        blocks = workload.blocks
        self._blocks = blocks
        self._calls = new_calls(blocks)
        self._all = new_engines(engines, blocks, logs_evictions=logs_evictions)
        self._engines = [kernel.engine_of(self._all, number) for number in range(len(engines))]
        self._tiers = tiers
        self._costs = costs
        self._router = router
        self._remote = remote
        self._sent_s = sent_s
        self._chain = chain(workload.chunks, pool.time_scale)
        self._active_pool = pool.active_pool
        self._unanswered = self._chain.session_calls.copy()
        self._sessions = 0
        self._arrivals: list[tuple[float, int, int]] = []
        self._sent = 0
        self._answered = 0
        count = len(blocks)
        self._arrived_s, self._looked_up_s = np.full(count, np.nan), np.full(count, np.nan)
        self._host_tokens, self._engine_of = np.zeros(count, np.int64), np.full(count, NONE)
        self._goes_on = [False] * count

    def run(self, progress: Progress | None = None) -> Outcome:
        """All calls are answered in the end.

        Args:
            progress: called with (calls answered, calls in all).

        Raises:
            ValueError: a prompt does not fit into the GPU's cache.
        """
        self._start()
        count = len(self._blocks)
        reported = 0
        while self._answered < count:
            self._advance()
            if progress is not None and self._answered >= reported + _PROGRESS_CALLS:
                reported = self._answered
                progress(reported, count)
        return Outcome(
            self._calls,
            self._arrived_s,
            self._looked_up_s,
            self._host_tokens,
            self._engine_of,
            self._engines,
            float(self._calls.finished_s.max()),
        )

    def _start(self) -> None:
        if self._sent_s is not None:
            self._arrivals = sorted((at_s, call, call) for call, at_s in enumerate(self._sent_s.tolist()))
            return
        for _ in range(min(self._active_pool, len(self._chain.session_first))):
            self._start_session(0.0)

    def _advance(self) -> None:
        """Turns up to one that concerns others than its engine, or the next arrival."""
        until_s = self._arrivals[0][0] if self._arrivals else math.inf
        number, stop = kernel.advance(self._all, self._calls, self._costs.step, until_s)
        if number == NONE:
            self._arrive()
            return
        engine, tier = self._engines[number], self._tiers[number]
        if stop == STUCK:
            raise self._stuck(engine)
        now_s = float(engine.state["clock_s"][0])
        self._note_evictions(engine, tier, now_s)
        if stop == LOOKUP:
            self._look_up(engine, int(engine.state["call"][0]), tier, now_s)
            return
        self._store(engine, tier, now_s)
        self._answer(engine)

    def _arrive(self) -> None:
        now_s, _, call = heapq.heappop(self._arrivals)
        if self._engine_of[call] == NONE:
            self._dispatch(call, now_s)
            ready_s = self._fetch(call, now_s)
            if ready_s > now_s:
                self._engines[self._engine_of[call]].state["fetching"] += 1
                self._push(ready_s, call)
                return
        else:
            self._engines[self._engine_of[call]].state["fetching"] -= 1
        self._enqueue(self._engines[self._engine_of[call]].state[0], call, now_s)

    def _enqueue(self, state: np.void, call: int, now_s: float) -> None:
        """The call waits behind all others; an engine that was idle works from now on."""
        if state["waiting"]:
            self._calls.next_waiting[state["last_waiting"]] = call
        else:
            state["first_waiting"] = call
            if not state["running"]:
                state["clock_s"] = max(state["clock_s"], now_s)
        state["last_waiting"] = call
        state["waiting"] += 1

    def _dispatch(self, call: int, now_s: float) -> None:
        self._arrived_s[call] = now_s
        self._engine_of[call] = self._router(call, self._engines, self._calls, self._blocks)
        follower = NONE if self._sent_s is not None else self._chain.first_spawned[call]
        while follower != NONE:
            self._send(int(follower), now_s)
            follower = self._chain.next_spawned[follower]

    def _fetch(self, call: int, now_s: float) -> float:
        if self._remote is None:
            return now_s
        number = int(self._engine_of[call])
        engine = self._engines[number]
        keys = self._blocks.call_keys(call)[: int(self._calls.prompt_tokens[call]) // engine.block_tokens]
        return self._remote.fetch(call, number, kernel.cached_blocks(engine.holder, keys) * engine.block_tokens, now_s)

    def _stuck(self, engine: Engine) -> ValueError:
        call = int(engine.state["first_waiting"][0])
        return ValueError(
            f"call {call} has {self._calls.prompt_tokens[call]} prompt tokens; they do not fit into the GPU's "
            f"{int(engine.state['gpu_blocks'][0]) * engine.block_tokens}"
        )

    def _look_up(self, engine: Engine, call: int, tier: KVTier, now_s: float) -> None:
        calls = self._calls
        tokens = int(calls.prompt_tokens[call] + calls.produced_tokens[call])
        keys = self._blocks.call_keys(call)[: tokens // engine.block_tokens]
        found = tier.look_up(call, tokens, kernel.cached_blocks(engine.holder, keys) * engine.block_tokens, now_s)
        calls.host_tokens[call] = found
        if math.isnan(self._looked_up_s[call]):
            self._looked_up_s[call], self._host_tokens[call] = now_s, found

    def _note_evictions(self, engine: Engine, tier: KVTier, now_s: float) -> None:
        count = int(engine.state["evicted"][0])
        if count:
            engine.state["evicted"] = 0
            self._copied(engine, tier.evicted(engine.evicted[:count], now_s))

    def _store(self, engine: Engine, tier: KVTier, now_s: float) -> None:
        filled = engine.filled[: int(engine.state["filled"][0])].tolist()
        # LMCache's connector stores for a step's new calls first, then for those that go on.
        for call, tokens in sorted(filled, key=lambda row: self._goes_on[row[0]]):
            self._goes_on[call] = True
            self._copied(engine, tier.fill(call, tokens, now_s))

    def _copied(self, engine: Engine, tokens: int) -> None:
        """A copy to the host blocks the step that ends, and so the next one, which may have been planned already."""
        if tokens:
            copied_s = self._costs.store_s + tokens * self._costs.stored_token_s
            engine.state["clock_s"] += copied_s
            engine.state["end_s"] += copied_s

    def _answer(self, engine: Engine) -> None:
        now_s = float(engine.state["clock_s"][0])
        finished = engine.finished[: int(engine.state["finished"][0])].tolist()
        self._answered += len(finished)
        for call in finished:
            self._calls.finished_s[call] = now_s
            if self._sent_s is not None:
                continue
            session = self._chain.session[call]
            self._unanswered[session] -= 1
            follower = self._chain.next_in_lane[call]
            if follower != NONE:
                self._send(int(follower), now_s)
            if self._unanswered[session] == 0 and self._sessions < len(self._chain.session_first):
                self._start_session(now_s)

    def _start_session(self, now_s: float) -> None:
        self._send(int(self._chain.session_first[self._sessions]), now_s)
        self._sessions += 1

    def _send(self, call: int, released_s: float) -> None:
        self._push(released_s + float(self._chain.delay_s[call]), call)

    def _push(self, at_s: float, call: int) -> None:
        heapq.heappush(self._arrivals, (at_s, self._sent, call))
        self._sent += 1
