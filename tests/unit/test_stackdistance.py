"""Stack distances against recency lists, LRU tiers, and one another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="needs the extra sizing")

from lru_streams import ORDERS, any_calls, compiles, lru_hits, paths, promoted, recency_before, split, stream

from efficient_lmcache.core.stackdistance import (
    INFINITE,
    PromotionOrder,
    StackDistances,
    lookup_distances,
    reference_distances,
)

orders = st.sampled_from(ORDERS)
cuts_of = st.lists(st.integers(0, 30), max_size=4)


def in_promotion_order(distances, calls, order):
    """Distances of references in the order in which they are promoted, as one list."""
    ends = np.cumsum([len(keys) for keys in calls])
    return [
        value
        for keys, end in zip(calls, ends, strict=True)
        for value in promoted(distances[end - len(keys) : end].tolist(), order)
    ]


@compiles
@given(any_calls, orders)
def test_a_lookup_distance_counts_the_chunks_more_recent_when_the_call_arrives(calls, order):
    expected = [
        recent.index(key) if key in recent else INFINITE
        for keys, recent in recency_before(calls, order)
        for key in keys
    ]
    assert lookup_distances(stream(calls), order).tolist() == expected


@compiles
@given(any_calls, orders)
def test_a_reference_distance_is_the_lookup_distance_of_a_stream_of_single_references(calls, order):
    single = [[key] for keys in calls for key in promoted(keys, order)]
    distances = reference_distances(stream(calls), order)
    assert in_promotion_order(distances, calls, order) == lookup_distances(stream(single), order).tolist()


@compiles
@given(any_calls, orders)
def test_runs_and_single_references_give_the_same_distances(calls, order):
    for distances in (lookup_distances, reference_distances):
        by_runs, by_reference = (distances(stream(calls), order, by_reference=flag) for flag in (False, True))
        assert by_runs.tolist() == by_reference.tolist()


@compiles
@given(any_calls, orders, cuts_of, st.booleans())
def test_batches_give_the_distances_of_the_whole_stream(calls, order, cuts, by_reference):
    whole = stream(calls)
    for distances in (lookup_distances, reference_distances):
        batches = distances(split(whole, cuts), order, by_reference=by_reference)
        assert batches.tolist() == distances(whole, order, by_reference=by_reference).tolist()


@compiles
@given(paths())
def test_in_paths_promoted_tail_first_both_distances_differ_by_the_references_nearer_the_tail(calls):
    lookup, reference = lookup_distances(stream(calls)), reference_distances(stream(calls))
    nearer_tail = np.concatenate([np.arange(len(keys))[::-1] for keys in calls])
    known = lookup != INFINITE
    assert (known == (reference != INFINITE)).all()
    assert (reference[known] == (lookup + nearer_tail)[known]).all()


@compiles
@given(any_calls, orders, st.integers(1, 30))
def test_an_lru_tier_hits_exactly_the_references_below_its_capacity(calls, order, capacity):
    distances = in_promotion_order(reference_distances(stream(calls), order), calls, order)
    assert lru_hits(calls, capacity, order) == [distance < capacity for distance in distances]


@compiles
@given(any_calls, orders, st.integers(1, 12), st.data())
def test_declining_only_chunks_that_return_beyond_the_tier_never_loses_a_hit(calls, order, capacity, data):
    """Proposition 1 (Section 4): D at the next reference to the chunk is at least the capacity, or there is none."""
    keys = [key for call in calls for key in promoted(call, order)]
    distances = in_promotion_order(reference_distances(stream(calls), order), calls, order)
    eligible = [
        reference
        for reference, key in enumerate(keys)
        if key not in keys[reference + 1 :] or distances[keys.index(key, reference + 1)] >= capacity
    ]
    declined = frozenset(data.draw(st.sets(st.sampled_from(eligible)))) if eligible else frozenset()
    full, restricted = lru_hits(calls, capacity, order), lru_hits(calls, capacity, order, declined)
    assert all(kept for hit, kept in zip(full, restricted, strict=True) if hit)


def test_an_agent_that_grows_by_a_chunk_costs_two_segments_a_call():
    calls = [list(range(length)) for length in range(10, 200)]
    segments = StackDistances().observe(stream(calls))
    assert np.diff(segments.offsets).tolist() == [1] + [2] * (len(calls) - 1)


def test_memory_follows_live_calls_and_not_the_stream():
    stack = StackDistances()
    stack.observe(stream([[0, 1, 2, 3], [0, 4, 5]] * 2000))
    assert len(stack._state.calls) + len(stack._state.intervals) < 100


def test_calls_without_references_are_kept():
    assert lookup_distances(stream([[], [0], [], [0]])).tolist() == [INFINITE, 0]
    assert lookup_distances(stream([])).tolist() == []


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize("wrong", [-1, -(2**62), 2**62])
def test_a_number_that_is_no_chunk_number_is_named(wrong, by_reference):
    with pytest.raises(ValueError, match=f"chunk number {wrong}"):
        lookup_distances(stream([[0, 1], [0, wrong]]), by_reference=by_reference)


def test_without_numba_the_error_names_the_extra(monkeypatch):
    import importlib
    import sys

    from efficient_lmcache.core import _compiled

    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match=r"pip install 'efficient-lmcache\[sizing\]'"):
        importlib.reload(_compiled)


def test_the_default_order_is_the_papers():
    calls = [[0, 1, 2], [0, 1, 2]]
    assert lookup_distances(stream(calls)).tolist()[3:] == [0, 1, 2]
    assert lookup_distances(stream(calls), PromotionOrder.HEAD_FIRST).tolist()[3:] == [2, 1, 0]
