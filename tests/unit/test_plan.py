"""Predictions and the plan made of them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from efficient_lmcache.core.references import References
from efficient_lmcache.core.reuse import broken_tokens, stable_tokens
from efficient_lmcache.sizing.advice import advise
from efficient_lmcache.sizing.hardware import load_hardware
from efficient_lmcache.sizing.plan import TOLERANCE, Deployment, Plan, make_plan
from efficient_lmcache.sizing.plan_text import show
from efficient_lmcache.sizing.pool import PoolModel
from efficient_lmcache.sizing.prediction import GIB, capacity_chunks, predict
from efficient_lmcache.sizing.synthetic import synthetic_workload
from efficient_lmcache.sizing.workload import Workload, coarsened

BETA = 24 * 1024
K_G = 343_408
POOL = PoolModel(16, 16, (9_000.0, 70_000.0), (0.02, 0.05), K_G)


def deployment(**options: object) -> Deployment:
    fields = {
        "hardware": load_hardware("H20"),
        "ranks": 8,
        "bytes_per_token": BETA,
        "activated_parameters": 3.3e9,
        "gpu_kv_tokens": K_G,
        "pool": POOL,
        "host_gib": (5.0,),
        **options,
    }
    return Deployment(**fields)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return synthetic_workload(33_234, 16, 1024)


@pytest.fixture(scope="module")
def plan(workload: Workload) -> Plan:
    return make_plan(workload, deployment(), recorded=False, mean_prompt_tokens=33_234)


def stream(lanes: list[int], prompts: list[list[int]], chunk_tokens: int = 4, outputs: int = 0) -> References:
    lengths = np.array([len(keys) for keys in prompts], np.int64)
    lane = np.array(lanes, np.int64)
    return References(
        chunk_tokens=chunk_tokens,
        keys=np.array([key for keys in prompts for key in keys], np.int64),
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        lookup_chunks=lengths,
        prompt_tokens=lengths * chunk_tokens + 1,
        output_tokens=np.full(len(lane), outputs, np.int64),
        lane=lane,
        session=lane,
        start_s=np.full(len(lane), np.nan),
        interval_s=np.zeros(len(lane)),
    )


def lru_computed_and_restored(chunks: References, blocks: References, host: int, gpu: int) -> tuple[int, int]:
    """Both tiers simulated in the stream's order: the host promotes as LMCache does, the GPU the tail first."""
    tier: OrderedDict[int, None] = OrderedDict()
    cache: OrderedDict[int, None] = OrderedDict()
    computed = restored = 0
    for call in range(len(chunks)):
        host_keys, gpu_keys = chunks.call_keys(call).tolist(), blocks.call_keys(call).tolist()
        found, resident = (
            next((place for place, key in enumerate(keys) if key not in held), len(keys))
            for keys, held in ((host_keys, tier), (gpu_keys, cache))
        )
        promote(tier, host_keys[:found][::-1], host)
        promote(tier, (key for key in host_keys[found:] if key not in tier), host)
        promote(cache, gpu_keys[::-1], gpu)
        found_tokens, resident_tokens = found * chunks.chunk_tokens, resident * blocks.chunk_tokens
        computed += int(chunks.prompt_tokens[call]) - max(found_tokens, resident_tokens)
        restored += max(0, found_tokens - resident_tokens)
    return computed, restored


