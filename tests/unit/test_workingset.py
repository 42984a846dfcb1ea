"""Eq. 5, its two ratios, and the estimator that follows A and N."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.workingset import WorkingSetEstimator, gamma_g, gamma_h, reuse_working_set_bytes

GIB = 1024**3
BETA = 24 * 1024


def test_the_papers_working_sets_and_ratios_are_reproduced():
    at_16 = reuse_working_set_bytes(16, 33_234, BETA)
    assert at_16 / GIB == pytest.approx(11.4, abs=0.05)
    assert reuse_working_set_bytes(8, 33_234, BETA) / GIB == pytest.approx(5.3, abs=0.05)
    assert [gamma_h(at_16, gib * GIB) for gib in (5, 10, 20)] == pytest.approx([2.3, 1.1, 0.57], abs=0.05)
    assert gamma_g(16, 33_234, 343_408) == pytest.approx(1.55, abs=0.005)


def test_the_papers_planning_examples_are_reproduced():
    assert reuse_working_set_bytes(64, 65_536, BETA) / GIB == pytest.approx(94.5, abs=0.05)
    assert reuse_working_set_bytes(128, 131_072, BETA) / GIB == pytest.approx(381, abs=0.5)


def test_one_task_or_none_reuses_nothing_of_others():
    assert reuse_working_set_bytes(1, 1000, 10) == 0
    assert reuse_working_set_bytes(0, 1000, 10) == 0


def test_without_a_host_tier_the_ratio_is_infinite():
    assert gamma_h(1.0, 0) == float("inf")


def test_no_gpu_kv_is_an_error_naming_the_argument():
    with pytest.raises(ValueError, match="gpu_kv_tokens is 0"):
        gamma_g(16, 1.0, 0)


lookups = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 100_000), st.floats(0, 40, allow_nan=False)), max_size=120
)


@given(lookups, st.integers(1, 9), st.floats(0, 100))
def test_the_estimate_equals_a_recount_of_the_windows(observed, prompt_window, idle_s):
    estimator = WorkingSetEstimator(10, window_s=60.0, prompt_window_lookups=prompt_window)
    now_s, history = 0.0, []
    for task, prompt_tokens, wait_s in observed:
        now_s += wait_s
        history.append((task, prompt_tokens, now_s))
        estimator.observe(task, prompt_tokens, now_s)
    now_s += idle_s
    estimate = estimator.estimate(now_s)
    prompts = [prompt_tokens for _, prompt_tokens, _ in history[-prompt_window:]]
    assert estimate.active_pool == len({task for task, _, seen_s in history if seen_s >= now_s - 60.0})
    assert estimate.mean_prompt_tokens == pytest.approx(sum(prompts) / len(prompts) if prompts else 0.0)
    assert estimate.bytes == pytest.approx(max(estimate.active_pool - 1, 0) * estimate.mean_prompt_tokens * 10)


def test_a_clock_that_steps_back_loses_no_task():
    estimator = WorkingSetEstimator(1)
    estimator.observe("a", 10, 100.0)
    estimator.observe("b", 10, 3.0)
    assert estimator.estimate(100.0).active_pool == 2
    assert estimator.estimate(161.0).active_pool == 0


def test_memory_follows_the_windows_not_the_history():
    estimator = WorkingSetEstimator(1)
    for call in range(50_000):
        estimator.observe(call, 10, float(call))
    assert len(estimator._last_lookup_s) == 61
    assert len(estimator._prompts) == 256


@pytest.mark.parametrize("bad", [{"bytes_per_token": -1}, {"window_s": 0.0}, {"prompt_window_lookups": 0}])
def test_a_bad_parameter_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        WorkingSetEstimator(**{"bytes_per_token": 1, **bad})
