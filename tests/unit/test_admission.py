"""Eq. 6 and 10 with Table 7's parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.admission import (
    ADMISSIONS,
    AdmissionParameters,
    ConditionedAdmission,
    FixedAdmission,
    NoAdmission,
    Outcome,
    RequestFacts,
)
from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.core.tier import TierReport

CHUNK_TOKENS = 1024
BETA = 24 * 1024
CHUNK_BYTES = CHUNK_TOKENS * BETA


def parameters(**changes) -> AdmissionParameters:
    return AdmissionParameters(
        **{"chunk_tokens": CHUNK_TOKENS, "bytes_per_token": BETA, "configured_capacity_bytes": 5 * 1024**3, **changes}
    )


def report(registered=213, capacity=213, evicted=1, received_s=0.0) -> TierReport:
    return TierReport("engine", 1, CHUNK_TOKENS, CHUNK_BYTES, registered, capacity, evicted, evicted, received_s)


def fill_pool(policy, tasks=16, prompt_tokens=33_234, now_s=0.0):
    for task in range(tasks):
        policy.decide(RequestFacts(f"task-{task}", prompt_tokens, prompt_tokens), None, now_s)


REFILL = RequestFacts("task-0", 33_234, 0)
EXTENSION = RequestFacts("task-0", 33_234, 33_234 - 8 * CHUNK_TOKENS)


def test_defaults_are_table_7():
    defaults = parameters()
    assert (defaults.write_threshold_chunks, defaults.occupancy_threshold) == (8, 0.95)
    assert (defaults.activity_window_s, defaults.prompt_window_lookups, defaults.report_max_age_s) == (60.0, 256, 5.0)


@pytest.mark.parametrize(
    ("tasks", "evicted", "registered", "pressure"),
    [
        (16, 1, 213, True),
        (16, 0, 213, False),  # full, not evicting
        (16, 1, 202, False),  # evicting at an occupancy of 0.948
        (16, 1, 203, True),  # 0.953
        (7, 1, 213, False),  # the pool fits: 4.6 GiB
    ],
)
def test_pressure_needs_the_estimate_above_and_a_full_evicting_tier(tasks, evicted, registered, pressure):
    policy = ConditionedAdmission(parameters())
    fill_pool(policy, tasks)
    decision = policy.decide(REFILL, report(registered=registered, evicted=evicted), 1.0)
    assert decision.pressure is pressure
    assert decision.save is not pressure


@pytest.mark.parametrize("received_s", [None, -5.1])
def test_without_a_fresh_report_the_estimate_alone_decides(received_s):
    idle = None if received_s is None else report(registered=0, evicted=0, received_s=received_s)
    policy = ConditionedAdmission(parameters())
    fill_pool(policy)
    decision = policy.decide(REFILL, idle, 0.0)
    assert decision.pressure
    assert not decision.report_fresh
    assert decision.full_and_evicting is None
    few = ConditionedAdmission(parameters())
    assert few.decide(REFILL, idle, 0.0).save


def test_a_report_is_fresh_for_five_seconds_after_receipt():
    policy = ConditionedAdmission(parameters())
    assert policy.decide(REFILL, report(received_s=10.0), 15.0).report_fresh
    assert not policy.decide(REFILL, report(received_s=10.0), 15.01).report_fresh


def test_under_pressure_kappa_parts_extensions_from_refills():
    policy = FixedAdmission(parameters())
    extension = policy.decide(EXTENSION, None, 0.0)
    assert (extension.new_full_chunks, extension.outcome, extension.save) == (8, Outcome.EXTENSION, True)
    refill = policy.decide(RequestFacts("t", 33_234, 33_234 - 9 * CHUNK_TOKENS), None, 0.0)
    assert (refill.new_full_chunks, refill.outcome, refill.save) == (9, Outcome.REFILL, False)


def test_new_full_chunks_floor_prompt_and_match_separately():
    policy = NoAdmission(parameters())
    assert policy.decide(RequestFacts("t", 2 * CHUNK_TOKENS - 1, CHUNK_TOKENS - 1), None, 0.0).new_full_chunks == 1


def test_the_tiers_own_capacity_replaces_the_configured_one():
    policy = ConditionedAdmission(parameters(configured_capacity_bytes=1))
    assert policy.decide(REFILL, report(capacity=1000), 0.0).capacity_bytes == 1000 * CHUNK_BYTES
    assert policy.decide(REFILL, None, 0.0).capacity_bytes == 1


def test_a_decision_carries_every_factor():
    policy = ConditionedAdmission(parameters())
    fill_pool(policy, tasks=15)
    decision = policy.decide(RequestFacts("last", 33_234, 2048), report(received_s=-2.0), 1.0)
    assert decision.estimate.active_pool == 16
    assert decision.estimate.bytes == 15 * 33_234 * BETA
    assert decision.estimate_above
    assert decision.full_and_evicting
    assert (decision.occupancy, decision.evicted_chunks, decision.report_age_s) == (1.0, 1, 3.0)
    assert (decision.new_full_chunks, decision.write_threshold_chunks) == (30, 8)


facts = st.builds(RequestFacts, st.integers(0, 40), st.integers(1, 200_000), st.integers(0, 200_000))
reports = st.none() | st.builds(
    report, st.integers(0, 400), st.integers(0, 400), st.integers(0, 50), st.floats(-20, 0, allow_nan=False)
)


@given(st.lists(st.tuples(facts, reports), min_size=1, max_size=60))
def test_conditioned_is_none_without_pressure_and_fixed_under_it(stream):
    none, fixed, conditioned = (policy(parameters()) for policy in (NoAdmission, FixedAdmission, ConditionedAdmission))
    for request, tier in stream:
        request = RequestFacts(
            request.task, request.prompt_tokens, min(request.host_match_tokens, request.prompt_tokens)
        )
        by_none, by_fixed, decision = (policy.decide(request, tier, 0.0) for policy in (none, fixed, conditioned))
        assert by_none.save
        assert by_fixed.save is (by_fixed.new_full_chunks <= 8)
        expected_pressure = decision.estimate_above and (
            not decision.report_fresh or (decision.occupancy >= 0.95 and decision.evicted_chunks > 0)
        )
        assert decision.pressure is expected_pressure
        assert decision.save is (by_fixed if expected_pressure else by_none).save
        assert by_none.estimate == by_fixed.estimate == decision.estimate


@given(st.lists(st.tuples(facts, reports), min_size=1, max_size=60))
def test_conditioned_with_an_ample_tier_is_none(stream):
    ample = ConditionedAdmission(parameters(configured_capacity_bytes=2**60))
    for request, tier in stream:
        if tier is not None:
            tier = report(tier.registered_chunks, 2**40, tier.evicted_chunks, tier.received_s)
        assert ample.decide(request, tier, 0.0).save


def test_policies_are_found_by_their_names():
    assert {name: policy.name for name, policy in ADMISSIONS.items()} == {
        n: n for n in ("none", "fixed", "conditioned")
    }


@pytest.mark.parametrize("bad", [{"chunk_tokens": 0}, {"occupancy_threshold": 1.2}, {"write_threshold_chunks": -1}])
def test_a_parameter_out_of_range_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        parameters(**bad)


def test_a_tier_report_refuses_what_no_tier_can_say():
    with pytest.raises(ValueError, match="registered_chunks is -1"):
        report(registered=-1)


def test_a_tier_of_unknown_capacity_is_under_no_pressure_until_a_report_tells_it():
    policy = ConditionedAdmission(parameters(configured_capacity_bytes=None))
    fill_pool(policy, tasks=1000)
    decision = policy.decide(REFILL, None, 0.0)
    assert decision.save
    assert decision.capacity_bytes is None
    assert decision.record()["capacity_bytes"] is None
    assert not policy.decide(REFILL, report(), 0.0).save


def test_a_shared_tier_is_held_against_the_pool_of_all_its_engines():
    policy = ConditionedAdmission(parameters())
    pool = PoolEstimate(active_pool=16, mean_prompt_tokens=33_234.0, window_lookups=16, engines=4)
    alone, shared = (policy.decide(REFILL, report(), 0.0, pool=engines) for engines in (None, pool))
    assert alone.save
    assert not shared.save
    assert (shared.estimate.active_pool, shared.estimate.mean_prompt_tokens) == (16, 33_234.0)


def test_a_pool_estimate_that_lags_behind_this_engine_does_not_hide_what_it_sees():
    policy = ConditionedAdmission(parameters())
    fill_pool(policy)
    old = PoolEstimate(active_pool=2, mean_prompt_tokens=100.0, window_lookups=2, engines=2)
    assert policy.decide(REFILL, report(), 0.0, pool=old).estimate.active_pool == 16


@pytest.mark.parametrize(("registered", "full"), [(76, True), (75, False), (100, True), (120, True)])
def test_a_tier_that_evicts_in_batches_is_full_from_what_a_batch_leaves_on(registered, full):
    """LMCache's server goes up and down between four fifths of what it can hold and all of it."""
    seen = TierReport("server", 1, 256, 1024, registered, 100, 5, 5, eviction_batch_chunks=20)
    assert seen.full_and_evicting(0.95) is full
    assert not replace(seen, evicted_chunks=0).full_and_evicting(0.95)


@pytest.mark.parametrize("age_s", [0.0, 60.0])
def test_what_a_tier_with_another_one_behind_it_loses_is_not_lost(age_s):
    """LMCache's server with an L2: declined, a refill would miss the L2 as well."""
    backed = replace(report(), backing_tiers=1)
    policy = ConditionedAdmission(parameters())
    fill_pool(policy)
    decision = policy.decide(REFILL, backed, age_s)
    assert (decision.save, decision.estimate_above) == (True, False)
    assert decision.record()["backing_tiers"] == 1
    assert not policy.decide(REFILL, report(), age_s).save
