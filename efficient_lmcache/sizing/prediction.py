"""Predict what a host tier leaves to compute, before anything runs (paper, Sections 3.2 and 5.4, Appendix C).

Calls are taken in the order in which the pool looks them up. A call's host coverage H is what the simulated tier then
holds of it (`policy_tier`); its GPU-resident prefix G follows from stack distances, from the GPU's blocks and K_G
(Eq. 9). Computed prefill is what neither covers.

The order itself depends on the coverage: what is computed takes time. So the interleaving is refined: the pool is
simulated with the prefill that the previous order's coverage left, from both extremes, until the ends meet or the
rounds are used up. The last rounds' mean is the expectation, and all refined rounds span the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.coverage import covered_tokens_at
from efficient_lmcache.core.references import Ints
from efficient_lmcache.core.reuse import expired
from efficient_lmcache.sizing.policy_tier import Admission, serve, serve_admitted
from efficient_lmcache.sizing.pool import Pool, PoolModel, Schedule, computed_extremes
from efficient_lmcache.sizing.workload import Workload

GIB = 1 << 30
PLAIN_OFFLOAD = Admission("none")
_REFINEMENTS = 3


class Span(NamedTuple):
    """An expectation and what it may range over, in whole tokens or seconds."""

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
        stored_tokens: prompt tokens copied from GPU to host, per rank.
        declined_calls: calls whose new KV the admission keeps out.
        makespan_s: from the pool's start to its last answer; copies take no time in it.
    """

    host_gib: float
    capacity_chunks: int
    computed_prefill_tokens: Span
    restored_tokens: Span
    stored_tokens: Span
    declined_calls: Span
    makespan_s: Span


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
    predictor = Predictor(workload, model, gpu_kv_tokens, bytes_per_token, ttl_s)
    predictions = []
    for done, gib in enumerate(capacities, 1):
        predictions.append(predictor.predict(gib))
        if progress is not None:
            progress(done, len(capacities))
    return predictions


def capacity_chunks(host_gib: float, chunk_tokens: int, bytes_per_token: int) -> int:
    """K_H = floor(C_H / (b beta)); an infinite tier has more chunks than any stream."""
    if not host_gib >= 0:
        raise ValueError(f"host_gib is {host_gib}; it must be a number >= 0")
    return int(min(host_gib * GIB / (chunk_tokens * bytes_per_token), np.iinfo(np.int64).max // 2))


class _Totals(NamedTuple):
    """One interleaving's, under the names of `Prediction`."""

    computed_prefill_tokens: int
    restored_tokens: int
    stored_tokens: int
    declined_calls: int
    makespan_s: float


class Predictor:
    """Predictions of one workload: starts are shared, and so is the GPU's coverage of orders that come up again.

    Arguments as of `predict`.
    """

    def __init__(
        self,
        workload: Workload,
        model: PoolModel,
        gpu_kv_tokens: int,
        bytes_per_token: int,
        ttl_s: float | None = None,
    ) -> None:
        self._chunks = workload.chunks
        self._blocks = workload.blocks
        self._pool = Pool(workload.chunks, model)
        self._rates = model.extremes()
        self._bytes_per_token = bytes_per_token
        self._ttl_s = ttl_s
        self._gpu_blocks = gpu_kv_tokens // workload.blocks.chunk_tokens
        self._extremes = computed_extremes(workload.chunks)
        self._gpu_tokens: dict[bytes, Ints] = {}
        self._all_chunks = int(workload.chunks.keys.max(initial=-1)) + 1

    @property
    def all_gib(self) -> float:
        """A tier per rank that holds every chunk of the workload."""
        return self._all_chunks * self._chunks.chunk_tokens * self._bytes_per_token / GIB

    def predict(self, host_gib: float, admission: Admission = PLAIN_OFFLOAD) -> Prediction:
        """One capacity of the host tier, per rank, under one write admission; recompute is a tier of 0 GiB."""
        capacity = capacity_chunks(host_gib, self._chunks.chunk_tokens, self._bytes_per_token)
        refined: list[_Totals] = []
        last: list[_Totals] = []
        for rates in self._rates:
            for computed in self._extremes:
                _, per_call = self._serve(self._pool.simulate(rates, computed), capacity, admission)
                for _ in range(_REFINEMENTS):
                    before = per_call
                    totals, per_call = self._serve(self._pool.simulate(rates, before), capacity, admission)
                    refined.append(totals)
                    if np.array_equal(per_call, before):
                        break
                last.append(totals)
        spans = {
            name: _span([getattr(totals, name) for totals in refined], [getattr(totals, name) for totals in last])
            for name in _Totals._fields
        }
        return Prediction(host_gib, capacity, **spans)

    def _serve(self, schedule: Schedule, capacity: int, admission: Admission) -> tuple[_Totals, Ints]:
        """What becomes of one interleaving, and every call's computed prefill in the stream's order."""
        chunks = self._chunks.reordered(schedule.order)
        if self._ttl_s is not None:
            chunks = expired(chunks, schedule.lookup_s, self._ttl_s)
        gpu_tokens = self._gpu_resident(schedule.order)
        if admission.name == PLAIN_OFFLOAD.name:
            served = serve(chunks, capacity)
        else:
            served = serve_admitted(chunks, schedule.lookup_s, capacity, admission, self._bytes_per_token)
        # The last token of a prompt is always computed: its logits are what the call is for.
        host_tokens = np.minimum(served.covered_tokens, chunks.prompt_tokens - 1)
        computed = chunks.prompt_tokens - np.maximum(host_tokens, gpu_tokens)
        per_call = np.empty_like(computed)
        per_call[schedule.order] = computed
        restored = int(np.maximum(host_tokens - gpu_tokens, 0).sum())
        totals = _Totals(
            int(computed.sum()), restored, served.stored_tokens, served.declined_calls, schedule.makespan_s
        )
        return totals, per_call

    def _gpu_resident(self, order: Ints) -> Ints:
        """G of every call of an order, in whole blocks."""
        key = order.tobytes()
        if key not in self._gpu_tokens:
            blocks = self._blocks.reordered(order)
            block = blocks.chunk_tokens
            covered = covered_tokens_at(blocks, self._gpu_blocks)
            self._gpu_tokens[key] = np.minimum(covered, (blocks.prompt_tokens - 1) // block * block)
        return self._gpu_tokens[key]


def _span(refined: list[float], last: list[float]) -> Span:
    return Span(round(sum(last) / len(last)), math.floor(min(refined)), math.ceil(max(refined)))
