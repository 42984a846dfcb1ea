"""Eq. 2, 3 and 7."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.offload_benefit import OffloadCost, least_prefill_s_per_token

COST = OffloadCost(bytes_per_token=1000, prefill_s_per_token=1e-3, restore_bytes_per_s=1e7, load_overhead_s=0.9)


def test_long_prefixes_approach_the_limit_without_overhead():
    assert COST.benefit_ratio() == pytest.approx(0.9)
    assert COST.load_s(1000) == pytest.approx(1.0)
    assert COST.load_s_per_token(1000) == pytest.approx(1e-3)
    assert COST.benefit_ratio(1_000_000) == pytest.approx(0.9, abs=0.001)


def test_a_prefix_shorter_than_its_overhead_is_worth_computing():
    assert COST.benefit_ratio(1000) == pytest.approx(0.0)
    assert COST.benefit_ratio(100) < 0


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_a_longer_prefix_never_pays_less(tokens, others):
    shorter, longer = sorted((tokens, others))
    assert COST.benefit_ratio(shorter) <= COST.benefit_ratio(longer) + 1e-9


def test_a_tier_that_only_moves_reuse_from_gpu_to_host_costs_its_transfers():
    assert COST.serving_balance_s(500, 500, 10_000) == pytest.approx(1.0)
    assert COST.serving_balance_s(11_500, 500, 10_000, other_s=2.0) == pytest.approx(-11.0 + 1.0 + 2.0)


def test_prefill_takes_two_flop_per_activated_parameter_at_least():
    assert least_prefill_s_per_token(1e9, 4, 1e12) == pytest.approx(0.5e-3)


@pytest.mark.parametrize(
    ("name", "value"), [("prefill_s_per_token", 0.0), ("restore_bytes_per_s", -1.0), ("load_overhead_s", -1.0)]
)
def test_impossible_costs_are_errors_naming_the_argument(name, value):
    arguments = {"bytes_per_token": 1, "prefill_s_per_token": 1.0, "restore_bytes_per_s": 1.0, name: value}
    with pytest.raises(ValueError, match=name):
        OffloadCost(**arguments)
    with pytest.raises(ValueError, match="activated_parameters"):
        least_prefill_s_per_token(0, 1, 1.0)
    with pytest.raises(ValueError, match="tokens"):
        COST.benefit_ratio(0)
