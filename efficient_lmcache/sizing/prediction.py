"""Predict what a host tier leaves to compute, before anything runs (paper, Sections 3.2 and 5.4, Appendix C).

A call's host coverage H follows from the distances of its chunks in the order in which the pool looks calls up; its
GPU-resident prefix G likewise, from the GPU's blocks and K_G (Eq. 9). Computed prefill is what neither covers.

The order itself depends on the coverage: what is computed takes time. So the interleaving is refined: the pool is
simulated with the prefill that the previous order's coverage left, from both extremes, until the ends meet or the
rounds are used up. The refined rounds span the prediction; the last ones' mean is its expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.coverage import covered_tokens_at
from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.core.reuse import expired, salted
from efficient_lmcache.sizing.pool import PoolModel, Schedule, computed_extremes, simulate

GIB = 1 << 30
_REFINEMENTS = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """One recording at the two granularities of its caches; the same calls in the same order.

    Attributes:
        chunks: the host tier's chunks of b tokens, of prompts only (LMCache stores no chunk of an output).
        blocks: the GPU cache's blocks, outputs included (vLLM keeps what it generated).
    """

    chunks: References
    blocks: References

    def __post_init__(self) -> None:
        if not np.array_equal(self.chunks.prompt_tokens, self.blocks.prompt_tokens):
            raise ValueError("Workload.chunks and Workload.blocks are not the same calls")

    def salted(self) -> Workload:
        """The workload when every session's keys are salted, in both caches."""
        return Workload(salted(self.chunks), salted(self.blocks))


class Span(NamedTuple):
    """An expectation and what it may range over, in tokens."""

    expected: int
    low: int
    high: int


class Prediction(NamedTuple):
    """What a host tier of one size is expected to do for the whole workload.

    Attributes:
        host_gib: C_H per rank.
        capacity_chunks: K_H.
        computed_prefill_tokens: prompt tokens that the engine computes.
        restored_tokens: prompt tokens copied from host to GPU, per rank.
    """

    host_gib: float
    capacity_chunks: int
    computed_prefill_tokens: Span
    restored_tokens: Span


def predict(
    workload: Workload,
    model: PoolModel,
    *,
    gpu_kv_tokens: int,
    bytes_per_token: int,
    host_gib: Iterable[float],
    ttl_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Prediction]:
    """Computed prefill and restored tokens at each capacity of the host tier.

    Args:
        gpu_kv_tokens: K_G.
        bytes_per_token: beta per rank.
        host_gib: capacities C_H per rank, each >= 0; infinite is allowed.
        ttl_s: the host tier forgets what nobody referenced for so long.
        progress: called with (capacities done, capacities in all).
    """
    capacities = list(host_gib)
    predictor = _Predictor(workload, model, gpu_kv_tokens, ttl_s)
    predictions = []
    for done, gib in enumerate(capacities, 1):
        chunks = capacity_chunks(gib, workload.chunks.chunk_tokens, bytes_per_token)
        predictions.append(Prediction(gib, min(chunks, predictor.all_chunks), *predictor.at(chunks)))
        if progress is not None:
            progress(done, len(capacities))
    return predictions


def capacity_chunks(host_gib: float, chunk_tokens: int, bytes_per_token: int) -> int:
    """K_H = floor(C_H / (b beta)); an infinite tier has more chunks than any stream."""
    if not host_gib >= 0:
        raise ValueError(f"host_gib is {host_gib}; it must be a number >= 0")
    return int(min(host_gib * GIB / (chunk_tokens * bytes_per_token), np.iinfo(np.int64).max // 2))


class _Outcome(NamedTuple):
    """One interleaving's totals in tokens, and every call's computed prefill in the stream's order."""

    computed: int
    restored: int
    per_call: Ints


class _Predictor:
    """Predictions of one workload: starts are shared, and so is the GPU's coverage of orders that come up again."""

    def __init__(self, workload: Workload, model: PoolModel, gpu_kv_tokens: int, ttl_s: float | None) -> None:
        self._chunks = workload.chunks
        self._blocks = workload.blocks
        self._model = model
        self._ttl_s = ttl_s
        self._gpu_blocks = gpu_kv_tokens // workload.blocks.chunk_tokens
        self._extremes = computed_extremes(workload.chunks)
        self._gpu_tokens: dict[bytes, Ints] = {}
        self.all_chunks = int(workload.chunks.keys.max(initial=-1)) + 1

    def at(self, capacity: int) -> tuple[Span, Span]:
        """Computed prefill and restored tokens in a tier of so many chunks."""
        refined: list[_Outcome] = []
        last: list[_Outcome] = []
        capacity = min(capacity, self.all_chunks)
        for rates in self._model.extremes():
            for computed in self._extremes:
                outcome = self._serve(simulate(self._chunks, self._model, rates, computed), capacity)
                for _ in range(_REFINEMENTS):
                    schedule = simulate(self._chunks, self._model, rates, outcome.per_call)
                    outcome = self._serve(schedule, capacity)
                    refined.append(outcome)
                last.append(outcome)
        return (
            _span([outcome.computed for outcome in refined], [outcome.computed for outcome in last]),
            _span([outcome.restored for outcome in refined], [outcome.restored for outcome in last]),
        )

    def _serve(self, schedule: Schedule, capacity: int) -> _Outcome:
        chunks = self._chunks.reordered(schedule.order)
        if self._ttl_s is not None:
            chunks = expired(chunks, schedule.lookup_s, self._ttl_s)
        gpu_tokens = self._gpu_resident(schedule.order)
        # The last token of a prompt is always computed: its logits are what the call is for.
        host_tokens = np.minimum(covered_tokens_at(chunks, capacity), chunks.prompt_tokens - 1)
        computed = chunks.prompt_tokens - np.maximum(host_tokens, gpu_tokens)
        per_call = np.empty_like(computed)
        per_call[schedule.order] = computed
        return _Outcome(int(computed.sum()), int(np.maximum(host_tokens - gpu_tokens, 0).sum()), per_call)

    def _gpu_resident(self, order: Ints) -> Ints:
        """G of every call of an order, in whole blocks."""
        key = order.tobytes()
        if key not in self._gpu_tokens:
            blocks = self._blocks.reordered(order)
            block = blocks.chunk_tokens
            covered = covered_tokens_at(blocks, self._gpu_blocks)
            self._gpu_tokens[key] = np.minimum(covered, (blocks.prompt_tokens - 1) // block * block)
        return self._gpu_tokens[key]


def _span(refined: list[int], last: list[int]) -> Span:
    return Span(round(sum(last) / len(last)), min(refined), max(refined))
