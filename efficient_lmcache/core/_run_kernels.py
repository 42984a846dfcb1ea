"""Recency by runs: references that follow one another in this call as they did in an earlier one are found as one.

A position is a place in the sequence of all promotions, so the later position is the more recent; one place between
calls stays empty, so that no run crosses from one call into the next. A chunk is live at the position of its last
promotion. Every call holds its live positions as intervals, newest first; a Fenwick tree over calls holds how many.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from efficient_lmcache.core._compiled import compiled, enlarged
from efficient_lmcache.core.references import Ints

NEVER = -1
INFINITE = np.iinfo(np.int64).max
_NO_RUN = -2
_END = -1

# Entries of RunState.counters.
POSITION, CALLS, FREE, FREE_COUNT = range(4)


class RunState(NamedTuple):
    """Recency of all chunks: the one of chunk k is last[k]; calls are numbered from the oldest with live chunks.

    Attributes:
        last: [chunks] the position of each chunk's last promotion; NEVER.
        first: [calls] the position of each call's first promotion.
        live: [calls] chunks whose last promotion is in this call.
        tree: [calls + 1] sums of `live` from a call to the most recent one.
        newest: [calls] its most recent interval of live positions.
        low, high, older: [intervals] positions [low, high), and the next older interval of the same call or _END.
        counters: next position; calls in use; first unused interval; unused intervals.
    """

    last: Ints
    first: Ints
    live: Ints
    tree: Ints
    newest: Ints
    low: Ints
    high: Ints
    older: Ints
    counters: Ints


class SegmentBuffer(NamedTuple):
    """What kernels note about each segment; all arrays [segments].

    Attributes:
        start: its first reference, counted in the order of promotion from the call's first.
        length: references.
        source: the position of its first chunk's last promotion; NEVER.
        call: the call that the position belongs to.
        distance: that of its first reference.
    """

    start: Ints
    length: Ints
    source: Ints
    call: Ints
    distance: Ints


@compiled
def observe_runs(
    state: RunState,
    keys: Ints,
    offsets: Ints,
    call: int,
    tail_first: bool,
    at_promotion: bool,
    segments: SegmentBuffer,
    segment_offsets: Ints,
) -> int:
    """Find and price the segments of calls, from `call` on, and promote their chunks.

    Returns the first call for which some array is too small, or the number of calls.
    """
    while call < len(offsets) - 1:
        begin, length = offsets[call], offsets[call + 1] - offsets[call]
        count = segment_offsets[call]
        if not _has_room(state, keys[begin : begin + length], at_promotion, len(segments.start) - count):
            return call
        step = -1 if tail_first else 1
        head = begin + length - 1 if tail_first else begin
        done = 0
        while done < length:
            piece, first = count, done
            done, count = _scan(state, keys, head, step, done, length, at_promotion, segments, count)
            if at_promotion:
                _hold(state, done - first)
                for segment in range(piece, count):
                    _price(state, segments, piece, segment)
                    # The piece is held already, and what it promotes from this segment on is not more recent yet.
                    if segments.distance[segment] != INFINITE:
                        segments.distance[segment] -= done - segments.start[segment]
                    _take(state, segments, segment)
            else:
                for segment in range(piece, count):
                    _price(state, segments, piece, segment)
                _hold(state, done - first)
                for segment in range(piece, count):
                    _take(state, segments, segment)
        call += 1
        segment_offsets[call] = count
    return call


@compiled
def _has_room(state: RunState, keys: Ints, at_promotion: bool, free_segments: int) -> bool:
    lowest, highest = 0, -1
    for key in keys:
        lowest, highest = min(lowest, key), max(highest, key)
    # A chunk named twice ends a promotion's piece of the call, and every piece is held as a call.
    pieces = len(keys) if at_promotion else 1
    return bool(
        lowest == 0
        and highest < len(state.last)
        and len(keys) <= free_segments
        and state.counters[CALLS] + pieces <= len(state.first)
        and 2 * len(keys) <= state.counters[FREE_COUNT]
    )


@compiled
def _scan(
    state: RunState,
    keys: Ints,
    head: int,
    step: int,
    begin: int,
    end: int,
    stop_at_repeat: bool,
    segments: SegmentBuffer,
    count: int,
) -> tuple[int, int]:
    """Write the positions of references [begin, end), in the order of promotion, and note where their runs start.

    Returns the reference it stopped at and the number of segments.
    """
    last, base = state.last, state.counters[POSITION]
    expected = _NO_RUN
    stop = end
    opened = count
    for reference in range(begin, end):
        key = keys[head + step * reference]
        position = last[key]
        if position != expected:
            repeat = position >= base
            if repeat and stop_at_repeat:
                stop = reference
                break
            segments.start[count] = reference
            segments.source[count] = position
            count += 1
            expected = _NO_RUN if repeat else position
        last[key] = base + reference - begin
        expected += expected >= 0
    for segment in range(opened, count):
        following = segments.start[segment + 1] if segment + 1 < count else stop
        segments.length[segment] = following - segments.start[segment]
    return stop, count


@compiled
def _price(state: RunState, segments: SegmentBuffer, piece: int, segment: int) -> None:
    """Find the call that has a segment, and the distance of the segment's first reference."""
    source, length = segments.source[segment], segments.length[segment]
    if source == NEVER:
        segments.distance[segment] = INFINITE
        return
    if source >= state.counters[POSITION]:
        segments.call[segment] = state.counters[CALLS]
        segments.distance[segment] = _distance_in_call(segments, piece, segment, source - state.counters[POSITION])
        return
    call = _call_at(state, source)
    segments.call[segment] = call
    newer = _live_from(state.tree, call + 1)
    interval = state.newest[call]
    while interval != _END and state.high[interval] > source + length:
        newer += state.high[interval] - max(state.low[interval], source + length)
        interval = state.older[interval]
    segments.distance[segment] = newer + length - 1


