"""A and N of a pool from what its engines saw."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.observation import (
    HASH_RANGE,
    MAX_TASK_HASHES,
    Observation,
    PoolEstimate,
    pool_estimate,
    smallest_hashes,
)

hashes = st.integers(0, HASH_RANGE - 1)


def observation(engine: int, tasks: set[int], lookups: int = 1, prompts: int = 1, tokens: int = 100) -> Observation:
    listed, threshold = smallest_hashes(tasks)
    return Observation(f"engine-{engine}", 0, 60.0, listed, threshold, lookups, prompts, tokens)


engines = st.lists(
    st.tuples(st.sets(st.integers(0, 30)), st.integers(0, 500), st.integers(1, 256), st.integers(1, 100_000)),
    max_size=6,
).map(
    lambda rows: [
        observation(engine, tasks, lookups, prompts, prompts * tokens)
        for engine, (tasks, lookups, prompts, tokens) in enumerate(rows)
    ]
)


def test_no_engine_knows_of_nothing():
    assert pool_estimate([]) == PoolEstimate(0, 0.0, 0, 0)


@given(engines)
def test_a_is_the_number_of_distinct_tasks_of_all_engines(observations):
    distinct = set().union(*(seen.task_hashes for seen in observations))
    assert pool_estimate(observations).active_pool == len(distinct)


@given(engines, st.randoms())
def test_the_order_of_the_engines_does_not_matter(observations, shuffler):
    shuffled = list(observations)
    shuffler.shuffle(shuffled)
    estimate, other = pool_estimate(observations), pool_estimate(shuffled)
    assert other.mean_prompt_tokens == pytest.approx(estimate.mean_prompt_tokens)
    assert other._replace(mean_prompt_tokens=0) == estimate._replace(mean_prompt_tokens=0)


@given(engines)
def test_n_is_the_mean_of_all_lookups_of_the_window(observations):
    estimate = pool_estimate(observations)
    lookups = sum(seen.window_lookups for seen in observations)
    assert estimate.window_lookups == lookups
    if lookups:
        tokens = sum(seen.window_lookups * seen.mean_prompt_tokens for seen in observations)
        assert estimate.mean_prompt_tokens == pytest.approx(tokens / lookups)
    if observations:
        means = [seen.mean_prompt_tokens for seen in observations]
        assert min(means) * (1 - 1e-9) <= estimate.mean_prompt_tokens <= max(means) * (1 + 1e-9)


def test_an_engine_with_ten_times_the_lookups_weighs_ten_times_as_much():
    busy = observation(0, {1}, lookups=1000, prompts=256, tokens=256 * 10_000)
    idle = observation(1, {2}, lookups=100, prompts=256, tokens=256 * 21_000)
    assert pool_estimate([busy, idle]).mean_prompt_tokens == pytest.approx(11_000)


def test_a_pool_at_rest_keeps_its_mean():
    assert pool_estimate([observation(0, set(), lookups=0, prompts=4, tokens=400)]).mean_prompt_tokens == 100


@given(st.sets(hashes, max_size=40))
def test_all_tasks_are_listed_in_order_while_they_fit(tasks):
    assert smallest_hashes(tasks) == (tuple(sorted(tasks)), HASH_RANGE)


def test_more_tasks_than_a_message_lists_are_estimated():
    generator = random.Random(5)
    tasks = [generator.randrange(HASH_RANGE) for _ in range(40_000)]
    many, few = set(tasks[:30_000]), set(tasks[25_000:])
    observations = [observation(0, many), observation(1, few), observation(2, set(tasks[:100]))]
    assert len(observations[0].task_hashes) == MAX_TASK_HASHES
    assert pool_estimate(observations).active_pool == pytest.approx(40_000, rel=0.05)
    assert pool_estimate(observations[:1]).active_pool == pytest.approx(30_000, rel=0.05)
