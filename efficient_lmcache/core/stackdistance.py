"""Stack distances of a reference stream: how many distinct other chunks are more recent than the one referenced.

After a call, its references are the most recent ones. They are promoted in one of two orders, and a tier of K chunks
holds a chunk iff its distance is below K (Mattson et al., 1970). Two distances are of use:

    lookup distance     when the call's lookup happens, before it promotes anything: what the call finds
    reference distance  when the chunk itself is promoted, so that the call's own references before it count as well:
                        what a cache sees that is offered the references one by one

Agents' references come in runs: chunks that follow one another in a call as they did in the call that promoted them
last stay adjacent in recency, so their lookup distances fall by one in the order of promotion, and their reference
distances are equal. `StackDistances` finds such segments in one pass over the keys; all else costs per segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np

from efficient_lmcache.core import _fenwick_kernels as fenwick
from efficient_lmcache.core import _run_kernels as kernels
from efficient_lmcache.core._compiled import enlarged
from efficient_lmcache.core._run_state import RunState
from efficient_lmcache.core._segment_kernels import spread_distances
from efficient_lmcache.core.references import Ints, References

INFINITE = kernels.INFINITE
"""The distance of a chunk that was never promoted before."""

_LARGEST_CHUNK = 2**36


class PromotionOrder(Enum):
    """Which of a call's chunks is promoted last, and so the most recent one.

    TAIL_FIRST: the head; the order of the paper's reference model.
    HEAD_FIRST: the tail; the order in which LMCache inserts new chunks.
    """

    TAIL_FIRST = "tail_first"
    HEAD_FIRST = "head_first"


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Distances of a batch of calls by segments: a call's references in the order of promotion, cut into runs.

    Attributes:
        offsets: int64 [calls + 1]: where each call's segments begin.
        start: int64 [segments]: a segment's first reference, counted from the first one that its call promotes.
        distance: int64 [segments]: that reference's distance, INFINITE for a segment never promoted before.
        step: what each further reference of a segment adds to a finite distance: -1 at lookup, 0 at promotion.
    """

    offsets: Ints
    start: Ints
    distance: Ints
    step: int

    @property
    def largest(self) -> int:
        """The largest finite distance; -1 without one."""
        return int(self.distance[self.distance != INFINITE].max(initial=-1))


class StackDistances:
    """Exact distances of a stream that arrives in batches of whole calls.

    Memory: 8 bytes per chunk number, and some 50 per call that still has the last reference to a chunk.
    Time: a few nanoseconds per reference, and O(log calls) per segment plus the intervals into which later calls have
    cut the earlier one. In streams whose keys are paths (a chunk always follows the same chunk) that is one interval,
    and a call has O(log chunks) segments, amortized: they are the preferred-child changes of link-cut trees (Sleator
    and Tarjan, 1983). Any other stream is exact too, at a cost of up to its call's length per reference.
    """

    def __init__(self, order: PromotionOrder = PromotionOrder.TAIL_FIRST, *, at_promotion: bool = False) -> None:
        """Distances at lookup, or with `at_promotion` reference distances."""
        self.order = order
        self.at_promotion = at_promotion
        self._state = RunState()

    @property
    def chunks(self) -> Ints:
        """int64: the numbers of all chunks promoted so far."""
        return np.flatnonzero(self._state.last != kernels.NEVER)

    def observe(self, references: References) -> Segments:
        """Distances of the next calls of the stream, which are then promoted."""
        return self._observe(references.keys, references.offsets, self.order is PromotionOrder.TAIL_FIRST)

    def keep(self, chunks: Ints) -> None:
        """Forget all chunks but these, as if the others had never been referenced."""
        positions = self._state.last[chunks]
        by_recency = np.argsort(positions)
        calls = self._state.calls[: self._state.counters[kernels.USE], kernels.FIRST]
        offsets = np.append(np.searchsorted(positions[by_recency], calls), len(chunks))
        self._state = RunState()
        self._observe(chunks[by_recency], offsets, tail_first=False)

    def _observe(self, keys: Ints, offsets: Ints, tail_first: bool) -> Segments:
        state, calls, call = self._state, len(offsets) - 1, 0
        segment_offsets = np.zeros(calls + 1, np.int64)
        table: Ints = np.zeros((0, 5), np.int64)
        # New chunks have the highest numbers and stand at the tails, so this is often all the room that is needed.
        tails = keys[offsets[1:][np.diff(offsets) > 0] - 1]
        _check_chunk_numbers(tails)
        chunks = int(tails.max(initial=-1)) + 1
        while call < calls:
            call_keys = keys[offsets[call] : offsets[call + 1]]
            _check_chunk_numbers(call_keys)
            state.make_room(call_keys, chunks, self.at_promotion)
            table = enlarged(table, int(segment_offsets[call]) + len(call_keys))
            call = kernels.observe_runs(
                state.last,
                state.calls,
                state.intervals,
                state.counters,
                table,
                keys,
                offsets,
                call,
                tail_first,
                self.at_promotion,
                segment_offsets,
            )
        found = table[: segment_offsets[-1]]
        start, distance = found[:, kernels.START].copy(), found[:, kernels.DISTANCE].copy()
        return Segments(segment_offsets, start, distance, step=0 if self.at_promotion else -1)


