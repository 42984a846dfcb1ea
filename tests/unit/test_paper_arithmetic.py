"""The paper's arithmetic, by public functions: Table 6, Section 3, Appendix C, and Section 6's planning examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from efficient_lmcache.core.footprint import KVFootprint
from efficient_lmcache.core.offload_benefit import OffloadCost
from efficient_lmcache.core.workingset import gamma_g, gamma_h, reuse_working_set_bytes
from efficient_lmcache.sizing.hardware import load_hardware

GIB = 1 << 30
ACTIVATED = 3.3e9


@pytest.fixture(scope="module")
def paper(data_dir: Path) -> dict[str, Any]:
    published: dict[str, Any] = json.loads((data_dir / "paper" / "efficientagent.json").read_text())
    return published


@pytest.mark.parametrize("model", ["qwen3_coder_30b_a3b", "qwen25_coder_32b"])
def test_table_6_footprints(paper, model):
    row = paper["table6_footprint_kib"][model]
    footprint = KVFootprint(row["layers"], row["kv_heads"], row["head_dim"])
    for ranks, kib in row["per_rank"].items():
        assert footprint.bytes_per_token_per_rank(int(ranks)) == kib * 1024


def test_working_sets_and_pressure_ratios(paper):
    figures, serving = paper["figures"], paper["table2_serving"]
    mean, beta = paper["workload"]["mean_prompt_tokens"], serving["kv_bytes_per_token_per_rank"]
    at_16 = reuse_working_set_bytes(16, mean, beta)
    assert at_16 / GIB == pytest.approx(figures["working_set_gib_a16"], abs=0.05)
    assert reuse_working_set_bytes(8, mean, beta) / GIB == pytest.approx(figures["working_set_gib_a8"], abs=0.05)
    assert gamma_g(16, mean, serving["gpu_kv_tokens"]) == pytest.approx(figures["gamma_g_a16"], abs=0.005)
    for gib, ratio in figures["gamma_h"].items():
        assert gamma_h(at_16, float(gib) * GIB) == pytest.approx(ratio, abs=0.05)


def test_planning_examples(paper):
    for example in paper["planning_examples"]:
        beta = example["kib_per_token"] * 1024
        gib = reuse_working_set_bytes(example["agents"], example["context_tokens"], beta) / GIB
        assert gib == pytest.approx(example["gib_per_gpu"], abs=0.05)


def test_the_offload_benefit_ratio_of_h20_is_at_least_0_84(paper):
    h20, published = load_hardware("H20"), paper["hardware"]["h20"]
    cost = h20.offload_cost(24 * 1024, ACTIVATED, ranks=8)
    assert cost.restore_s_per_token * 1e6 == pytest.approx(published["restore_us_per_token_per_rank"], abs=0.005)
    assert cost.prefill_s_per_token * 1e6 == pytest.approx(published["min_prefill_us_per_token"], abs=0.05)
    assert cost.benefit_ratio() >= published["obr_lower_bound"]
    slower = OffloadCost(cost.bytes_per_token, 2 * cost.prefill_s_per_token, cost.restore_bytes_per_s)
    assert slower.benefit_ratio() > cost.benefit_ratio()


@pytest.mark.parametrize("gpu", ["h20", "h800", "rtx3090"])
def test_table_1_hardware(paper, gpu):
    published, profile = paper["hardware"][gpu], load_hardware(gpu)
    assert profile.bf16_tflops == published["bf16_tflops"]
    assert profile.host_link_gb_s == published["host_link_gbs"]
    assert profile.memory_gb == published["memory_gb"]
    assert profile.flop_per_byte == pytest.approx(published["flop_per_byte"], rel=0.02)


def test_the_serving_cost_balance_favours_20_gib_over_5(paper):
    """Eq. 3 on Table 3's own counts at A = 16, with prefill at its peak: the least that the tier can save."""
    rows = {
        row["host_gib_per_rank"]: row
        for row in paper["table3_h20_replay"]
        if row["configuration"] in ("Recompute", "Offload") and row["active_pool"] == 16
    }
    cost = load_hardware("H20").offload_cost(24 * 1024, ACTIVATED, ranks=8)
    without = rows[0.0]["computed_prefill_mtok"] * 1e6

    def balance_s(gib: float) -> float:
        row = rows[gib]
        return cost.serving_balance_s(without, row["computed_prefill_mtok"] * 1e6, row["retrieved_mtok_per_rank"] * 1e6)

    assert balance_s(20.0) < balance_s(10.0) < balance_s(5.0) < 0
