"""Recency by runs: references that follow one another in this call as they did in an earlier one are found as one.

A position is a place in the sequence of all promotions, so the later position is the more recent; one place between
calls stays empty, so that no run crosses from one call into the next. A chunk is live at the position of its last
promotion. Every call holds its live positions as intervals, newest first; a Fenwick tree over calls holds how many.

Arrays are int64, and tables have a row for each of their things:

    last       [chunks] the position of each chunk's last promotion, or NEVER
    calls      [calls] FIRST its first position; LIVE live positions; NEWEST its most recent interval; TREE the node of
               the Fenwick tree, whose sums run from a call to the most recent one; calls are numbered from the oldest
    intervals  [intervals] live positions LOW to HIGH - 1, and the next OLDER interval of the same call, or NO_INTERVAL
    counters   [4] the next POSITION; calls in USE; the first FREE interval; how many intervals are free (FREE_COUNT)
    segments   [segments] START its first reference, counted in the order of promotion from the call's first; LENGTH;
               DISTANCE of that reference; SOURCE the position it had, or NEVER; OWNER the call that had it
"""

from __future__ import annotations

import numpy as np

from efficient_lmcache.core._compiled import compiled
from efficient_lmcache.core.references import Ints

NEVER = 0
INFINITE = np.iinfo(np.int64).max
NO_INTERVAL = -1

FIRST, LIVE, NEWEST, TREE = range(4)
LOW, HIGH, OLDER = range(3)
POSITION, USE, FREE, FREE_COUNT = range(4)
START, LENGTH, DISTANCE, SOURCE, OWNER = range(5)


@compiled
def observe_runs(
    last: Ints,
    calls: Ints,
    intervals: Ints,
    counters: Ints,
    segments: Ints,
    keys: Ints,
    offsets: Ints,
    call: int,
    tail_first: bool,
    at_promotion: bool,
    segment_offsets: Ints,
) -> int:
    """Find the segments of calls, from `call` on, with their distances, and promote their chunks.

    Returns the first call for which some table is too small, or the number of calls.
    """
    while call < len(offsets) - 1:
        begin, length = offsets[call], offsets[call + 1] - offsets[call]
        count = segment_offsets[call]
        # A chunk named twice ends a promotion's piece of the call, and every piece is held as a call.
        pieces = length if at_promotion else 1
        if (
            not _known(keys[begin : begin + length], len(last))
            or count + length > len(segments)
            or counters[USE] + pieces > len(calls) - 1
            or counters[FREE_COUNT] < 2 * length
        ):
            return call
        head, step = (begin + length - 1, -1) if tail_first else (begin, 1)
        done = 0
        while done < length:
            piece, first = count, done
            done, count = _scan(last, segments, counters[POSITION], keys, head, step, done, length, at_promotion, count)
            if at_promotion:
                _hold(calls, intervals, counters, done - first)
                for segment in range(piece, count):
                    _price(calls, intervals, counters, segments, piece, segment)
                    # The piece is held already, but what it promotes from this segment on is not more recent yet.
                    if segments[segment, SOURCE] != NEVER:
                        segments[segment, DISTANCE] -= done - segments[segment, START]
                        _take(calls, intervals, counters, segments, segment)
            else:
                for segment in range(piece, count):
                    _price(calls, intervals, counters, segments, piece, segment)
                _hold(calls, intervals, counters, length)
                for segment in range(piece, count):
                    if segments[segment, SOURCE] != NEVER:
                        _take(calls, intervals, counters, segments, segment)
        call += 1
        segment_offsets[call] = count
    return call


@compiled
def _known(keys: Ints, chunks: int) -> bool:
    lowest, highest = 0, -1
    for key in keys:
        lowest, highest = min(lowest, key), max(highest, key)
    return lowest == 0 and highest < chunks


@compiled
def _scan(
    last: Ints,
    segments: Ints,
    base: int,
    keys: Ints,
    head: int,
    step: int,
    begin: int,
    end: int,
    stop_at_repeat: bool,
    count: int,
) -> tuple[int, int]:
    """Write the positions of references [begin, end), in the order of promotion, and note the runs they come in.

    Returns the reference it stopped at and the number of segments.
    """
    # Unsigned numbers need no test for an index from the end, which would cost as much as all else here.
    reference, position = begin, base
    place, stride = np.uint64(head + step * begin), np.uint64(step)
    while reference < end:
        expected = last[np.uint64(keys[place])]
        repeat = expected >= base
        if repeat and stop_at_repeat:
            break
        start, run_end = reference, reference + 1 if repeat else end
        growth = np.int64(expected > NEVER)
        segments[count, SOURCE] = expected
        while reference < run_end:
            key = np.uint64(keys[place])
            if last[key] != expected:
                break
            last[key] = position
            expected += growth
            position += 1
            reference += 1
            place += stride
        segments[count, START] = start
        segments[count, LENGTH] = reference - start
        count += 1
    return reference, count


