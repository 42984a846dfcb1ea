"""Predictions under write admission, and what they say of time."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="needs the extra sizing")

from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.pool import PoolModel
from efficient_lmcache.sizing.prediction import Prediction, Predictor
from efficient_lmcache.sizing.synthetic import synthetic_workload
from efficient_lmcache.sizing.workload import Workload

BETA = 1024
K_G = 48_900
CONDITIONED = Admission("conditioned")
FIXED = Admission("fixed")
SMALL_GIB, AMPLE_GIB = 0.025, 0.2


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """8 agents with a mean prompt of 9,000 tokens, in chunks of 256: a working set of 0.06 GiB."""
    pool = PoolModel(8, 16, (8_000.0, 14_000.0), (0.05, 0.25), K_G, time_scale=0.1)
    workload = synthetic_workload(9_000, 8, 256)
    return Predictor(Workload(workload.chunks.between(0, 800), workload.blocks.between(0, 800)), pool, K_G, BETA)


@pytest.fixture(scope="module")
def recompute(predictor: Predictor) -> Prediction:
    return predictor.predict(0.0)


def test_ranges_hold_their_expectation(predictor, recompute):
    for row in (recompute, predictor.predict(SMALL_GIB, CONDITIONED), predictor.predict(AMPLE_GIB, FIXED)):
        for span in row[2:]:
            assert 0 <= span.low <= span.expected <= span.high


def test_in_a_small_tier_admission_computes_and_stores_less_than_plain_offload(predictor):
    plain = predictor.predict(SMALL_GIB)
    for admission in (FIXED, CONDITIONED):
        row = predictor.predict(SMALL_GIB, admission)
        assert row.computed_prefill_tokens.high < plain.computed_prefill_tokens.low
        assert row.stored_tokens.high < plain.stored_tokens.low
        assert row.declined_calls.low > 0
        assert row.makespan_s.expected < plain.makespan_s.expected


def test_in_an_ample_tier_conditioned_admission_is_plain_offload_and_fixed_is_not(predictor):
    plain = predictor.predict(AMPLE_GIB)
    assert predictor.predict(AMPLE_GIB, CONDITIONED) == plain
    assert plain.declined_calls == (0, 0, 0)
    strict = Admission("fixed", write_threshold_chunks=0)
    assert predictor.predict(AMPLE_GIB, strict).computed_prefill_tokens.low > plain.computed_prefill_tokens.high


def test_kappa_and_theta_reach_the_policy(predictor):
    plain = predictor.predict(SMALL_GIB)
    assert predictor.predict(SMALL_GIB, Admission("conditioned", write_threshold_chunks=10_000)) == plain
    eager = predictor.predict(SMALL_GIB, Admission("fixed", write_threshold_chunks=0))
    assert eager.declined_calls.expected > predictor.predict(SMALL_GIB, FIXED).declined_calls.expected


def test_recompute_is_a_tier_of_nothing(recompute):
    assert recompute.capacity_chunks == 0
    assert recompute.restored_tokens == recompute.stored_tokens == recompute.declined_calls == (0, 0, 0)


def test_less_computed_prefill_is_a_shorter_makespan(predictor, recompute):
    ample = predictor.predict(AMPLE_GIB)
    assert ample.makespan_s.high < recompute.makespan_s.high
    # The slow engine computes it at 8,000 tokens/s and the fast one at 14,000; nothing is faster than that.
    assert recompute.makespan_s.low >= recompute.computed_prefill_tokens.low / 14_000
