"""The paper's synthesised workload: its published statistics, and what its blocks say of shared prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.core.reuse import stable_tokens
from efficient_lmcache.simulate.paper_workload import (
    SHARED_PREFIX_TOKENS,
    PaperCalls,
    paper_calls,
    paper_workload,
    published,
)
from efficient_lmcache.sizing.workload import coarsened

PAPER = published()["workload"]


@pytest.fixture(scope="module", params=[0, 7])
def calls(request: pytest.FixtureRequest) -> PaperCalls:
    return paper_calls(request.param)


@pytest.fixture(scope="module")
def blocks() -> References:
    return paper_workload(seed=0, block_tokens=64)


def firsts(task: Ints) -> Any:
    return np.diff(task, prepend=-1) > 0


def lasts(task: Ints) -> Any:
    return np.diff(task, append=task[-1] + 1) > 0


def test_totals_are_the_published_ones(calls):
    assert len(calls.task) == PAPER["calls"]
    for name in ("prompt_tokens", "output_tokens", "previous_prompt_shared_tokens", "cache_stable_tokens"):
        assert getattr(calls, name).sum() == PAPER[name], name
    assert calls.prompt_tokens.max() == PAPER["max_prompt_tokens"]


def test_calls_per_task_have_the_published_range_and_median(calls):
    per_task = np.bincount(calls.task)
    assert len(per_task) == PAPER["tasks"]
    assert (per_task.min(), np.median(per_task), per_task.max()) == (
        PAPER["calls_per_task_least"],
        PAPER["calls_per_task_median"],
        PAPER["calls_per_task_most"],
    )


def test_contexts_only_grow_and_fit_the_model(calls):
    later = ~firsts(calls.task)
    growth = np.diff(calls.prompt_tokens, prepend=0)
    assert np.all(growth[later] > np.roll(calls.output_tokens, 1)[later])
    assert np.all(calls.cache_stable_tokens < calls.prompt_tokens)
    assert np.all(calls.previous_prompt_shared_tokens <= calls.cache_stable_tokens)
    assert calls.output_tokens.min() >= 1
    assert np.all(calls.prompt_tokens + calls.output_tokens <= published()["serving"]["max_model_len_tokens"])


def test_the_next_call_reuses_the_published_share_of_new_kv(calls):
    new = calls.prompt_tokens - calls.cache_stable_tokens + calls.output_tokens
    # What the next call has of it: everything up to where their token sequences part.
    reused = np.roll(calls.cache_stable_tokens, -1) - calls.cache_stable_tokens
    assert reused[~lasts(calls.task)].sum() / new.sum() == pytest.approx(PAPER["reused_share_of_new_kv"], abs=0.0005)


def test_own_time_has_the_published_median_and_long_waits_where_calls_failed(calls):
    first = firsts(calls.task)
    assert np.all(calls.interval_s[first] == 0)
    own_s = calls.interval_s[~first]
    median_s = PAPER["median_gap_s"] / PAPER["median_gap_over_own_time"]
    assert np.median(own_s) == pytest.approx(median_s, rel=0.01)
    assert own_s.min() > 0
    assert median_s < own_s.mean() < 10


def test_the_fixed_rule_declines_what_it_declined_at_40_gib(calls):
    """A tier that holds every context: u by Equation 6, and a declined call's chunks stay unknown to the tier."""
    serving, counters = published()["serving"], published()["admission_counters"]["fixed_40_gib"]
    shared = SHARED_PREFIX_TOKENS // serving["chunk_tokens"]
    declined: list[int] = []
    never_again = held = 0
    for first, last, prompt in zip(
        firsts(calls.task), lasts(calls.task), calls.prompt_tokens // serving["chunk_tokens"], strict=True
    ):
        held = shared if first else held
        new = int(prompt - held)
        if new > serving["write_threshold_chunks"]:
            declined.append(new)
            never_again += new if last else 0
        else:
            held = prompt
    assert len(declined) == counters["skipped_requests"]
    assert sum(declined) == pytest.approx(counters["skipped_chunks"], rel=0.001)
    share = published()["declined_chunks"]["fixed_40_gib"]["beyond_capacity_share"]
    assert never_again / sum(declined) == pytest.approx(share, abs=0.001)