@compiled
def _price(calls: Ints, intervals: Ints, counters: Ints, segments: Ints, piece: int, segment: int) -> None:
    """Find the call that has a segment, and the distance of the segment's first reference."""
    source, length = segments[segment, SOURCE], segments[segment, LENGTH]
    if source == NEVER:
        segments[segment, DISTANCE] = INFINITE
        return
    if source >= counters[POSITION]:
        segments[segment, OWNER] = counters[USE]
        segments[segment, DISTANCE] = _distance_in_call(segments, piece, segment, source - counters[POSITION])
        return
    owner = _call_at(calls, counters[USE], source)
    segments[segment, OWNER] = owner
    newer = _live_from(calls, owner + 1)
    interval = calls[owner, NEWEST]
    while interval != NO_INTERVAL and intervals[interval, HIGH] > source + length:
        newer += intervals[interval, HIGH] - max(intervals[interval, LOW], source + length)
        interval = intervals[interval, OLDER]
    segments[segment, DISTANCE] = newer + length - 1


@compiled
def _distance_in_call(segments: Ints, begin: int, end: int, reference: int) -> int:
    """The distance of an earlier reference of the same call: a chunk named again is looked up in the same state."""
    while begin + 1 < end:
        middle = (begin + end) // 2
        if segments[middle, START] <= reference:
            begin = middle
        else:
            end = middle
    if segments[begin, DISTANCE] == INFINITE:
        return INFINITE
    return int(segments[begin, DISTANCE] - (reference - segments[begin, START]))


@compiled
def _call_at(calls: Ints, used: int, position: int) -> int:
    low, high = 0, used
    while low + 1 < high:
        middle = (low + high) // 2
        if calls[middle, FIRST] <= position:
            low = middle
        else:
            high = middle
    return low


@compiled
def _hold(calls: Ints, intervals: Ints, counters: Ints, length: int) -> None:
    """Make the references just scanned the most recent call, all of them live."""
    call, base = counters[USE], counters[POSITION]
    calls[call, FIRST] = base
    calls[call, LIVE] = length
    calls[call, NEWEST] = _new_interval(intervals, counters, base, base + length, NO_INTERVAL)
    _add(calls, call, length)
    counters[USE] += 1
    counters[POSITION] += length + 1


@compiled
def _take(calls: Ints, intervals: Ints, counters: Ints, segments: Ints, segment: int) -> None:
    """Remove a segment from the call that had it: one interval of that call contains it."""
    call, begin = segments[segment, OWNER], segments[segment, SOURCE]
    end = begin + segments[segment, LENGTH]
    calls[call, LIVE] -= end - begin
    _add(calls, call, begin - end)
    newer, interval = NO_INTERVAL, calls[call, NEWEST]
    while intervals[interval, LOW] > begin:
        newer, interval = interval, intervals[interval, OLDER]
    low, high, older = intervals[interval, LOW], intervals[interval, HIGH], intervals[interval, OLDER]
    if low < begin and end < high:
        intervals[interval, OLDER] = _new_interval(intervals, counters, low, begin, older)
        intervals[interval, LOW] = end
    elif low < begin:
        intervals[interval, HIGH] = begin
    elif end < high:
        intervals[interval, LOW] = end
    else:
        if newer == NO_INTERVAL:
            calls[call, NEWEST] = older
        else:
            intervals[newer, OLDER] = older
        intervals[interval, OLDER] = counters[FREE]
        counters[FREE] = interval
        counters[FREE_COUNT] += 1


@compiled
def _new_interval(intervals: Ints, counters: Ints, low: int, high: int, older: int) -> int:
    interval = counters[FREE]
    counters[FREE] = intervals[interval, OLDER]
    counters[FREE_COUNT] -= 1
    intervals[interval, LOW] = low
    intervals[interval, HIGH] = high
    intervals[interval, OLDER] = older
    return int(interval)


@compiled
def _add(calls: Ints, call: int, chunks: int) -> None:
    node = call + 1
    while node > 0:
        calls[node, TREE] += chunks
        node -= node & -node


@compiled
def _live_from(calls: Ints, call: int) -> int:
    """Live chunks of this call and all later ones."""
    chunks, node = 0, call + 1
    while node < len(calls):
        chunks += calls[node, TREE]
        node += node & -node
    return chunks


@compiled
def forget_dead_calls(calls: Ints, counters: Ints) -> None:
    """Number the calls with live chunks anew, from 0."""
    kept = 0
    for call in range(counters[USE]):
        if calls[call, LIVE] > 0:
            calls[kept, FIRST] = calls[call, FIRST]
            calls[kept, LIVE] = calls[call, LIVE]
            calls[kept, NEWEST] = calls[call, NEWEST]
            kept += 1
    counters[USE] = kept


@compiled
def build_tree(calls: Ints, counters: Ints) -> None:
    calls[:, TREE] = 0
    for call in range(counters[USE]):
        _add(calls, call, calls[call, LIVE])