@compiled
def _distance_in_call(segments: SegmentBuffer, begin: int, end: int, reference: int) -> int:
    """The distance of an earlier reference of the same call: a chunk named again is looked up in the same state."""
    while begin + 1 < end:
        middle = (begin + end) // 2
        if segments.start[middle] <= reference:
            begin = middle
        else:
            end = middle
    if segments.distance[begin] == INFINITE:
        return INFINITE
    return int(segments.distance[begin] - (reference - segments.start[begin]))


@compiled
def _call_at(state: RunState, position: int) -> int:
    low, high = 0, state.counters[CALLS]
    while low + 1 < high:
        middle = (low + high) // 2
        if state.first[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@compiled
def _hold(state: RunState, length: int) -> None:
    """Make the references just scanned the most recent call, all of them live."""
    call, base = state.counters[CALLS], state.counters[POSITION]
    state.first[call] = base
    state.live[call] = length
    state.newest[call] = _new_interval(state, base, base + length, _END)
    _add(state.tree, call, length)
    state.counters[CALLS] += 1
    state.counters[POSITION] += length + 1


@compiled
def _take(state: RunState, segments: SegmentBuffer, segment: int) -> None:
    """Remove a segment from the call that had it: one interval of that call contains it."""
    if segments.source[segment] == NEVER:
        return
    call, begin = segments.call[segment], segments.source[segment]
    end = begin + segments.length[segment]
    state.live[call] -= end - begin
    _add(state.tree, call, begin - end)
    newer, interval = _END, state.newest[call]
    while state.low[interval] > begin:
        newer, interval = interval, state.older[interval]
    if state.low[interval] < begin and end < state.high[interval]:
        state.older[interval] = _new_interval(state, state.low[interval], begin, state.older[interval])
        state.low[interval] = end
    elif state.low[interval] < begin:
        state.high[interval] = begin
    elif end < state.high[interval]:
        state.low[interval] = end
    else:
        if newer == _END:
            state.newest[call] = state.older[interval]
        else:
            state.older[newer] = state.older[interval]
        state.older[interval] = state.counters[FREE]
        state.counters[FREE] = interval
        state.counters[FREE_COUNT] += 1


@compiled
def _new_interval(state: RunState, low: int, high: int, older: int) -> int:
    interval = state.counters[FREE]
    state.counters[FREE] = state.older[interval]
    state.counters[FREE_COUNT] -= 1
    state.low[interval], state.high[interval], state.older[interval] = low, high, older
    return int(interval)


@compiled
def _add(tree: Ints, call: int, chunks: int) -> None:
    node = call + 1
    while node > 0:
        tree[node] += chunks
        node -= node & -node


@compiled
def _live_from(tree: Ints, call: int) -> int:
    """Live chunks of this call and all later ones."""
    chunks, node = 0, call + 1
    while node < len(tree):
        chunks += tree[node]
        node += node & -node
    return chunks


def empty_state() -> RunState:
    empty = np.zeros(0, np.int64)
    return RunState(empty, empty, empty, np.zeros(1, np.int64), empty, empty, empty, empty, np.zeros(4, np.int64))


def with_room(state: RunState, keys: Ints, at_promotion: bool) -> RunState:
    """The state, in arrays large enough for a call with these keys."""
    state = state._replace(last=enlarged(state.last, int(keys.max(initial=-1)) + 1, NEVER))
    live_calls = _forget_dead_calls(state)
    # Half of the places stay free, so calls are numbered anew no more often than once per as many calls.
    places = 2 * live_calls + (len(keys) if at_promotion else 1)
    if places > len(state.first):
        state = state._replace(
            first=enlarged(state.first, places),
            live=enlarged(state.live, places),
            newest=enlarged(state.newest, places),
        )
        state = state._replace(tree=np.zeros(len(state.first) + 1, np.int64))
    _build_tree(state)
    missing = 2 * len(keys) - int(state.counters[FREE_COUNT])
    if missing > 0:
        intervals = len(state.low)
        low, high, older = (enlarged(array, intervals + missing) for array in (state.low, state.high, state.older))
        older[intervals:] = np.arange(intervals + 1, len(older) + 1)
        older[-1] = state.counters[FREE]
        state.counters[FREE] = intervals
        state.counters[FREE_COUNT] += len(older) - intervals
        state = state._replace(low=low, high=high, older=older)
    return state


@compiled
def _forget_dead_calls(state: RunState) -> int:
    """Number the calls with live chunks anew, from 0; their number."""
    kept = 0
    for call in range(state.counters[CALLS]):
        if state.live[call] > 0:
            state.first[kept] = state.first[call]
            state.live[kept] = state.live[call]
            state.newest[kept] = state.newest[call]
            kept += 1
    state.counters[CALLS] = kept
    return kept


@compiled
def _build_tree(state: RunState) -> None:
    state.tree[:] = 0
    for call in range(state.counters[CALLS]):
        _add(state.tree, call, state.live[call])
