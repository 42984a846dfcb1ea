"""Sampled curves against exact ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="needs the extra sizing")

from lru_streams import ORDERS, any_calls, compiles, paths, split, stream

from efficient_lmcache.core.coverage import capacity_curve
from efficient_lmcache.core.references import References
from efficient_lmcache.core.sampling import fixed_rate_curve, fixed_size_curve
from efficient_lmcache.core.stackdistance import StackDistances, lookup_distances, spread

orders = st.sampled_from(ORDERS)
TOKENS = ("covered_tokens", "restored_tokens", "computed_tokens")


def agents(calls: int = 1500, lanes: int = 12) -> References:
    """Agents in any interleaving, each growing by a few of its own chunks a call and starting over now and then."""
    chance = random.Random(7)
    paths: list[list[int]] = [[] for _ in range(lanes)]
    keys, numbers = [], iter(range(10**9))
    for _ in range(calls):
        lane = chance.randrange(lanes)
        if len(paths[lane]) > 400:
            paths[lane] = paths[lane][: chance.randrange(300)]
        paths[lane] += [next(numbers) for _ in range(chance.randrange(1, 30))]
        keys.append(list(paths[lane]))
    return stream(keys, chunk_tokens=16)


def largest_error(sampled, exact):
    capacities = np.unique(np.linspace(0, len(exact.covered_tokens) + 10, 400).astype(int)).tolist()
    return max(abs(sampled.at(k)[0] - exact.at(k)[0]) for k in capacities) / exact.prompt_tokens


@compiles
@given(any_calls, orders, st.booleans(), st.booleans())
def test_a_sample_of_all_chunks_is_exact(calls, order, by_key, fixed_size):
    references = stream(calls)
    gpu_tokens = references.prompt_tokens // 3
    exact = capacity_curve(references, gpu_tokens, order)
    if fixed_size:
        sampled = fixed_size_curve(references, 10_000, gpu_tokens, order, by_key=by_key)
    else:
        sampled = fixed_rate_curve(references, 1, gpu_tokens, order, by_key=by_key)
    for capacity in range(len(exact.covered_tokens) + 3):
        assert sampled.at(capacity) == exact.at(capacity)
    assert sampled.max_error == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("stride", [2, 5, 16])
def test_a_sample_errs_by_less_than_it_reports(order, by_key, stride):
    references = agents()
    sampled = fixed_rate_curve(references, stride, order=order, by_key=by_key)
    assert sampled.stride == stride
    error = largest_error(sampled, capacity_curve(references, order=order))
    assert error < sampled.max_error < (0.15 if by_key else 0.04)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_sample_of_fixed_size_doubles_its_stride(by_key):
    references = agents()
    sampled = fixed_size_curve(split(references, [200, 201, 900]), 500, by_key=by_key)
    distinct = len(np.unique(references.keys))
    assert sampled.stride & (sampled.stride - 1) == 0
    assert distinct / 500 / 2 < sampled.stride < distinct / 500 * 4
    assert largest_error(sampled, capacity_curve(references)) < sampled.max_error


def test_restored_and_computed_tokens_are_sampled_with_their_weights():
    references = agents()
    gpu_tokens = np.minimum(references.prompt_tokens, 2000)
    exact, sampled = capacity_curve(references, gpu_tokens), fixed_rate_curve(references, 4, gpu_tokens)
    for capacity in (100, 1000, 3000, 10_000):
        for wanted, found in zip(exact.at(capacity), sampled.at(capacity), strict=True):
            assert found == pytest.approx(wanted, abs=0.01 * exact.prompt_tokens)


def test_batches_give_the_sampled_curve_of_the_whole_stream():
    references = agents(300)
    whole, batches = fixed_rate_curve(references, 4), fixed_rate_curve(split(references, [10, 200]), 4)
    for name in TOKENS:
        assert getattr(batches, name).tolist() == getattr(whole, name).tolist()


@compiles
@given(paths(), orders, st.integers(1, 30), st.integers(2, 4))
def test_chunks_that_are_forgotten_were_never_there(calls, order, cut, stride):
    """What a doubled stride leaves is what a sample of that stride would have held from the start."""
    references = stream(calls)
    before, after = split(references, [cut])
    stack = StackDistances(order)
    stack.observe(before)
    stack.keep(stack.chunks[stack.chunks % stride == 0])
    kept = [[key for key in keys if key % stride == 0] for keys in calls]
    expected = lookup_distances(stream(kept), order)
    later = split(stream(kept), [cut])[1]
    found = spread(later, stack.observe(later), order)
    assert len(after) == len(later)
    assert found.tolist() == expected[len(expected) - len(found) :].tolist()


@pytest.mark.parametrize(
    ("curve", "size", "message"),
    [
        (fixed_rate_curve, 0, "stride is 0; it must be at least 1"),
        (fixed_size_curve, 0, "max_chunks is 0; it must be at least 1"),
    ],
)
def test_a_sample_of_nothing_is_rejected(curve, size, message):
    with pytest.raises(ValueError, match=message):
        curve(stream([[0]]), size)


def test_a_stream_without_batches_is_rejected():
    with pytest.raises(ValueError, match="at least one batch"):
        fixed_rate_curve([], 2)


def test_a_negative_capacity_is_rejected():
    with pytest.raises(ValueError, match="capacity_chunks is -1"):
        fixed_rate_curve(stream([[0]]), 2).at(-1)
