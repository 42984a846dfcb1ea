"""The simulated host tier: an LRU, LMCache's order of promotion, and the connector's own policies in front of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="needs the extra sizing")

from lru_streams import ORDERS, Calls, any_calls, compiles, paths, promoted, stream

from efficient_lmcache.core.coverage import covered_tokens_at
from efficient_lmcache.core.references import Floats, References
from efficient_lmcache.core.stackdistance import INFINITE, reference_distances
from efficient_lmcache.sizing.policy_tier import Admission, HostTier, serve, serve_admitted

CHUNK = 4
BETA = 2
NO_ADMISSION = Admission("none")
CONDITIONED = Admission("conditioned", write_threshold_chunks=2)
capacities = st.integers(1, 30)
orders = st.sampled_from(ORDERS)


def pool_stream(calls: Calls, sessions: int) -> References:
    """A stream whose sessions take turns."""
    return replace(stream(calls), session=np.arange(len(calls), dtype=np.int64) % sessions)


def seconds(references: References, between_s: float = 1.0) -> Floats:
    return np.arange(len(references)) * between_s


def lmcache_matches(calls: Calls, capacity: int) -> list[int]:
    """LMCache 0.5.6's CPU tier: touch a lookup's hits from the last one back, allocate all of a store, put it."""
    tier: OrderedDict[int, None] = OrderedDict()
    matches = []
    for keys in calls:
        found = next((place for place, key in enumerate(keys) if key not in tier), len(keys))
        for key in reversed(keys[:found]):
            tier.move_to_end(key)
        for key in keys[found:]:
            if key not in tier:
                if len(tier) == capacity:
                    tier.popitem(last=False)
                tier[key] = None
        matches.append(found)
    return matches


@compiles
@given(any_calls, capacities, orders)
def test_whole_calls_used_in_either_order_are_covered_as_stack_distances_say(calls, capacity, order):
    references = stream(calls)
    tier = HostTier(capacity, 1 + int(references.keys.max(initial=-1)))
    covered = []
    for call in range(len(references)):
        covered.append(tier.match(references.call_keys(call)) * CHUNK)
        tier.use(np.array(promoted(calls[call], order), np.int64))
    assert covered == covered_tokens_at(references, capacity, order).tolist()


@compiles
@given(any_calls, capacities)
def test_plain_offload_is_lmcaches_order_of_promotion(calls, capacity):
    served = serve(stream(calls), capacity)
    matches = lmcache_matches(calls, capacity)
    assert served.covered_tokens.tolist() == [match * CHUNK for match in matches]
    assert served.stored_tokens == sum(len(keys) - match for keys, match in zip(calls, matches, strict=True)) * CHUNK


@compiles
@given(any_calls)
def test_a_tier_for_all_chunks_covers_what_stack_distances_say(calls):
    references = stream(calls)
    assert serve(references, 10_000).covered_tokens.tolist() == covered_tokens_at(references, 10_000).tolist()


@compiles
@given(any_calls, st.integers(0, 30), st.integers(1, 4))
def test_no_admission_is_plain_offload(calls, capacity, sessions):
    references = pool_stream(calls, sessions)
    plain, admitted = (
        serve(references, capacity),
        serve_admitted(references, seconds(references), capacity, NO_ADMISSION, BETA),
    )
    assert admitted.covered_tokens.tolist() == plain.covered_tokens.tolist()
    assert admitted[1:] == plain[1:] == (plain.stored_tokens, 0)


@compiles
@given(any_calls, st.integers(1, 4))
def test_conditioned_admission_before_an_ample_tier_is_plain_offload(calls, sessions):
    references = pool_stream(calls, sessions)
    served = serve_admitted(references, seconds(references), 10_000, CONDITIONED, BETA)
    assert served.declined_calls == 0
    assert served.covered_tokens.tolist() == serve(references, 10_000).covered_tokens.tolist()


@compiles
@given(any_calls, capacities)
def test_a_filter_that_nothing_exceeds_declines_nothing(calls, capacity):
    references = pool_stream(calls, 3)
    lenient = Admission("fixed", write_threshold_chunks=100)
    served = serve_admitted(references, seconds(references), capacity, lenient, BETA)
    assert served.covered_tokens.tolist() == serve(references, capacity).covered_tokens.tolist()


@compiles
@given(paths(), capacities)
def test_a_declined_call_promotes_what_it_found_and_stores_nothing(calls, capacity):
    references = pool_stream(calls, 3)
    threshold = 2
    tier: OrderedDict[int, None] = OrderedDict()
    declined, covered = 0, []
    for keys in calls:
        found = next((place for place, key in enumerate(keys) if key not in tier), len(keys))
        covered.append(found * CHUNK)
        for key in reversed(keys[:found]):
            tier.move_to_end(key)
        if len(keys) - found > threshold:
            declined += 1
            continue
        for key in keys[found:]:
            if key not in tier:
                if len(tier) == capacity:
                    tier.popitem(last=False)
                tier[key] = None
    served = serve_admitted(references, seconds(references), capacity, Admission("fixed", threshold), BETA)
    assert (served.covered_tokens.tolist(), served.declined_calls) == (covered, declined)


@compiles
@given(any_calls, capacities, orders, st.data())
def test_declining_safe_misses_loses_no_hit(calls, capacity, order, data):
    """Proposition 1: a safe miss inserts what plain LRU evicts again before its next reference, if there is one."""
    references = stream(calls)
    distances = reference_distances(references, order).tolist()
    by_call = [distances[low:high] for low, high in pairwise(references.offsets.tolist())]
    distance = [d for call in by_call for d in promoted(call, order)]
    keys = [key for call in calls for key in promoted(call, order)]
    following: dict[int, int] = {}
    safe = set()
    for place in reversed(range(len(keys))):
        next_distance = following.get(keys[place], INFINITE)
        if distance[place] >= capacity and next_distance >= capacity:
            safe.add(place)
        following[keys[place]] = distance[place]
    declined = data.draw(st.sets(st.sampled_from(sorted(safe)))) if safe else set()
    tier = HostTier(capacity, 1 + max(keys, default=0))
    for place, key in enumerate(np.array(keys, np.int64)[:, None]):
        hit = tier.match(key) == 1
        assert hit or distance[place] >= capacity
        if hit or place not in declined:
            tier.use(key)


def rounds(tasks: int, turns: int, first_chunks: int) -> Calls:
    """Tasks take turns; every call extends its task's context by one chunk."""
    return [
        [1000 * task + chunk for chunk in range(first_chunks + turn)] for turn in range(turns) for task in range(tasks)
    ]


