"""The closed loop: who is looked up when, and what the cache's speed changes about it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.references import References
from efficient_lmcache.core.reuse import expired, salted, stable_tokens
from efficient_lmcache.sizing.pool import Pool, PoolModel, Rates, computed_extremes, interleave

CHUNK = 10
NAN = math.nan


def stream(*calls: tuple[int, int, list[int], float, float], outputs: int = 0) -> References:
    """Calls as (session, lane, keys, start_s, interval_s); prompts are whole chunks."""
    sessions, lanes, keys, start_s, interval_s = zip(*calls, strict=True)
    lengths = np.array([len(k) for k in keys], np.int64)
    return References(
        chunk_tokens=CHUNK,
        keys=np.concatenate([np.array(k, np.int64) for k in keys]),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        lookup_chunks=lengths,
        prompt_tokens=lengths * CHUNK,
        output_tokens=np.full(len(keys), outputs, np.int64),
        lane=np.array(lanes, np.int64),
        session=np.array(sessions, np.int64),
        start_s=np.array(start_s, np.float64),
        interval_s=np.array(interval_s, np.float64),
    )


def chains(tasks: int, calls: int, interval_s: float = 0.0, outputs: int = 0) -> References:
    """Independent tasks; every call extends its task's previous one by one chunk."""
    rows = [
        (task, task, [1000 * task + i for i in range(turn + 1)], NAN, interval_s)
        for task in range(tasks)
        for turn in range(calls)
    ]
    return stream(*rows, outputs=outputs)


def pool(active_pool: int, slots: int = 100, **options: object) -> PoolModel:
    return PoolModel(active_pool, slots, (100.0, 100.0), (0.1, 0.1), **options)


RATES = Rates(100.0, 0.1)


def run(references: References, model: PoolModel) -> tuple[list[int], list[float]]:
    schedule = Pool(references, model).simulate(RATES, references.prompt_tokens)
    return schedule.order.tolist(), schedule.lookup_s.tolist()


def test_a_pool_of_one_serves_task_after_task():
    assert run(chains(3, 4), pool(1))[0] == list(range(12))


def test_a_backlogged_pool_takes_turns():
    order, _ = run(chains(3, 2), pool(3))
    assert order == [0, 2, 4, 1, 3, 5]


def test_the_next_task_starts_when_one_ends():
    order, times_s = run(chains(3, 1, interval_s=2.0), pool(2))
    assert order == [0, 1, 2]
    # A prompt of 10 tokens takes 0.1 s; the second one waits for it, the third task waits for the first to end.
    assert times_s == pytest.approx([2.0, 2.1, 4.1])


def test_a_call_follows_its_response_and_the_recorded_interval():
    _, times_s = run(chains(1, 2, interval_s=3.0, outputs=5), pool(1, time_scale=0.5))
    assert times_s == pytest.approx([1.5, 1.5 + 0.1 + 0.5 + 1.5])


def test_one_slot_makes_outputs_wait_for_each_other():
    _, free = run(chains(2, 1, outputs=10), pool(2))
    _, one_slot = run(chains(2, 1, outputs=10), pool(2, slots=1))
    assert free == pytest.approx([0.0, 0.1])
    assert one_slot == pytest.approx([0.0, 1.1])


def test_prompts_that_run_at_once_fit_the_gpu_and_a_longer_one_runs_alone():
    _, times_s = run(chains(2, 1, outputs=10), pool(2, gpu_kv_tokens=15))
    assert times_s == pytest.approx([0.0, 1.1])
    _, times_s = run(chains(2, 1, outputs=10), pool(2, gpu_kv_tokens=5))
    assert times_s == pytest.approx([0.0, 1.1])


def test_a_sub_agent_runs_beside_its_parent_from_its_recorded_start():
    parent, child = (0, 0), (0, 1)
    references = stream(
        (*parent, [0], 10.0, 0.0), (*child, [1], 10.5, NAN), (*parent, [0, 2], 20.0, 8.0), (*child, [1, 3], 11.0, 0.2)
    )
    order, times_s = run(references, pool(1))
    assert order == [0, 1, 3, 2]
    assert times_s == pytest.approx([0.0, 0.5, 0.8, 8.1])


