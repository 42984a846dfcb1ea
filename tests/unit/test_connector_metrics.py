"""What the connector counts, on its way to vLLM's /metrics."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")

from efficient_lmcache.connector.metrics import ConnectorPromMetrics, ConnectorStats, StatsCollector
from efficient_lmcache.core.admission import AdmissionParameters, FixedAdmission, RequestFacts

POLICY_PARAMETERS = AdmissionParameters(chunk_tokens=256, bytes_per_token=1024, configured_capacity_bytes=2**20)


def test_decisions_become_counters_and_the_latest_ones_gauges():
    stats, policy = StatsCollector(), FixedAdmission(POLICY_PARAMETERS)
    for match in (0, 2560):
        stats.add_decision(policy.decide(RequestFacts("task", 2560, match), None, 0.0))
    taken = stats.take()
    assert taken is not None
    assert taken.data["counters"] == {
        "decisions.refill": 1,
        "decisions.extension": 1,
        "decisions_pressure": 2,
        "decisions_stale_report": 2,
        "declined_chunks": 10,
    }
    assert taken.data["gauges"]["mean_prompt_tokens"] == 2560
    assert "report_age_s" not in taken.data["gauges"]
    assert stats.take() is None


def test_statistics_travel_between_processes():
    stats = StatsCollector()
    stats.count("stored_tokens", 5)
    taken = stats.take()
    travelled = pickle.loads(pickle.dumps(taken))
    assert ConnectorStats(travelled.to_dict()).data["counters"] == {"stored_tokens": 5}


def test_counters_add_up_and_gauges_are_the_later_ones():
    worker = ConnectorStats({"counters": {"stored_tokens": 1}, "gauges": {}})
    scheduler = ConnectorStats({"counters": {"stored_tokens": 2}, "gauges": {"pressure": 1.0}})
    assert worker.aggregate(scheduler).data == {"counters": {"stored_tokens": 3}, "gauges": {"pressure": 1.0}}


def test_what_lmcaches_own_connector_collected_is_kept_in_server_mode():
    first, second = (
        ConnectorStats({"counters": {}, "gauges": {}, "lmcache": {"s": values}}) for values in ([1], [2, 3])
    )
    assert first.aggregate(second).data["lmcache"] == {"s": [1, 2, 3]}
    ours = ConnectorStats({"counters": {"stored_tokens": 1}, "gauges": {}})
    for added in (ours.aggregate(first), first.aggregate(ours)):
        assert added.data == {"counters": {"stored_tokens": 1}, "gauges": {}, "lmcache": {"s": [1]}}
    assert not first.is_empty()


def test_no_increment_is_lost_between_threads():
    stats, totals = StatsCollector(), [0]
    done = threading.Event()

    def take_all():
        while not done.is_set():
            taken = stats.take()
            totals[0] += taken.data["counters"]["evicted_chunks"] if taken else 0

    taker = threading.Thread(target=take_all)
    counters = [
        threading.Thread(target=lambda: [stats.count("evicted_chunks") for _ in range(20_000)]) for _ in range(3)
    ]
    for thread in (taker, *counters):
        thread.start()
    for thread in counters:
        thread.join()
    done.set()
    taker.join()
    rest = stats.take()
    assert totals[0] + (rest.data["counters"]["evicted_chunks"] if rest else 0) == 60_000


def test_gauges_that_are_set_travel_once_and_decisions_do_not_unset_them():
    stats, policy = StatsCollector(), FixedAdmission(POLICY_PARAMETERS)
    stats.set_gauges({"pool_engines": 3.0})
    taken = stats.take()
    assert taken is not None
    assert taken.data == {"counters": {}, "gauges": {"pool_engines": 3.0}}
    assert stats.take() is None
    stats.set_gauges({"pool_engines": 2.0})
    stats.add_decision(policy.decide(RequestFacts("task", 2560, 0), None, 0.0))
    taken = stats.take()
    assert taken is not None
    assert (taken.data["gauges"]["pool_engines"], taken.data["gauges"]["active_pool_tasks"]) == (2.0, 1)


def test_an_engine_started_anew_or_with_more_ranks_in_the_same_process_shows_its_metrics_too():
    config: Any = SimpleNamespace(kv_transfer_config=None)
    types: dict[Any, Any] = {metric: metric for metric in (Counter, Gauge, Histogram)}
    for engines in (1, 2, 2):
        shown = ConnectorPromMetrics(config, types, ["engine"], {engine: [str(engine)] for engine in range(engines)})
        for engine in range(engines):
            data = {"counters": {"stored_tokens": 5, "decisions.refill": 1}, "gauges": {"pressure": 1.0}}
            shown.observe(data, engine)
        for engine in range(2):
            labels = {"engine": str(engine)}
            expected = [5.0, 1.0, 1.0] if engine < engines else [None] * 3
            assert [
                REGISTRY.get_sample_value("efficient_lmcache:stored_tokens_total", labels),
                REGISTRY.get_sample_value("efficient_lmcache:decisions_total", {**labels, "outcome": "refill"}),
                REGISTRY.get_sample_value("efficient_lmcache:pressure", labels),
            ] == expected
