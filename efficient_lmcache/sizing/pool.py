"""A closed-loop pool of agents on one engine: in which order, and when, are calls looked up?

    pool      A sessions at a time, taken in the stream's order; when one ends, the next one starts
    lane      a call is sent once the lane's previous response has arrived and the recorded interval has passed
    engine    R slots and a KV cache; calls enter first come, first served; one prompt is computed at a time; outputs
              are decoded side by side
    lookup    when a call enters the engine: that is when vLLM asks for its prefix

The cache decides how much of a prompt is computed, hence how long it takes, hence the order. The two extremes bound it:
every prompt computed whole, and every prompt computed only where it is new. `prediction` starts from both and lets the
predicted coverage refine the order. What the model leaves out: preemptions, and the batching of prefill with decoding.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.core.reuse import stable_tokens

Range = tuple[float, float]


class Rates(NamedTuple):
    """How fast an engine serves.

    Attributes:
        prefill_tokens_per_s: prompt tokens that the whole engine computes in a second.
        output_s_per_token: seconds that one call waits for each of its output tokens.
    """

    prefill_tokens_per_s: float
    output_s_per_token: float


@dataclass(frozen=True, slots=True)
class PoolModel:
    """A pool and its engine.

    Attributes:
        active_pool: A, sessions in progress.
        slots: R, calls that the engine runs at once (vLLM's `max_num_seqs`).
        prefill_tokens_per_s: of the whole engine, slow and fast end.
        output_s_per_token: fast and slow end.
        gpu_kv_tokens: K_G; prompts that run at once fit into it. None: no limit.
        time_scale: multiplies recorded intervals.
    """

    active_pool: int
    slots: int
    prefill_tokens_per_s: Range
    output_s_per_token: Range
    gpu_kv_tokens: int | None = None
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, valid, allowed in (
            ("active_pool", self.active_pool >= 1, "at least 1"),
            ("slots", self.slots >= 1, "at least 1"),
            ("prefill_tokens_per_s", _is_range(self.prefill_tokens_per_s, above=0.0), "two numbers > 0, rising"),
            ("output_s_per_token", _is_range(self.output_s_per_token), "two numbers >= 0, rising"),
            ("gpu_kv_tokens", self.gpu_kv_tokens is None or self.gpu_kv_tokens >= 1, "at least 1"),
            ("time_scale", 0 <= self.time_scale < math.inf, "a finite number >= 0"),
        ):
            if not valid:
                raise ValueError(f"PoolModel.{name} is {getattr(self, name)}; it must be {allowed}")

    def extremes(self) -> tuple[Rates, ...]:
        """The slowest and the fastest engine; one if they are the same."""
        (slow, fast), (short, long) = self.prefill_tokens_per_s, self.output_s_per_token
        return tuple(dict.fromkeys((Rates(slow, long), Rates(fast, short))))


class Schedule(NamedTuple):
    """Calls in the order of their lookups.

    Attributes:
        order: int64 [calls]: entry i is the stream's call that is looked up as the i-th one.
        lookup_s: float64 [calls]: when, in seconds since the pool began; not decreasing.
    """

    order: Ints
    lookup_s: Floats


def interleave(references: References, model: PoolModel) -> list[Ints]:
    """The orders of lookups at the extremes: two or four permutations of the stream's calls.

    For each end of the service rates, every prompt computed whole, then every prompt computed only where it is new.
    """
    computed = computed_extremes(references)
    return [simulate(references, model, rates, tokens).order for rates in model.extremes() for tokens in computed]


def computed_extremes(references: References) -> tuple[Ints, Ints]:
    """Most and least of every call's prompt that is computed, in tokens: all of it, and what nobody computed before."""
    prompts = references.prompt_tokens
    return prompts, np.maximum(prompts - stable_tokens(references), 1)


def simulate(references: References, model: PoolModel, rates: Rates, computed_tokens: Ints) -> Schedule:
    """Run the pool once. The same arguments give the same schedule.

    Args:
        computed_tokens: of every call's prompt, int64 [calls].
    """
    return _Pool(references, model, rates, computed_tokens).run()


_ARRIVES, _COMPUTED, _ANSWERED = range(3)


class _Pool:
    """One run: a heap of (time, number, event, call), where numbers make ties first come, first served."""

    def __init__(self, references: References, model: PoolModel, rates: Rates, computed_tokens: Ints) -> None:
        self._model = model
        self._prefill_s = (computed_tokens / rates.prefill_tokens_per_s).tolist()
        self._decode_s = (references.output_tokens * rates.output_s_per_token).tolist()
        self._prompts: list[int] = references.prompt_tokens.tolist()
        self._chain = _Chain(references, model.time_scale)
        self._events: list[tuple[float, int, int, int]] = []
        self._pushed = 0
        self._waiting: deque[int] = deque()
        self._running = 0
        self._resident_tokens = 0
        self._computing = False
        self._order: list[int] = []
        self._lookup_s: list[float] = []

    def run(self) -> Schedule:
        unstarted = iter(self._chain.sessions)
        unanswered = {session: len(calls) for session, calls in self._chain.sessions.items()}
        for _ in range(self._model.active_pool):
            self._start(next(unstarted, None), 0.0)
        while self._events:
            now_s, _, event, call = heapq.heappop(self._events)
            if event == _ARRIVES:
                self._waiting.append(call)
                for follower, delay_s in self._chain.spawned_by(call):
                    self._push(now_s + delay_s, _ARRIVES, follower)
            elif event == _COMPUTED:
                self._computing = False
                self._push(now_s + self._decode_s[call], _ANSWERED, call)
            else:
                self._running -= 1
                self._resident_tokens -= self._prompts[call]
                for follower, delay_s in self._chain.answered_by(call):
                    self._push(now_s + delay_s, _ARRIVES, follower)
                session = self._chain.session_of[call]
                unanswered[session] -= 1
                if not unanswered[session]:
                    self._start(next(unstarted, None), now_s)
            self._admit(now_s)
        return Schedule(np.array(self._order, np.int64), np.array(self._lookup_s))

    def _push(self, time_s: float, event: int, call: int) -> None:
        heapq.heappush(self._events, (time_s, self._pushed, event, call))
        self._pushed += 1

    def _start(self, session: int | None, now_s: float) -> None:
        if session is not None:
            first = self._chain.sessions[session][0]
            self._push(now_s + self._chain.interval_s[first], _ARRIVES, first)

    def _admit(self, now_s: float) -> None:
        """Let the first waiting call enter, if there is room for it."""
        if self._computing or not self._waiting or self._running == self._model.slots:
            return
        call = self._waiting[0]
        resident_tokens = self._resident_tokens + self._prompts[call]
        limit = self._model.gpu_kv_tokens
        if limit is not None and resident_tokens > limit and self._running:
            return
        self._waiting.popleft()
        self._running += 1
        self._resident_tokens = resident_tokens
        self._computing = True
        self._order.append(call)
        self._lookup_s.append(now_s)
        self._push(now_s + self._prefill_s[call], _COMPUTED, call)


class _Chain:
    """Which calls an event releases, and after how long."""

    def __init__(self, references: References, time_scale: float) -> None:
        self.session_of: list[int] = references.session.tolist()
        self.interval_s = (np.nan_to_num(references.interval_s).clip(0.0) * time_scale).tolist()
        self.sessions: dict[int, list[int]] = {}
        self._next_in_lane: dict[int, int] = {}
        self._spawned: dict[int, list[tuple[int, float]]] = {}
        start_s = references.start_s
        last_in_lane: dict[int, int] = {}
        for call, lane in enumerate(references.lane.tolist()):
            session = self.sessions.setdefault(self.session_of[call], [])
            if lane in last_in_lane:
                self._next_in_lane[last_in_lane[lane]] = call
            elif session:
                # A sub-agent follows the call that its session had sent last: tied to the clock alone, it would run
                # ahead of a parent that this pool serves more slowly than the recorded one.
                parent = session[-1]
                delay_s = float(np.nan_to_num(start_s[call] - start_s[parent]).clip(0.0)) * time_scale
                self._spawned.setdefault(parent, []).append((call, delay_s))
            last_in_lane[lane] = call
            session.append(call)

    def spawned_by(self, call: int) -> Sequence[tuple[int, float]]:
        """First calls of lanes that start after `call` is sent."""
        return self._spawned.get(call, ())

    def answered_by(self, call: int) -> Sequence[tuple[int, float]]:
        """The lane's next call, which waits for the response of `call`."""
        follower = self._next_in_lane.get(call)
        return () if follower is None else ((follower, self.interval_s[follower]),)


def _is_range(values: Range, above: float = -math.inf) -> bool:
    low, high = values
    return above < low <= high < math.inf and low >= 0