def numbered(calls: Calls) -> Calls:
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(key, len(numbers)) for key in keys] for keys in calls]


def test_a_thrashing_pool_is_served_better_when_refills_are_declined():
    calls = numbered(rounds(tasks=8, turns=12, first_chunks=10))
    references = pool_stream(calls, 8)
    plain = serve(references, 40)
    admitted = serve_admitted(references, seconds(references), 40, CONDITIONED, BETA)
    assert plain.covered_tokens.sum() == 0
    assert admitted.covered_tokens.sum() > 0.2 * references.prompt_tokens.sum()
    assert 0 < admitted.declined_calls < len(references)
    assert admitted.stored_tokens < plain.stored_tokens / 2


def test_conditioned_admission_waits_until_the_tier_evicts():
    """Both factors of Eq. 10 as the simulated reports tell them: the working set is above, but nothing was evicted."""
    calls = numbered(rounds(tasks=4, turns=1, first_chunks=10))
    references = pool_stream(calls, 4)
    times_s = np.array([0.0, 0.1, 0.2, 2.0])
    # Three contexts of ten chunks overfill the tier within the first second; only the fourth call is told.
    assert serve_admitted(references, times_s, 15, CONDITIONED, BETA).declined_calls == 1
    # Nobody is told before the second that has the evictions is over.
    assert serve_admitted(references, times_s / 10, 15, CONDITIONED, BETA).declined_calls == 0


def test_evictions_and_tasks_are_forgotten_after_a_minute():
    calls = numbered(rounds(tasks=4, turns=1, first_chunks=10))
    references = pool_stream(calls, 4)
    assert serve_admitted(references, np.array([0.0, 0.1, 0.2, 70.0]), 15, CONDITIONED, BETA).declined_calls == 0


def test_without_a_tier_nothing_is_found_stored_or_declined():
    references = stream([[0, 1], [0, 1, 2]])
    for served in (serve(references, 0), serve_admitted(references, seconds(references), 0, CONDITIONED, BETA)):
        assert (served.covered_tokens.tolist(), served.stored_tokens, served.declined_calls) == ([0, 0], 0, 0)


def test_an_unknown_admission_names_those_there_are():
    with pytest.raises(ValueError, match=r"Admission.name is 'some'; it must be one of none, fixed, conditioned"):
        Admission("some")
    with pytest.raises(ValueError, match=r"occupancy_threshold is out of range: 1.5"):
        Admission("conditioned", occupancy_threshold=1.5).policy(CHUNK, BETA, 10)
    with pytest.raises(ValueError, match="capacity_chunks is 0; it must be at least 1"):
        HostTier(0, 5)
