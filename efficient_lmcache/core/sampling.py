"""Capacity curves from a spatial sample of the chunks (SHARDS; Waldspurger et al., 2015), and how far off they may be.

A sample of one chunk in s sees distances s times shorter, and every reference in it stands for s references. Where
keys are paths a chunk always has the same depth in its calls, so taking every s-th chunk of each call is a spatial
sample, and one that never reads the other keys. Other streams are sampled by a hash of the key.

By depth a call's coverage is rounded to the stride: with phase r it comes out at most r chunks too short, and at most
s - 1 - r too long. These errors cancel between calls unless all calls break at one depth; their largest sum is the
bound that is reported. Distances are rounded as well, but those of many calls at once, which adds little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from efficient_lmcache.core._compiled import enlarged
from efficient_lmcache.core._segment_kernels import every_nth
from efficient_lmcache.core.coverage import CapacityCurve, CoverageTotal, with_gpu_tokens
from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.core.stackdistance import Batches, PromotionOrder, StackDistances


@dataclass(frozen=True, slots=True, eq=False)
class SampledCurve:
    """Estimated tokens by tier capacity. Entry i of an array is for i * stride chunks; beyond the last nothing changes.

    Attributes:
        chunk_tokens, calls, prompt_tokens: as in CapacityCurve, and exact.
        stride: s, at the end of the stream; one chunk in s was sampled.
        covered_tokens, restored_tokens, computed_tokens: float64: as in CapacityCurve.
        max_error: how far covered_tokens may be off, as a share of prompt_tokens, if all calls are rounded the same
            way; sampled by key, the mean size of the rounding and two standard errors of the counted distances.
    """

    chunk_tokens: int
    calls: int
    prompt_tokens: int
    stride: int
    covered_tokens: Floats
    restored_tokens: Floats
    computed_tokens: Floats
    max_error: float

    def at(self, capacity_chunks: int) -> tuple[float, float, float]:
        """Covered, restored and computed tokens with a tier of this many chunks, between entries by interpolation."""
        if capacity_chunks < 0:
            raise ValueError(f"capacity_chunks is {capacity_chunks}; it must be at least 0")
        entry, entries = capacity_chunks / self.stride, np.arange(len(self.covered_tokens))
        covered, restored, computed = (
            float(np.interp(entry, entries, tokens))
            for tokens in (self.covered_tokens, self.restored_tokens, self.computed_tokens)
        )
        return covered, restored, computed


def fixed_rate_curve(
    references: Batches,
    stride: int,
    gpu_tokens: Ints | None = None,
    order: PromotionOrder = PromotionOrder.TAIL_FIRST,
    *,
    by_key: bool = False,
) -> SampledCurve:
    """The curve from one chunk in `stride`; `gpu_tokens` as for `capacity_curve`.

    Args:
        by_key: sample by a hash of the key instead of by depth: for streams whose keys are not paths.
    """
    if stride < 1:
        raise ValueError(f"stride is {stride}; it must be at least 1")
    return _curve(references, gpu_tokens, _Sample(order, by_key, stride, (stride - 1) // 2))


def fixed_size_curve(
    references: Batches,
    max_chunks: int,
    gpu_tokens: Ints | None = None,
    order: PromotionOrder = PromotionOrder.TAIL_FIRST,
    *,
    by_key: bool = False,
) -> SampledCurve:
    """The curve from a sample of at most `max_chunks` distinct chunks: the stride doubles when there are more.

    The sample may exceed `max_chunks` by as many again while it reads. Curve and recency take memory in proportion to
    it; tables by chunk number take 16 bytes per number.
    """
    if max_chunks < 1:
        raise ValueError(f"max_chunks is {max_chunks}; it must be at least 1")
    return _curve(references, gpu_tokens, _Sample(order, by_key, 1, 0, max_chunks))


class _Sample:
    """The references at one phase of a stride, their recency, and the curve they give."""

    def __init__(
        self,
        order: PromotionOrder,
        by_key: bool,
        stride: int,
        phase: int,
        max_chunks: int | None = None,
    ) -> None:
        self.stride = stride
        self._phase = phase
        self._order = order
        self._by_key = by_key
        self._max_chunks = max_chunks
        # Taking the upper and the lower half in turn keeps the phase at a third or two thirds of the stride.
        self._upper_next = True
        self._stack = StackDistances(order)
        self._total = CoverageTotal(order)
        self._depth: Ints = np.zeros(0, np.int64)
        self._parts: list[tuple[int, int, CapacityCurve]] = []
        self.rounding_chunks = 0

    def observe(self, batch: References, gpu_tokens: Ints) -> None:
        begin = 0
        while begin < len(batch):
            end = len(batch)
            if self._max_chunks is not None:
                most = batch.offsets[begin] + self._max_chunks * self.stride
                end = max(begin + 1, int(np.searchsorted(batch.offsets, most, "right")) - 1)
            sampled, sampled_gpu_tokens = self._sampled(batch.between(begin, end), gpu_tokens[begin:end])
            self._total.add(sampled, self._stack.observe(sampled), sampled_gpu_tokens)
            while self._max_chunks is not None and len(self._stack.chunks) > self._max_chunks:
                self._double_stride()
            begin = end

    @property
    def counting_error(self) -> float:
        """Twice the relative standard error of a distance that spans the whole sample."""
        return 2 / np.sqrt(max(1, len(self._stack.chunks))) if self._by_key and self.stride > 1 else 0.0

    def finish(self) -> int:
        """After the last call: the capacity above which nothing changes."""
        self._end_part()
        return max((shift + stride * len(curve.covered_tokens) for stride, shift, curve in self._parts), default=0)

    def on_grid(self, capacities: Floats) -> tuple[Floats, Floats]:
        """Covered and restored tokens at these capacities."""
        covered, restored = np.zeros(len(capacities)), np.zeros(len(capacities))
        for stride, shift, curve in self._parts:
            entries = np.arange(len(curve.covered_tokens))
            covered += np.interp((capacities - shift) / stride, entries, curve.covered_tokens)
            restored += np.interp((capacities - shift) / stride, entries, curve.restored_tokens)
        return covered, restored

    def _sampled(self, batch: References, gpu_tokens: Ints) -> tuple[References, Ints]:
        """The references of the sample, as chunks `stride` times as large, and the G_j that weighs them rightly."""
        stride, phase = self.stride, self._phase
        if self._by_key:
            places = np.flatnonzero(_hashes(batch.keys) % stride == phase)

            def below(chunks: Ints) -> Ints:
                begins = batch.offsets[:-1]
                return np.searchsorted(places, begins + chunks) - np.searchsorted(places, begins)
        else:

            def below(chunks: Ints) -> Ints:
                return np.maximum(chunks - phase + stride - 1, 0) // stride

        offsets = np.append(0, np.cumsum(below(np.diff(batch.offsets))))
        keys = batch.keys[places] if self._by_key else every_nth(batch.keys, batch.offsets, stride, phase, offsets)
        if self._max_chunks is not None and not self._by_key:
            self._depth = enlarged(self._depth, int(keys.max(initial=-1)) + 1)
            self._depth[keys] = phase + stride * (np.arange(len(keys)) - np.repeat(offsets[:-1], np.diff(offsets)))
        sampled = replace(
            batch,
            chunk_tokens=batch.chunk_tokens * stride,
            keys=keys,
            offsets=offsets,
            lookup_chunks=below(batch.lookup_chunks),
        )
        if not gpu_tokens.any():
            return sampled, gpu_tokens
        resident, partial = gpu_tokens // batch.chunk_tokens, gpu_tokens % batch.chunk_tokens
        whole = below(resident)
        return sampled, stride * (whole * batch.chunk_tokens + partial * (below(resident + 1) - whole))

    def _double_stride(self) -> None:
        self._end_part()
        self._phase += self.stride * self._upper_next
        self.stride *= 2
        self._upper_next = not self._upper_next
        chunks = self._stack.chunks
        place = _hashes(chunks) if self._by_key else self._depth[chunks]
        self._stack.keep(chunks[place % self.stride == self._phase])

    def _end_part(self) -> None:
        if self._total.calls == 0:
            return
        rounding = self.stride - 1 if self._by_key else max(self._phase, self.stride - 1 - self._phase)
        self.rounding_chunks += rounding * self._total.calls
        # Promoted head first, a call's head is its least recent chunk; the sample begins some chunks behind it.
        behind = self.stride - 1 if self._by_key else self._phase
        shift = behind if self._order is PromotionOrder.HEAD_FIRST else 0
        self._parts.append((self.stride, shift, self._total.curve()))
        self._total = CoverageTotal(self._order)


def _curve(references: Batches, gpu_tokens: Ints | None, sample: _Sample) -> SampledCurve:
    calls = prompt_tokens = resident_tokens = chunk_tokens = 0
    for batch, resident in with_gpu_tokens(references, gpu_tokens):
        chunk_tokens = batch.chunk_tokens
        calls += len(batch)
        prompt_tokens += int(batch.prompt_tokens.sum())
        resident_tokens += int(resident.sum())
        sample.observe(batch, resident)
    if chunk_tokens == 0:
        raise ValueError("a capacity curve needs at least one batch of references")
    reach = sample.finish()
    covered, restored = sample.on_grid(np.arange(0, reach + sample.stride, sample.stride, dtype=np.float64))
    return SampledCurve(
        chunk_tokens=chunk_tokens,
        calls=calls,
        prompt_tokens=prompt_tokens,
        stride=sample.stride,
        covered_tokens=covered,
        restored_tokens=restored,
        computed_tokens=prompt_tokens - resident_tokens - restored,
        max_error=sample.rounding_chunks * chunk_tokens / max(1, prompt_tokens) + sample.counting_error,
    )


def _hashes(keys: Ints) -> Ints:
    """splitmix64's finalizer (Steele et al., 2014): numbers in sequence become numbers without order, 0 and up."""
    bits = keys.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
