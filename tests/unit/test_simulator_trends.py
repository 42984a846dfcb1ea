"""What other studies found of agents and caches, in miniature: orders and coarse values that a change must not lose."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="needs the extra sizing")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import trends_cluster
import trends_one_gpu
from trends_cluster import Row, arriving, simulate_cluster
from trends_one_gpu import QWEN3_8B, SYSTEM_TOKENS, Point, host_tier, measure, napkin, synthetic

from efficient_lmcache.sizing.workload import Workload

#: A pool that four agents fill.
SERVER = replace(QWEN3_8B, pool_tokens=160_000)
MANY = 12


def shortened(workload: Workload, times: int) -> Workload:
    """Shorter answers, which take most of a simulation's time."""
    blocks = workload.blocks
    return replace(workload, blocks=replace(blocks, output_tokens=-(-blocks.output_tokens // times)))


@cache
def point(agents: int, ratio: float = 0.0, policy: str = "write-through", sharing: float = 1.0) -> Point:
    workload = shortened(synthetic(agents, 0, sharing=sharing, per_agent=2), 3)
    return measure(workload, SERVER, agents, host_tier(workload, SERVER, ratio, policy) if ratio else None)


def test_the_hit_rate_falls_off_a_cliff_where_pool_over_context_puts_it():
    assert 3 < napkin(SERVER.pool_tokens, point(3).context_tokens, SYSTEM_TOKENS) < 5
    assert point(3).hit_rate > 0.9
    assert point(3).wait_p50_s < 1
    assert point(MANY).wait_p50_s > 10


def test_behind_the_cliff_nothing_but_the_shared_prompt_is_found():
    assert point(MANY).hit_rate == pytest.approx(SYSTEM_TOKENS / 62_000, abs=0.07)
    assert point(MANY, sharing=0.0).hit_rate < 0.05
    assert point(MANY, sharing=0.0).wait_p50_s > point(MANY).wait_p50_s


def test_an_inclusive_tier_holds_r_pools_and_an_exclusive_one_r_more():
    none, one, two = point(MANY), point(MANY, 1.0), point(MANY, 2.0)
    assert one.hit_rate == pytest.approx(none.hit_rate, abs=0.05)
    assert two.hit_rate > one.hit_rate + 0.05
    assert one.hit_rate + 0.03 < point(MANY, 1.0, "write-back").hit_rate < two.hit_rate + 0.05
    assert point(MANY, 2.0, "write-back").hit_rate > two.hit_rate + 0.05
    # A hit is no seat on the GPU.
    assert point(MANY, 2.0, "write-back").wait_p50_s > 5


@cache
def cluster(route: str, shared: bool, link_gb_s: float = 1e6, retention_s: float = 3600.0) -> Row:
    blocks = shortened(synthetic(3, 0), 30).blocks
    chunked = Workload.of(blocks, trends_cluster.CHUNK_TOKENS, gpu_block_tokens=trends_one_gpu.PAGE_TOKENS)
    sessions = arriving(chunked, per_hour_and_node=12.0)
    return simulate_cluster(sessions, shared=shared, route=route, link_gb_s=link_gb_s, retention_s=retention_s)


def test_local_caches_are_found_by_the_session_only_and_a_shared_one_from_everywhere(monkeypatch):
    monkeypatch.setattr(trends_cluster, "_WARM_UP_S", 0.0)
    shared, by_load, by_session = cluster("load", True), cluster("load", False), cluster("session", False)
    assert by_load.request_hit_rate < 0.35 < 0.9 < by_session.request_hit_rate
    assert shared.request_hit_rate > 0.95
    assert by_load.latency_p90_s > shared.latency_p90_s


def test_waits_grow_where_the_link_carries_less_and_hits_where_more_is_retained(monkeypatch):
    monkeypatch.setattr(trends_cluster, "_WARM_UP_S", 0.0)
    free = cluster("load", True)
    narrow = cluster("load", True, link_gb_s=free.read_gb_s)
    assert narrow.ttft_p99_s > free.ttft_p99_s + 5
    brief = cluster("load", True, retention_s=10.0)
    assert brief.tier_hit_rate < free.tier_hit_rate - 0.02
    assert brief.held_tb < free.held_tb / 3