class StackDistancesByReference:
    """The same from a tree over single references: O(log chunks) for each, whatever the stream.

    What `StackDistances` is checked against, and the faster one for long calls whose chunks were last promoted in an
    order unrelated to this call's. Every segment it reports is one reference.
    """

    def __init__(self, order: PromotionOrder = PromotionOrder.TAIL_FIRST, *, at_promotion: bool = False) -> None:
        """Distances at lookup, or with `at_promotion` reference distances."""
        self.order = order
        self.at_promotion = at_promotion
        self._state = fenwick.empty_state()

    def observe(self, references: References) -> Segments:
        """Distances of the next calls of the stream, which are then promoted."""
        calls, call = len(references), 0
        distance = np.empty(len(references.keys), np.int64)
        tail_first = self.order is PromotionOrder.TAIL_FIRST
        while call < calls:
            keys = references.call_keys(call)
            _check_chunk_numbers(keys)
            self._state = fenwick.with_room(self._state, keys)
            call = fenwick.observe_references(
                self._state, references.keys, references.offsets, call, tail_first, self.at_promotion, distance
            )
        start = np.arange(len(distance)) - np.repeat(references.offsets[:-1], np.diff(references.offsets))
        return Segments(references.offsets, start, distance, step=0 if self.at_promotion else -1)


Stack: TypeAlias = StackDistances | StackDistancesByReference
Batches: TypeAlias = References | Iterable[References]


def lookup_distances(
    references: Batches, order: PromotionOrder = PromotionOrder.TAIL_FIRST, *, by_reference: bool = False
) -> Ints:
    """int64 [references]: each reference's distance when its call's lookup happens; INFINITE for a new chunk."""
    return _distances(references, stack_distances(order, by_reference=by_reference))


def reference_distances(
    references: Batches, order: PromotionOrder = PromotionOrder.TAIL_FIRST, *, by_reference: bool = False
) -> Ints:
    """int64 [references]: each reference's distance when it is promoted itself (Mattson et al., 1970).

    An LRU cache of K chunks that is offered the references one by one, in the order of promotion, hits iff it is
    below K. In prefix-consistent streams promoted tail first it is the lookup distance plus the number of references
    nearer the tail.
    """
    return _distances(references, stack_distances(order, at_promotion=True, by_reference=by_reference))


def stack_distances(order: PromotionOrder, *, at_promotion: bool = False, by_reference: bool = False) -> Stack:
    """An empty stack, by runs or by reference."""
    kind = StackDistancesByReference if by_reference else StackDistances
    return kind(order, at_promotion=at_promotion)


def batches_of(references: Batches) -> Iterable[References]:
    """A whole stream is a stream of one batch."""
    return (references,) if isinstance(references, References) else references


def spread(references: References, segments: Segments, order: PromotionOrder) -> Ints:
    """int64 [references]: the distances of single references, head to tail within a call."""
    tail_first = order is PromotionOrder.TAIL_FIRST
    return spread_distances(
        references.offsets, segments.offsets, segments.start, segments.distance, segments.step, tail_first
    )


def _distances(references: Batches, stack: Stack) -> Ints:
    parts = [spread(batch, stack.observe(batch), stack.order) for batch in batches_of(references)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _check_chunk_numbers(keys: Ints) -> None:
    if len(keys) and (keys.min() < 0 or keys.max() >= _LARGEST_CHUNK):
        wrong = keys[(keys < 0) | (keys >= _LARGEST_CHUNK)][0]
        raise ValueError(f"References.keys has chunk number {wrong}; chunks are numbered from 0 in order of appearance")
