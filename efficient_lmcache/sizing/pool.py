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

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.core.reuse import stable_tokens
from efficient_lmcache.sizing import _pool_kernel as kernel

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
        makespan_s: when the last call is answered.
    """

    order: Ints
    lookup_s: Floats
    makespan_s: float


def interleave(references: References, model: PoolModel) -> list[Ints]:
    """The orders of lookups at the extremes: two or four permutations of the stream's calls.

    For each end of the service rates, every prompt computed whole, then every prompt computed only where it is new.
    """
    computed = computed_extremes(references)
    pool = Pool(references, model)
    return [pool.simulate(rates, tokens).order for rates in model.extremes() for tokens in computed]


def computed_extremes(references: References) -> tuple[Ints, Ints]:
    """Most and least of every call's prompt that is computed, in tokens: all of it, and what nobody computed before."""
    prompts = references.prompt_tokens
    return prompts, np.maximum(prompts - stable_tokens(references), 1)


class Pool:
    """The sessions of a stream, ready to be simulated under one engine after another."""

    def __init__(self, references: References, model: PoolModel) -> None:
        self._model = model
        self._references = references
        self._chain = chain(references, model.time_scale)

    def simulate(self, rates: Rates, computed_tokens: Ints) -> Schedule:
        """Run the pool once. The same arguments give the same schedule.

        Args:
            computed_tokens: of every call's prompt, int64 [calls].
        """
        model, references = self._model, self._references
        return Schedule(
            *kernel.run(
                self._chain,
                references.prompt_tokens,
                computed_tokens / rates.prefill_tokens_per_s,
                (references.output_tokens * rates.output_s_per_token).astype(np.float64),
                model.active_pool,
                model.slots,
                _UNLIMITED_TOKENS if model.gpu_kv_tokens is None else model.gpu_kv_tokens,
            )
        )


_UNLIMITED_TOKENS = 1 << 62


def chain(references: References, time_scale: float) -> kernel.Chain:
    """Which calls follow which, and after how long: recorded intervals times `time_scale`."""
    calls = len(references)
    delay_s = np.nan_to_num(references.interval_s).clip(0.0)
    next_in_lane = np.full(calls, kernel.NONE)
    first_spawned, next_spawned = np.full(calls, kernel.NONE), np.full(calls, kernel.NONE)
    last_in_lane: dict[int, int] = {}
    last_in_session: dict[int, int] = {}
    for call, (lane, session) in enumerate(zip(references.lane.tolist(), references.session.tolist(), strict=True)):
        if lane in last_in_lane:
            next_in_lane[last_in_lane[lane]] = call
        elif session in last_in_session:
            # A sub-agent follows the call that its session had sent last: tied to the clock alone, it would run ahead
            # of a parent that this pool serves more slowly than the recorded one.
            parent = last_in_session[session]
            delay_s[call] = np.nan_to_num(references.start_s[call] - references.start_s[parent]).clip(0.0)
            next_spawned[call], first_spawned[parent] = first_spawned[parent], call
        last_in_lane[lane] = last_in_session[session] = call
    _, first, numbers, session_calls = np.unique(
        references.session, return_index=True, return_inverse=True, return_counts=True
    )
    by_appearance = np.argsort(first)
    rank = np.empty_like(by_appearance)
    rank[by_appearance] = np.arange(len(rank))
    return kernel.Chain(
        delay_s * time_scale,
        next_in_lane,
        first_spawned,
        next_spawned,
        rank[numbers],
        first[by_appearance],
        session_calls[by_appearance],
    )


def _is_range(values: Range, above: float = -math.inf) -> bool:
    low, high = values
    return above < low <= high < math.inf and low >= 0