def test_a_tier_that_never_evicts_stores_what_table_3_says_at_80_gib(calls):
    chunk = published()["serving"]["chunk_tokens"]
    last_chunks = calls.prompt_tokens[lasts(calls.task)] // chunk
    shared = (PAPER["tasks"] - 1) * (SHARED_PREFIX_TOKENS // chunk)
    row = next(row for row in published()["table3"] if row["host_gib"] == 80)
    assert (last_chunks.sum() - shared) * chunk / 1e6 == pytest.approx(row["stored_mtok"], abs=0.01)


def test_an_infinite_cache_computes_what_is_not_stable(blocks):
    calls, size = paper_calls(0), blocks.chunk_tokens
    expected = np.where(firsts(calls.task), SHARED_PREFIX_TOKENS, calls.cache_stable_tokens) // size * size
    expected[0] = 0
    np.testing.assert_array_equal(stable_tokens(blocks), expected)


def test_keys_identify_prefixes(blocks):
    """Two calls have the same key at a place only if all their keys before it are the same."""
    assert len(blocks) == PAPER["calls"]
    lengths = np.diff(blocks.offsets)
    assert np.array_equal(lengths, (blocks.prompt_tokens + blocks.output_tokens) // blocks.chunk_tokens)
    assert np.array_equal(blocks.lookup_chunks, blocks.prompt_tokens // blocks.chunk_tokens)
    places = np.arange(len(blocks.keys)) - np.repeat(blocks.offsets[:-1], lengths)
    parents = np.concatenate(([-1], blocks.keys[:-1]))
    parents[places == 0] = -1
    _, first, again = np.unique(blocks.keys, return_index=True, return_inverse=True)
    assert np.array_equal(parents, parents[first][again])
    assert np.array_equal(places, places[first][again])


def test_keys_are_numbered_in_order_of_first_appearance(blocks):
    so_far = np.maximum.accumulate(blocks.keys)
    assert blocks.keys[0] == 0
    assert np.all(np.diff(so_far) <= 1)


def test_tasks_share_the_prefix_and_nothing_else(blocks):
    shared = SHARED_PREFIX_TOKENS // blocks.chunk_tokens
    owner = np.full(blocks.keys.max() + 1, -1)
    task = np.repeat(blocks.session, np.diff(blocks.offsets))
    own = blocks.keys >= shared
    owner[blocks.keys[own]] = task[own]
    assert np.array_equal(owner[blocks.keys[own]], task[own])
    assert np.array_equal(blocks.call_keys(len(blocks) - 1)[:shared], np.arange(shared))


def test_chunks_are_blocks_regrouped(blocks):
    regrouped, direct = coarsened(blocks, 16), paper_workload(seed=0, block_tokens=1024)
    assert np.array_equal(regrouped.offsets, direct.offsets)
    assert np.array_equal(regrouped.keys, direct.keys)


def test_the_same_seed_gives_the_same_workload_and_another_seed_another_one():
    first, again, other = paper_workload(0, 1024), paper_workload(0, 1024), paper_workload(1, 1024)
    for name in ("keys", "prompt_tokens", "output_tokens", "interval_s"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_blocks_without_tokens_are_refused():
    with pytest.raises(ValueError, match="block_tokens is 0"):
        paper_workload(block_tokens=0)


def test_the_packaged_numbers_are_the_published_ones(data_dir: Path):
    paper = json.loads((data_dir / "paper" / "efficientagent.json").read_text())
    assert [
        (
            row["active_pool"],
            row["host_gib"],
            row["makespan_min"],
            row["computed_prefill_mtok"],
            row["restored_mtok"],
            row["stored_mtok"],
            row["preemptions"],
        )
        for row in published()["table3"]
    ] == [
        (
            row["active_pool"],
            row["host_gib_per_rank"],
            row["makespan_min"],
            row["computed_prefill_mtok"],
            row["retrieved_mtok_per_rank"],
            row["stored_mtok_per_rank"],
            row["preemptions"],
        )
        for row in paper["table3_h20_replay"]
    ]
    for name in ("tasks", "calls", "prompt_tokens", "output_tokens", "max_prompt_tokens", "cache_stable_tokens"):
        assert PAPER[name] == paper["workload"][name], name
    assert PAPER["previous_prompt_shared_tokens"] == paper["workload"]["lcp_previous_prompt_tokens"]
    for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_kv_tokens", "kv_bytes_per_token_per_rank"):
        assert published()["serving"][name] == paper["table2_serving"][name], name
    assert [row["hit_share"] for row in published()["table11"]] == [
        pytest.approx(row["hit_pct"] / 100) for row in paper["table11_rtx3090_gpu_fraction"]
    ]