def test_a_session_ends_with_its_last_lane():
    references = stream((0, 0, [0], 0.0, 0.0), (0, 1, [1], 5.0, NAN), (1, 2, [2], 1.0, 0.0))
    assert run(references, pool(1)) == ([0, 1, 2], pytest.approx([0.0, 5.0, 5.1]))


def test_extremes_are_everything_computed_and_only_what_is_new():
    references = chains(2, 3)
    everything, new = computed_extremes(references)
    assert everything.tolist() == [10, 20, 30, 10, 20, 30]
    assert new.tolist() == [10] * 6
    assert len(interleave(references, pool(2))) == 2
    assert len(interleave(references, PoolModel(2, 2, (50.0, 100.0), (0.0, 0.1)))) == 4


def test_the_last_token_of_a_repeated_prompt_is_computed():
    assert computed_extremes(stream((0, 0, [0], NAN, 0.0), (0, 0, [0], NAN, 0.0)))[1].tolist() == [10, 1]


@given(
    st.lists(st.lists(st.floats(0, 5), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_every_call_is_looked_up_once_after_its_predecessors(tasks, active_pool, slots):
    rows = [(t, t, [10 * t + i], NAN, s) for t, intervals in enumerate(tasks) for i, s in enumerate(intervals)]
    references = stream(*rows, outputs=3)
    order, times_s = run(references, pool(active_pool, slots))
    assert sorted(order) == list(range(len(references)))
    assert times_s == sorted(times_s)
    for lane in range(len(tasks)):
        own = [call for call in order if references.lane[call] == lane]
        assert own == sorted(own)


@given(st.integers(1, 6), st.integers(1, 6))
def test_no_more_sessions_than_the_pool_are_in_progress(tasks, active_pool):
    calls = 3
    order, _ = run(chains(tasks, calls), pool(active_pool))
    done = [0] * tasks
    for call in order:
        done[call // calls] += 1
        assert sum(0 < count < calls for count in done) <= active_pool


def test_impossible_pools_are_errors_naming_the_argument():
    with pytest.raises(ValueError, match="active_pool is 0; it must be at least 1"):
        pool(0)
    with pytest.raises(ValueError, match="prefill_tokens_per_s"):
        PoolModel(1, 1, (2.0, 1.0), (0.1, 0.1))
    with pytest.raises(ValueError, match="time_scale"):
        pool(1, time_scale=NAN)


def test_stable_tokens_are_the_leading_chunks_that_any_call_had_before():
    references = stream((0, 0, [0, 1], NAN, 0), (1, 1, [0, 2, 3], NAN, 0), (0, 0, [0, 1, 2, 4], NAN, 0))
    assert stable_tokens(references).tolist() == [0, 10, 30]


def test_a_retention_window_cuts_the_lookup_at_the_first_forgotten_chunk():
    references = stream((0, 0, [0, 1], NAN, 0), (0, 0, [0], NAN, 0), (0, 0, [0, 1], NAN, 0), (0, 0, [0, 1], NAN, 0))
    within = expired(references, np.array([0.0, 6.0, 11.0, 12.0]), ttl_s=10.0)
    assert within.lookup_chunks.tolist() == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="ttl_s"):
        expired(references, np.zeros(4), 0.0)


def test_salts_end_sharing_across_sessions_but_not_among_lanes():
    references = stream((0, 0, [0, 1], NAN, 0), (1, 1, [0, 1], NAN, 0), (1, 2, [0, 1], NAN, 0))
    assert stable_tokens(references).tolist() == [0, 20, 20]
    assert salted(references).keys.tolist() == [0, 1, 2, 3, 2, 3]
    assert stable_tokens(salted(references)).tolist() == [0, 0, 20]
