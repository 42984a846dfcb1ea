"""`efficient.mode: server` inside real vLLM, beside a real LMCache server on the CPU."""

from __future__ import annotations

import json

import fresh_process
import pytest
from lmcache_server_process import CHUNK_TOKENS, LMCacheServer

pytestmark = pytest.mark.integration

pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")


def test_an_engine_beside_a_server(small_model, lmcache_server, tmp_path):
    """One engine, as starting one takes longest; what it does in turn is judged here in turn."""
    log = tmp_path / "decisions.jsonl"
    result = fresh_process.run(
        "server_scenarios:everything",
        model=small_model,
        transfer_options=lmcache_server.transfer_options,
        decision_log=str(log),
    )

    restore = result["restore"]
    assert restore["restored"] == restore["computed"]
    assert restore["stored_tokens"] == restore["restored_tokens"] == 4 * 5 * CHUNK_TOKENS
    assert restore["lmcache_lookups"] >= 8

    decline = result["decline"]
    assert (decline["objects"], decline["stored_tokens"], decline["declined"]) == (0, 0, 4)

    preempt = result["preempt"]
    assert preempt["preemptions"] > 0
    assert (preempt["objects"], preempt["stored_tokens"]) == (0, 0)
    assert preempt["running"] > 0
    assert preempt["known"] > 0

    fill = result["fill"]
    assert fill["registered"] == fill["objects"]
    assert fill["capacity_bytes"] == pytest.approx(0.8 * fill["total_bytes"], rel=0.02)
    assert fill["evicted"] == fill["evicted_total"] == fill["evicted_counted"] == fill["removed"] > 0
    assert fill["evicted_after_first_clear"] == 0
    assert fill["evicted_after_second_clear"] == fill["evicted_total"]

    for stage in ("restore", "decline", "preempt"):
        assert set(result[stage]["state"].values()) == {0}, stage
    assert set(preempt["state_after_abort"].values()) == {0}
    assert set(result["state_at_the_end"].values()) == {0}
    assert len({json.loads(line)["request_id"] for line in log.read_text().splitlines()}) > 40


def test_with_lazy_offload_a_declined_request_is_not_stored_later_either(small_model, lmcache_server, tmp_path):
    result = fresh_process.run(
        "server_scenarios:lazily",
        model=small_model,
        transfer_options=lmcache_server.transfer_options,
        decision_log=str(tmp_path / "decisions.jsonl"),
    )
    assert result["declined"] == {"objects": 0, "decisions": 0, "trackers": 0, "lookups": 0, "held_back": 0}
    assert result["admitted"]["objects"] > 0
    assert result["restored_tokens"] > 0
    assert all(answer == result["answers"][0] for answer in result["answers"])


def test_a_server_tells_of_an_l2_behind_it(tmp_path):
    from efficient_lmcache.connector.lmcache_server_adapter import server_capacity

    adapter = json.dumps({"type": "fs", "base_path": str(tmp_path / "l2")})
    server = LMCacheServer(tmp_path, 24, "--l2-adapter", adapter)
    try:
        assert server_capacity(server.http_url).l2_adapters == 1
    finally:
        server.kill()
