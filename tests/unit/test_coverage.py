"""Capacity curves against LRU tiers simulated one capacity at a time, on random streams and on real ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="needs the extra sizing")

from lru_streams import ORDERS, any_calls, compiles, lru_coverage, paths, split, stream

from efficient_lmcache.core.coverage import capacity_curve, covered_tokens_at
from efficient_lmcache.core.references import References
from efficient_lmcache.core.stackdistance import PromotionOrder

CAPACITIES = range(20)
orders = st.sampled_from(ORDERS)


@st.composite
def streams(draw: st.DrawFn, calls: st.SearchStrategy[list[list[int]]] = any_calls) -> References:
    """Lookups may ask for fewer chunks than the call leaves behind, and prompts end inside a chunk."""
    keys = draw(calls)
    lookup = [draw(st.integers(max(0, len(call) - 3), len(call))) for call in keys]
    return stream(keys, lookup_chunks=lookup, chunk_tokens=draw(st.integers(1, 5)), rest=draw(st.integers(0, 3)))


@compiles
@given(streams(), orders)
def test_the_curve_is_what_lru_tiers_of_every_capacity_cover(references, order):
    curve = capacity_curve(references, order=order)
    for capacity in CAPACITIES:
        covered = lru_coverage(references, capacity, order)
        assert covered_tokens_at(references, capacity, order).tolist() == covered.tolist()
        total = int(covered.sum())
        assert curve.at(capacity) == (total, total, int(references.prompt_tokens.sum()) - total)


@compiles
@given(streams(), orders, st.data())
def test_restored_tokens_are_those_the_gpu_did_not_hold(references, order, data):
    gpu_tokens = np.array([data.draw(st.integers(0, tokens)) for tokens in references.prompt_tokens.tolist()], np.int64)
    curve = capacity_curve(references, gpu_tokens, order)
    for capacity in CAPACITIES:
        covered = lru_coverage(references, capacity, order)
        restored = np.maximum(0, covered - gpu_tokens).sum()
        computed = (references.prompt_tokens - np.maximum(covered, gpu_tokens)).sum()
        assert curve.at(capacity) == (covered.sum(), restored, computed)


@compiles
@given(streams(), orders, st.lists(st.integers(0, 30), max_size=4), st.booleans())
def test_batches_give_the_curve_of_the_whole_stream(references, order, cuts, by_reference):
    gpu_tokens = references.prompt_tokens // 2
    whole = capacity_curve(references, gpu_tokens, order)
    batches = capacity_curve(iter(split(references, cuts)), gpu_tokens, order, by_reference=by_reference)
    for name in ("covered_tokens", "restored_tokens", "computed_tokens"):
        assert getattr(batches, name).tolist() == getattr(whole, name).tolist()
    assert (batches.calls, batches.prompt_tokens) == (len(references), references.prompt_tokens.sum())


@compiles
@given(streams(), orders)
def test_the_curve_ends_where_nothing_changes_any_more(references, order):
    covered = capacity_curve(references, order=order).covered_tokens
    assert covered[0] == 0
    assert len(covered) == 1 or covered[-1] > covered[-2]
    assert covered[-1] == lru_coverage(references, 10_000, order).sum()


@compiles
@given(streams(), orders, st.integers(0, 12))
def test_a_gpu_that_holds_as_much_as_the_tier_leaves_nothing_to_restore(references, order, capacity):
    gpu_tokens = covered_tokens_at(references, capacity, order)
    assert capacity_curve(references, gpu_tokens, order).at(capacity)[1] == 0


@compiles
@given(streams(paths()))
def test_lmcaches_simulator_finds_the_same_tokens_promoting_head_first(references):
    simulator = pytest.importorskip("lmcache.tools.cache_simulator.simulator", reason="needs lmcache")
    events = [
        {
            "chunk_hashes": [str(key) for key in references.call_keys(call)[: references.lookup_chunks[call]]],
            "seq_len": int(references.prompt_tokens[call]),
            "chunk_size": references.chunk_tokens,
        }
        for call in range(len(references))
    ]
    asked = stream(
        [[int(key) for key in event["chunk_hashes"]] for event in events], chunk_tokens=references.chunk_tokens
    )
    curve = capacity_curve(asked, order=PromotionOrder.HEAD_FIRST)
    for capacity in CAPACITIES[1:]:
        result = simulator.simulate(events, capacity, 1, fast=True)
        assert result["total_hit_tokens"] == curve.at(capacity)[0]
        assert result["total_tokens"] == references.prompt_tokens.sum()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["agentic-weka", "mooncake-conversation", "mooncake-synthetic"])
def test_recorded_streams_agree_with_lru_tiers_at_twenty_capacities(data_dir, name, order):
    from efficient_lmcache.sizing.streams import open_stream

    path = data_dir / "traces" / f"{name}.jsonl.gz"
    references = next(iter(open_stream(path)))
    references = references.reordered(np.arange(min(150, len(references))))
    curve = capacity_curve(references, order=order)
    for capacity in np.geomspace(1, len(curve.covered_tokens) + 1, 20).astype(int).tolist():
        assert curve.at(capacity)[0] == lru_coverage(references, capacity, order).sum()


def test_a_negative_capacity_is_rejected():
    with pytest.raises(ValueError, match="capacity_chunks is -1"):
        capacity_curve(stream([[0]])).at(-1)


def test_a_stream_without_batches_is_rejected():
    with pytest.raises(ValueError, match="at least one batch"):
        capacity_curve([])


def test_batches_of_other_chunks_are_rejected():
    with pytest.raises(ValueError, match="chunks of 8 tokens, those before 4"):
        capacity_curve([stream([[0]]), stream([[0]], chunk_tokens=8)])


@pytest.mark.parametrize(
    ("gpu_tokens", "message"),
    [
        ([0], "1 entries for more"),
        ([0, 0, 0], "3 entries for 2 calls"),
        ([0, 99], "between 0 and"),
        ([-1, 0], "between 0"),
    ],
)
def test_gpu_tokens_that_do_not_fit_the_calls_are_rejected(gpu_tokens, message):
    with pytest.raises(ValueError, match=message):
        capacity_curve(stream([[0], [0, 1]]), np.array(gpu_tokens, np.int64))
