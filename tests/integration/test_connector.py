"""The connector inside real vLLM with real LMCache on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter

import fresh_process
import pytest
from telemetry_engine import TelemetryEngine

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 256


def test_restored_prefixes_yield_the_same_greedy_tokens_as_computed_ones(small_model):
    result = fresh_process.run("connector_scenarios:restore_and_extend", model=small_model)
    assert len(result["computed"]) == 20
    assert result["restored"] == result["computed"]
    assert result["stored_tokens"] == 20 * 5 * CHUNK_TOKENS
    assert result["restored_tokens"] == 20 * 5 * CHUNK_TOKENS
    # The extended prompts restore what the first ones left behind, and unlabelled as they are still count as 20 tasks.
    assert result["restored_tokens_after_extension"] == 2 * 20 * 5 * CHUNK_TOKENS
    assert result["active_pool"] == 20
    assert set(result["state"].values()) == {0}


def test_deduplication_stores_only_the_absent_runs(small_model):
    result = fresh_process.run("connector_scenarios:deduplicate", model=small_model)
    assert result["deduplicated_chunks"] == 4
    assert result["stored_tokens"] == 2 * CHUNK_TOKENS
    assert result["held_chunks_untouched"]
    assert result["chunks"] == 6
    assert result["restored_tokens"] == 6 * CHUNK_TOKENS
    assert result["outputs"][0] == result["outputs"][1] == result["outputs"][2]


def test_a_decision_survives_preemption_and_nothing_survives_the_request(small_model, tmp_path):
    log = tmp_path / "decisions.jsonl"
    result = fresh_process.run(
        "connector_scenarios:preempt_abort_and_many", model=small_model, decision_log=str(log), requests=10_000
    )
    assert result["preemptions"] > 0
    assert result["decisions"] == result["declined"] == 12
    assert result["stored_tokens"] == 0
    assert set(result["state_after_preemption"].values()) == {0}
    aborted = result["aborted"]
    assert aborted["running"] > 0
    assert aborted["waiting"] > 0
    assert aborted["decisions_remembered"] > aborted["running"]
    assert aborted["lookup_pins_seen"] > 0
    assert set(result["state_after_abort"].values()) == {0}
    assert set(result["state_after_many"].values()) == {0}
    assert result["remembered_prompts"] <= 8192
    assert len({json.loads(line)["request_id"] for line in log.read_text().splitlines()}) >= 10_000


def test_admission_none_stores_hits_and_computes_as_unmodified_lmcache(small_model):
    ours, theirs = (
        fresh_process.run("connector_scenarios:sequence_of_stores_and_hits", model=small_model, connector=connector)
        for connector in ("EfficientLMCacheConnector", "LMCacheConnectorV1")
    )
    assert ours == theirs
    assert ours[-1]["external_hits"] > 0
    assert any(row["keys"][0] != ours[0]["keys"][0] for row in ours), "the tier never evicted: the test proves nothing"


def test_a_second_engine_restores_what_the_first_left_in_redis(small_model, redis_url):
    first = fresh_process.run("connector_scenarios:through_redis", model=small_model, redis_url=redis_url)
    second = fresh_process.run("connector_scenarios:through_redis", model=small_model, redis_url=redis_url)
    assert first["restored_tokens"] == 0
    assert second["restored_tokens"] == 4 * 4 * CHUNK_TOKENS
    assert second["outputs"] == first["outputs"]


def test_a_redis_killed_mid_run_loses_no_request(small_model, redis_server):
    result = fresh_process.run(
        "connector_scenarios:through_redis",
        model=small_model,
        redis_url=redis_server.url,
        kill_pid=redis_server.process.pid,
    )
    assert len(result["after_kill"]) == 8
    assert all(len(output) == 4 for output in result["after_kill"])
    assert result["after_kill"][:4] == result["outputs"]


def test_an_engine_shares_a_pool_and_outlives_its_redis(small_model, redis_server):
    other, done = TelemetryEngine("engine/other", redis_server.url), threading.Event()

    def serve():
        while not done.wait(2.0):
            for task in "23":
                other.decide(task, prompt_tokens=1536)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        result = fresh_process.run(
            "connector_scenarios:telemetry_over_redis",
            model=small_model,
            redis_url=redis_server.url,
            kill_pid=redis_server.process.pid,
        )
    finally:
        done.set()
        serving.join()
        other.close()

    def pool(metrics: dict[str, float]) -> list[float]:
        names = ("pool_engines", "pool_active_tasks", "telemetry_redis_up", "telemetry_bad_messages_total")
        return [metrics[f"efficient_lmcache:{name}"] for name in names]

    assert pool(result["shared"]) == [2, 3, 1, 0]
    # Prompts of 768 tokens here, of 1536 there.
    assert 768 < result["shared"]["efficient_lmcache:pool_mean_prompt_tokens"] < 1536
    assert pool(result["alone"]) == [1, 2, 0, 0]
    assert result["alone"]["efficient_lmcache:decisions_stale_report_total"] <= 2  # those of the start
    assert result["outputs"][:2] == result["outputs"][2:4] == result["outputs"][4:6]
    assert set(result["state"].values()) == {0}


def test_broken_telemetry_admission_and_deduplication_lose_no_request_and_say_so_once(small_model, tmp_path):
    log = tmp_path / "decisions.jsonl"
    result = fresh_process.run("connector_scenarios:faults", model=small_model, decision_log=str(log))
    stages = ("healthy", "directory removed", "publisher dead", "deduplication broken", "admission broken")
    assert result["served"] == dict.fromkeys(stages, 3)
    fresh = Counter(json.loads(line)["report_fresh"] for line in log.read_text().splitlines())
    # Decisions of the broken policy are not logged; those since the publisher died had no fresh report.
    assert fresh == {True: 6, False: 6}
    failures = [message for message in result["messages"] if "broken on purpose" in message]
    assert len(failures) == 2
    assert set(result["state"].values()) == {0}


def test_a_bad_option_stops_an_engine_with_its_message(small_model):
    message = fresh_process.run("connector_scenarios:start_with_bad_option", model=small_model)
    assert "efficient.admission='sometimes' is not allowed; allowed: none, fixed, conditioned" in message


def test_a_bad_option_stops_serve_in_one_line(small_model):
    config = {"kv_connector": "EfficientLMCacheConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"efficient.write_threshold_chunks": -3}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "efficient_lmcache.cli",
            "serve",
            small_model,
            "--kv-transfer-config",
            json.dumps(config),
        ],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert process.stderr.strip() == (
        "error: kv_connector_extra_config: efficient.write_threshold_chunks=-3 is not allowed; allowed: an integer >= 0"
    )
