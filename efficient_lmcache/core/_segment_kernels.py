"""What segments say about single references and about calls' coverage."""

from __future__ import annotations

import numpy as np

from efficient_lmcache.core._compiled import compiled
from efficient_lmcache.core.references import Ints

_INFINITE = np.iinfo(np.int64).max


@compiled
def spread_distances(
    call_offsets: Ints, offsets: Ints, start: Ints, distance: Ints, step: int, tail_first: bool
) -> Ints:
    """Each reference's distance, head to tail within a call."""
    distances = np.empty(call_offsets[-1], np.int64)
    for call in range(len(call_offsets) - 1):
        begin, length = call_offsets[call], call_offsets[call + 1] - call_offsets[call]
        for segment in range(offsets[call], offsets[call + 1]):
            end = start[segment + 1] if segment + 1 < offsets[call + 1] else length
            for reference in range(start[segment], end):
                place = begin + length - 1 - reference if tail_first else begin + reference
                value = distance[segment]
                distances[place] = value if value == _INFINITE else value + step * (reference - start[segment])
    return distances


@compiled
def every_nth(keys: Ints, call_offsets: Ints, stride: int, phase: int, sampled_offsets: Ints) -> Ints:
    """The keys at depth `phase`, `phase + stride`, ... of each call."""
    sampled = np.empty(sampled_offsets[-1], np.int64)
    for call in range(len(call_offsets) - 1):
        depth = call_offsets[call] + phase
        for place in range(sampled_offsets[call], sampled_offsets[call + 1]):
            sampled[place] = keys[depth]
            depth += stride
    return sampled


@compiled
def _head_to_tail(
    offsets: Ints, start: Ints, distance: Ints, tail_first: bool, call: int, number: int, length: int
) -> tuple[int, int, int]:
    """The call's `number`-th segment from the head: its first chunk, its length, and that chunk's lookup distance."""
    if not tail_first:
        segment = offsets[call] + number
        end = start[segment + 1] if segment + 1 < offsets[call + 1] else length
        return start[segment], end - start[segment], distance[segment]
    segment = offsets[call + 1] - 1 - number
    end = start[segment + 1] if segment + 1 < offsets[call + 1] else length
    nearest = distance[segment]
    if nearest != _INFINITE:
        nearest -= end - start[segment] - 1
    return length - end, end - start[segment], nearest


@compiled
def count_coverage(
    call_offsets: Ints,
    lookup_chunks: Ints,
    offsets: Ints,
    start: Ints,
    distance: Ints,
    tail_first: bool,
    chunk_tokens: int,
    gpu_tokens: Ints,
    covered: Ints,
    restored: Ints,
) -> int:
    """Add to second differences, by capacity, of the tokens that calls find, and of those the GPU did not hold.

    A chunk is found by capacities above the largest distance up to it from the head. Over a segment that maximum
    stays at its value before, and from where the segment's own distances exceed it, it grows by one per chunk.

    Returns the largest distance that a call needs, -1 for none.
    """
    largest = -1
    for call in range(len(call_offsets) - 1):
        length = call_offsets[call + 1] - call_offsets[call]
        resident, partial = gpu_tokens[call] // chunk_tokens, gpu_tokens[call] % chunk_tokens
        reach = -1
        for number in range(offsets[call + 1] - offsets[call]):
            chunk, chunks, nearest = _head_to_tail(offsets, start, distance, tail_first, call, number, length)
            end = min(chunk + chunks, lookup_chunks[call])
            if chunk >= end or nearest == _INFINITE:
                break
            if not tail_first:
                reach = max(reach, nearest)
            _spread(covered, reach, nearest, end - chunk, chunk_tokens, tail_first)
            after = max(chunk, resident + 1)
            if chunk <= resident < end:
                _spread(restored, reach, nearest + resident - chunk, 1, chunk_tokens - partial, tail_first)
            if after < end:
                _spread(restored, reach, nearest + after - chunk, end - after, chunk_tokens, tail_first)
            if tail_first:
                reach = max(reach, nearest + end - chunk - 1)
        largest = max(largest, reach)
    return largest


@compiled
def _spread(differences: Ints, reach: int, nearest: int, chunks: int, tokens: int, rising: bool) -> None:
    """Add `tokens` for every chunk at the larger of `reach` and its distance, which rises by one per chunk or not."""
    flat = min(max(reach - nearest + 1, 0), chunks) if rising else chunks
    if flat > 0:
        differences[reach] += flat * tokens
        differences[reach + 1] -= flat * tokens
    if flat < chunks:
        differences[nearest + flat] += tokens
        differences[nearest + chunks] -= tokens


@compiled
def sum_twice(differences: Ints, length: int) -> Ints:
    """[length]: at K, the total of the running sums of `differences` below K."""
    sums = np.empty(length, np.int64)
    value, total = 0, 0
    for capacity in range(len(sums)):
        sums[capacity] = total
        value += differences[capacity]
        total += value
    return sums


@compiled
def covered_chunks(
    call_offsets: Ints,
    lookup_chunks: Ints,
    offsets: Ints,
    start: Ints,
    distance: Ints,
    tail_first: bool,
    capacity_chunks: int,
) -> Ints:
    """Per call, the leading chunks that a tier of this capacity holds when it is looked up."""
    covered = np.zeros(len(lookup_chunks), np.int64)
    for call in range(len(lookup_chunks)):
        length = call_offsets[call + 1] - call_offsets[call]
        for number in range(offsets[call + 1] - offsets[call]):
            chunk, chunks, nearest = _head_to_tail(offsets, start, distance, tail_first, call, number, length)
            if chunk >= lookup_chunks[call] or nearest >= capacity_chunks:
                break
            held = min(chunks, capacity_chunks - nearest) if tail_first else chunks
            covered[call] = min(chunk + held, lookup_chunks[call])
            if held < chunks:
                break
    return covered