def promote(tier: OrderedDict[int, None], keys: Iterable[int], capacity: int) -> None:
    for key in keys:
        tier[key] = None
        tier.move_to_end(key)
        if len(tier) > capacity:
            tier.popitem(last=False)


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 12), st.integers(0, 12))
def test_a_pool_of_one_is_predicted_exactly(lengths, host, gpu):
    prompts = [list(range(n)) if i % 3 else [100 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    chunks = stream([0] * len(prompts), prompts)
    model = PoolModel(1, 1, (1.0, 2.0), (0.0, 0.1))
    (row,) = predict(
        Workload(chunks, chunks), model, gpu_kv_tokens=gpu * 4, bytes_per_token=1, host_gib=[host * 4 / GIB]
    )
    computed, restored = lru_computed_and_restored(chunks, chunks, host, gpu)
    assert row.capacity_chunks == host
    assert row.computed_prefill_tokens == (computed,) * 3
    assert row.restored_tokens == (restored,) * 3


def test_every_range_holds_its_expectation_and_a_tier_for_all_leaves_only_what_is_new(workload):
    rows = predict(workload, POOL, gpu_kv_tokens=K_G, bytes_per_token=BETA, host_gib=[0.0, 5.0, 12.0, float("inf")])
    for row in rows:
        for span in (row.computed_prefill_tokens, row.restored_tokens):
            assert span.low <= span.expected <= span.high
    expected = [row.computed_prefill_tokens.expected for row in rows]
    assert expected == sorted(expected, reverse=True)
    assert rows[0].restored_tokens == (0, 0, 0)
    new = int((workload.chunks.prompt_tokens - stable_tokens(workload.chunks)).sum())
    assert rows[-1].computed_prefill_tokens.high <= new


def test_tiers_of_a_few_chunks_are_predicted():
    assert capacity_chunks(0.058, 256, 1024) == 237
    assert capacity_chunks(0.0, 256, 1024) == 0
    with pytest.raises(ValueError, match="host_gib is -1; it must be a number >= 0"):
        capacity_chunks(-1, 256, 1024)


def test_the_papers_transition_is_placed_where_gamma_h_crosses_one(plan):
    """Published figures alone: Table 3 measured 89.7, 23.5 and 5.3 M computed tokens at 0, 10 and 20 GiB."""
    low, high = plan.transition_gib
    assert low < plan.working_set_bytes / GIB < high
    assert 11.4 <= plan.recommended_gib <= 22.8
    assert plan.gamma_g == pytest.approx(1.55, abs=0.005)
    assert plan.gamma_h == pytest.approx(2.28, abs=0.005)
    assert plan.benefit_ratio >= 0.84


def test_the_recommended_tier_is_the_smallest_that_suffices(workload, plan):
    ample = plan.curve[-1].computed_prefill_tokens.high
    (at, below) = predict(
        workload,
        POOL,
        gpu_kv_tokens=K_G,
        bytes_per_token=BETA,
        host_gib=[plan.recommended_gib, plan.recommended_gib * 0.85],
    )
    assert at.computed_prefill_tokens.high <= ample * (1 + TOLERANCE)
    assert below.computed_prefill_tokens.high > ample * (1 + TOLERANCE)


def test_without_a_recording_the_working_set_is_the_least_that_is_recommended():
    workload = synthetic_workload(2_000, 2, 256)
    pair = deployment(pool=replace(POOL, active_pool=2))
    planned = make_plan(workload, pair, recorded=False, mean_prompt_tokens=3e6)
    assert planned.recommended_gib >= planned.working_set_bytes / GIB
    recorded = make_plan(workload, pair, mean_prompt_tokens=3e6)
    assert recorded.recommended_gib == 0
    assert recorded.transition_gib is None


def test_without_a_recording_no_tier_is_recommended_where_twice_the_context_would_fit_the_gpu():
    agents = synthetic_workload(2_000, 4, 256)
    pool = replace(POOL, active_pool=4)
    (roomy, tight) = (
        make_plan(agents, deployment(pool=pool, gpu_kv_tokens=tokens), recorded=False, mean_prompt_tokens=2_000)
        for tokens in (64_000, 14_000)
    )
    assert roomy.recommended_gib == 0
    assert tight.transition_gib is None
    assert tight.recommended_gib >= tight.working_set_bytes / GIB
    assert "only a recording can tell" in tight.rule


def test_no_tier_is_recommended_where_restoring_takes_longer_than_computing():
    """By the engine's own prefill; derived from the GPU's peak alone it cannot be judged, and the rule says so."""
    agents = synthetic_workload(2_000, 8, 256)
    fields = {"gpu_kv_tokens": 4_000, "bytes_per_token": 112 * 1024, "activated_parameters": 0.6e9, "ranks": 1}
    hardware = load_hardware("H100")
    pool = replace(POOL, active_pool=8, prefill_tokens_per_s=(6e5, 9e5))
    measured = deployment(**fields, hardware=hardware, pool=pool, prefill_measured=True)
    for recorded in (True, False):
        planned = make_plan(agents, measured, recorded=recorded)
        assert planned.transition_gib is not None
        assert planned.recommended_gib == 0
        assert "restoring takes longer than computing again" in planned.rule
    assert measured.benefit_range == pytest.approx((-0.613, -0.075), abs=0.001)

    derived = deployment(**fields, hardware=hardware, pool=replace(POOL, active_pool=8))
    assert derived.benefit_range[0] < 0 < derived.benefit_range[1]
    assert "cannot be judged from this model and GPU alone" in make_plan(agents, derived, recorded=False).rule

    unknown = deployment(**{**fields, "activated_parameters": None}, hardware=hardware, pool=derived.pool)
    assert unknown.benefit_range is None
    assert "give --activated-params or --prefill-tokens-per-s" in make_plan(agents, unknown).rule


def test_the_tier_asked_for_is_on_the_curve(plan):
    rows = plan.to_json()["curve"]
    assert [row["host_gib"] for row in rows] == sorted(row["host_gib"] for row in rows)
    (row,) = (row for row in rows if row["host_gib"] == 5.0)
    assert row["capacity_chunks"] == 213
    assert row["gamma_h"] == pytest.approx(2.28, abs=0.005)


def test_a_recording_of_fewer_sessions_than_the_pool_does_not_size_the_pool(workload):
    """A curve of some agents says how much those need, not the others."""
    agents = len(np.unique(workload.chunks.session))
    pool = replace(POOL, active_pool=agents + 40)
    planned = make_plan(workload, deployment(pool=pool))
    assert planned.recommended_gib >= planned.working_set_bytes / GIB
    assert "without a recording of the whole pool" in planned.rule


def test_a_recording_of_fewer_sessions_than_the_pool_says_so():
    few = stream([0, 1], [[0, 1], [2, 3]])
    workload = Workload(few, few)
    for active_pool, is_said in ((3, True), (2, False)):
        pool = deployment(pool=replace(POOL, active_pool=active_pool))
        assert (
            any("has 2 sessions, fewer than the pool's" in note for note in make_plan(workload, pool).notes) == is_said
        )


def test_calls_that_no_engine_with_this_cache_serves_are_named():
    some = stream([0, 0, 1], [[0, 1], [0, 1, 2], [3, 4]], outputs=2)
    for gpu_kv_tokens, is_said in ((15, False), (14, True)):
        planned = make_plan(Workload(some, some), deployment(gpu_kv_tokens=gpu_kv_tokens))
        words = "1 of 3 calls, of up to 15 tokens with their output, exceed the GPU's KV cache"
        assert any(words in note for note in planned.notes) == is_said


def test_sizes_of_thousands_of_gib_are_written_out(plan):
    large = replace(
        plan,
        deployment=replace(plan.deployment, host_gib=(2000.0,)),
        working_set_bytes=1822.4 * GIB,
        transition_gib=(999.6, 12_345.6),
        recommended_gib=19_000.0,
    )
    console = Console(width=200, record=True, file=StringIO())
    show(large, console)
    shown = console.export_text()
    for words in ("1,822 GiB (Eq. 5)", "of 2,000 GiB", "1,000 to 12,346 GiB per rank", "19,000 GiB per rank, 152,000"):
        assert words in shown
    assert "e+0" not in shown


def test_agents_that_only_append_are_not_said_to_edit():
    """Of their short prompts little is in full chunks; what an edit breaks is."""
    appended = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    edited = [[0, 1, 2], [0, 1, 3, 4], [0, 5, 6, 7], [0, 5, 6, 7, 8]]
    agents = stream(
        [0, 0, 0, 0, 1, 1, 1, 1], [*appended, *([*keys[:1], *(20 + k for k in keys[1:])] for keys in edited)]
    )
    assert broken_tokens(agents).tolist() == [0, 0, 0, 0, 0, 4, 12, 0]


def test_synthetic_agents_have_the_published_shape(workload):
    prompts, output = workload.chunks.prompt_tokens, int(workload.chunks.output_tokens[0])
    calls = np.bincount(workload.chunks.lane)
    assert prompts.mean() == pytest.approx(33_234, rel=0.001)
    assert output == 415
    assert calls.mean() == pytest.approx(56, abs=3)
    assert (calls.min(), calls.max()) == (32, 100)
    new = prompts.copy()
    same = np.flatnonzero(np.diff(workload.chunks.lane) == 0) + 1
    new[same] -= prompts[same - 1] + output
    assert 1 - new.sum() / prompts.sum() == pytest.approx(0.981, abs=0.003)


def test_a_retention_window_and_salts_only_add_to_what_is_computed(workload):
    def computed(served: Workload, ttl_s: float | None = None) -> int:
        rows = predict(served, POOL, gpu_kv_tokens=K_G, bytes_per_token=BETA, host_gib=[1e6], ttl_s=ttl_s)
        return rows[0].computed_prefill_tokens.expected

    assert computed(workload, ttl_s=1e9) == computed(workload) == computed(workload.salted())
    assert computed(workload, ttl_s=1.0) > computed(workload, ttl_s=60.0) > computed(workload)


def test_coarser_chunks_keep_the_prefixes_they_stand_for():
    blocks = stream([0, 0, 1], [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 6, 7]])
    chunks = coarsened(blocks, 2)
    assert [chunks.call_keys(call).tolist() for call in range(3)] == [[0, 1], [0, 1, 2], [0, 3]]
    assert chunks.lookup_chunks.tolist() == [2, 3, 2]
    assert chunks.chunk_tokens == 8


def test_a_workload_keeps_outputs_in_the_gpus_blocks_only():
    blocks = replace(stream([0], [[0, 1, 2, 3, 4]], outputs=8), lookup_chunks=np.array([3], np.int64))
    both = Workload.of(blocks, 4)
    assert both.chunks.keys.tolist() == [0, 1, 2]
    assert both.blocks.keys.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="--chunk-tokens is 6; it must be a multiple of 4"):
        Workload.of(blocks, 6)


