"""What a tier of any capacity covers, restores and leaves to compute, from one pass over a reference stream.

A call's coverage in a tier of K chunks is the run of leading lookup chunks that the tier holds: those up to which the
largest lookup distance is below K. All capacities therefore follow from one histogram of running maxima.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from efficient_lmcache.core import _segment_kernels as kernels
from efficient_lmcache.core._compiled import enlarged
from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.core.stackdistance import Batches, PromotionOrder, Segments, batches_of, stack_distances


@dataclass(frozen=True, slots=True, eq=False)
class CapacityCurve:
    """Tokens by tier capacity. Entry K of an array is for K chunks; from the last entry on nothing changes.

    Attributes:
        chunk_tokens: b.
        calls: model calls.
        prompt_tokens: sum over calls of n_j.
        covered_tokens: int64: H(K), the sum over calls of the tokens found in the tier.
        restored_tokens: int64: sum of max(0, H_j(K) - G_j), the paper's Equation 9; G_j is what the GPU held.
        computed_tokens: int64: sum of n_j - max(H_j(K), G_j).
    """

    chunk_tokens: int
    calls: int
    prompt_tokens: int
    covered_tokens: Ints
    restored_tokens: Ints
    computed_tokens: Ints

    def at(self, capacity_chunks: int) -> tuple[int, int, int]:
        """Covered, restored and computed tokens with a tier of this many chunks."""
        if capacity_chunks < 0:
            raise ValueError(f"capacity_chunks is {capacity_chunks}; it must be at least 0")
        entry = min(capacity_chunks, len(self.covered_tokens) - 1)
        return int(self.covered_tokens[entry]), int(self.restored_tokens[entry]), int(self.computed_tokens[entry])


def capacity_curve(
    references: Batches,
    gpu_tokens: Ints | None = None,
    order: PromotionOrder = PromotionOrder.TAIL_FIRST,
    *,
    by_reference: bool = False,
) -> CapacityCurve:
    """The curve of a stream, given whole or in batches.

    Args:
        gpu_tokens: [calls]: G_j, the prompt tokens that the GPU still held when call j arrived, 0 to n_j; none
            without it.
        by_reference: use `StackDistancesByReference`.

    Raises:
        ValueError: no batch, `chunk_tokens` that differ between batches, or `gpu_tokens` that do not fit the calls.
    """
    stack = stack_distances(order, by_reference=by_reference)
    total = CoverageTotal(order)
    for batch, resident in with_gpu_tokens(references, gpu_tokens):
        total.add(batch, stack.observe(batch), resident)
    return total.curve()


def covered_tokens_at(
    references: Batches, capacity_chunks: int, order: PromotionOrder = PromotionOrder.TAIL_FIRST
) -> Ints:
    """int64 [calls]: the tokens that each call finds in a tier of this many chunks.

    Of a stream in blocks of the GPU's cache, and that cache's capacity, it is G_j.
    """
    stack = stack_distances(order)
    parts: list[Ints] = [np.zeros(0, np.int64)]
    for batch in batches_of(references):
        found = stack.observe(batch)
        chunks = kernels.covered_chunks(
            batch.offsets,
            batch.lookup_chunks,
            found.offsets,
            found.start,
            found.distance,
            order is PromotionOrder.TAIL_FIRST,
            capacity_chunks,
        )
        parts.append(chunks * batch.chunk_tokens)
    return np.concatenate(parts)


def with_gpu_tokens(references: Batches, gpu_tokens: Ints | None) -> Iterator[tuple[References, Ints]]:
    """Batches with the G_j of their calls, which are 0 without `gpu_tokens`."""
    calls = 0
    for batch in batches_of(references):
        if gpu_tokens is None:
            yield batch, np.zeros(len(batch), np.int64)
            continue
        tokens = np.asarray(gpu_tokens[calls : calls + len(batch)], np.int64)
        if len(tokens) < len(batch):
            raise ValueError(f"gpu_tokens has {len(gpu_tokens)} entries for more than {calls} calls")
        if np.any((tokens < 0) | (tokens > batch.prompt_tokens)):
            raise ValueError("gpu_tokens must lie between 0 and the call's prompt_tokens")
        calls += len(batch)
        yield batch, tokens
    if gpu_tokens is not None and len(gpu_tokens) != calls:
        raise ValueError(f"gpu_tokens has {len(gpu_tokens)} entries for {calls} calls")


class CoverageTotal:
    """The curve of the calls so far, as second differences by capacity."""

    def __init__(self, order: PromotionOrder) -> None:
        self.calls = 0
        self.prompt_tokens = 0
        self.gpu_tokens = 0
        self._order = order
        self._chunk_tokens = 0
        self._largest = -1
        self._covered: Ints = np.zeros(0, np.int64)
        self._restored: Ints = np.zeros(0, np.int64)

    def add(self, batch: References, found: Segments, gpu_tokens: Ints) -> None:
        if self._chunk_tokens not in (0, batch.chunk_tokens):
            raise ValueError(f"a batch has chunks of {batch.chunk_tokens} tokens, those before {self._chunk_tokens}")
        self._chunk_tokens = batch.chunk_tokens
        # A segment's end is noted one place behind its largest distance.
        places = found.largest + 2
        self._covered = enlarged(self._covered, places)
        self._restored = enlarged(self._restored, places)
        largest = kernels.count_coverage(
            batch.offsets,
            batch.lookup_chunks,
            found.offsets,
            found.start,
            found.distance,
            self._order is PromotionOrder.TAIL_FIRST,
            batch.chunk_tokens,
            gpu_tokens,
            self._covered,
            self._restored,
        )
        self._largest = max(self._largest, largest)
        self.calls += len(batch)
        self.prompt_tokens += int(batch.prompt_tokens.sum())
        self.gpu_tokens += int(gpu_tokens.sum())

    def curve(self) -> CapacityCurve:
        if self._chunk_tokens == 0:
            raise ValueError("a capacity curve needs at least one batch of references")
        covered, restored = (
            kernels.sum_twice(differences, self._largest + 2) for differences in (self._covered, self._restored)
        )
        computed = self.prompt_tokens - self.gpu_tokens - restored
        return CapacityCurve(self._chunk_tokens, self.calls, self.prompt_tokens, covered, restored, computed)