ADVICE = {
    "flop_per_byte": 2312.0,
    "benefit_range": (0.84, 0.98),
    "gamma_g": 1.5,
    "gamma_h": 2.3,
    "host_gib": 5.0,
    "recommended_gib": 18.0,
    "saving": 0.9,
    "excess": 15,
}


@pytest.mark.parametrize(
    ("change", "row", "words"),
    [
        ({}, 0, "offload"),
        ({"flop_per_byte": 15_461.0}, 0, "favour GPU prefix caching"),
        ({"flop_per_byte": 5_000.0}, 0, "measure both"),
        ({"benefit_range": None}, 0, "offload took"),
        ({"benefit_range": (-1.2, -0.1)}, 0, r"takes 1\.1 to 2\.2 times as long .* rely on GPU prefix caching"),
        ({"benefit_range": (-1.2, 0.9)}, 0, "cannot be judged: .* give --prefill-tokens-per-s"),
        ({}, 1, "exceeds the GPU's KV cache"),
        ({"gamma_g": 0.5, "saving": 0.02}, 1, "GPU prefix caching is enough"),
        ({"gamma_g": 0.5}, 1, "yet prompts come back"),
        ({}, 2, "conditioned admission .* or a larger tier: 18 GiB per rank"),
        ({"gamma_h": 0.5, "excess": 0.0}, 2, "admit every write"),
        ({"gamma_h": 0.5, "excess": 0.4}, 2, "consider 18 GiB per rank"),
        ({"gamma_h": None, "excess": None, "host_gib": None}, 2, "plan for 18 GiB per rank"),
        ({"gamma_h": None, "excess": None, "host_gib": None, "recommended_gib": 0.0}, 2, "plan without one"),
        ({"recommended_gib": 0.0, "excess": 0.001}, 2, "no more to compute .* leave the host tier out"),
        ({"excess": 0.25}, 2, r"leaves 1\.25 times as much"),
        ({"gamma_h": 1.1, "excess": 0.01, "host_gib": 20.0}, 2, "smaller than .* yet .* admit every write"),
        ({"gamma_h": 1.1, "excess": 0.2, "host_gib": 20.0}, 2, r"conditioned admission \([^)]*\)$"),
        ({"stable_share": 0.98}, 3, "keep it so"),
        ({"stable_share": 0.5}, 3, "early edits or little sharing; .* trace lint"),
        ({"stable_share": 0.5, "broken_share": 0.01}, 3, "extend what was sent before, and the rest is new .* keep it"),
        ({"stable_share": 0.5, "broken_share": 0.4}, 3, r"early edits: 40\.0% more .* trace lint"),
    ],
)
def test_every_regime_of_table_12_gets_its_action(change, row, words):
    rows = advise(**{**ADVICE, **change})
    assert re.search(words, " ".join(rows[row]))
