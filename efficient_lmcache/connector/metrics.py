"""Counters and gauges in vLLM's own /metrics, through its connector hooks.

The scheduler and the first rank's worker collect what they saw since they were last asked; vLLM brings it to the API
server, where `ConnectorPromMetrics` adds it up. Ranks hold shards of the same tokens, so the first one speaks for each.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from contextlib import suppress
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from efficient_lmcache.core.admission import Decision, Outcome

_PREFIX = "efficient_lmcache:"

OUTCOME_COUNTERS = {
    "decisions": "Admission decisions by outcome.",
    "remote_decisions": "The remote tier's own decisions by outcome; of an engine with a remote tier only.",
}
DECISION_COUNTERS = {
    "decisions_pressure": "Decisions under pressure (Eq. 10).",
    "decisions_estimate_above": "Decisions whose working-set estimate exceeded the host tier.",
    "decisions_full_and_evicting": "Decisions whose fresh report showed a full, evicting tier.",
    "decisions_stale_report": "Decisions without a fresh tier report.",
    "declined_chunks": "New full chunks of requests whose write was declined.",
}
REMOTE_COUNTERS = {
    "remote_decisions_pressure": "The remote tier's decisions under pressure.",
    "remote_declined_chunks": "New full chunks of requests whose write to the remote tier was declined.",
}
WORKER_COUNTERS = {
    "stored_tokens": "Tokens copied from GPU to host, per rank.",
    "restored_tokens": "Tokens copied from host to GPU, per rank.",
    "deduplicated_chunks": "Chunks not copied because the host tier already held them, per rank.",
    "evicted_chunks": "Chunks evicted from the host tier to make room, per rank.",
    "remote_only_chunks": "Chunks that the host tier declined and that went to the remote tier, per rank.",
    "remote_dropped_stores": "Stores to the remote tier alone that did not all fit into staging, per rank.",
    "unpromoted_chunks": "Chunks restored from the remote tier that the host tier declined, per rank.",
}
TELEMETRY_COUNTERS = {
    "telemetry_bad_messages": "Messages from Redis that were no valid telemetry, and were ignored.",
}
GAUGES = {
    "pressure": "1 while the latest decision was under pressure.",
    "working_set_bytes": "Estimated reuse working set per rank (Eq. 5).",
    "active_pool_tasks": "A: tasks with a first lookup in the activity window.",
    "mean_prompt_tokens": "Mean length of the latest first-looked-up prompts.",
    "tier_capacity_bytes": "C_H: host tier capacity per rank.",
    "tier_occupancy_ratio": "Registered chunks over the host tier's capacity in the latest report.",
    "tier_evicted_chunks_window": "Chunks evicted to make room in the latest report's window.",
    "report_age_s": "Seconds since the latest tier report was received, at the latest decision.",
    "remote_pressure": "1 while the remote tier's latest decision was under pressure. These five: with one only.",
    "remote_capacity_bytes": "The remote tier's capacity, divided by the ranks that share it; 0 while unknown.",
    "remote_occupancy_ratio": "Used memory over the remote tier's capacity in its latest report.",
    "remote_evicted_chunks_window": "Chunks that the remote tier evicted in its latest report's window.",
    "remote_report_age_s": "Seconds since the remote tier's latest report, at the latest decision.",
    "pool_active_tasks": "A of the pool: distinct active tasks of all engines. These three: transport redis only.",
    "pool_mean_prompt_tokens": "N of the pool: the engines' means, weighted by their lookups.",
    "pool_engines": "Engines that the pool's A and N come from; 1 while no other is heard.",
    "telemetry_redis_up": "1 while telemetry is heard from Redis.",
}


class ConnectorStats(KVConnectorStats):
    """Counter increments and latest gauge values, as they travel from process to process.

    Under "lmcache" may be what LMCache's own connector collected: lists of values.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {"counters": {}, "gauges": {}}

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        counters = Tally(self.data["counters"])
        counters.update(other.data["counters"])
        added: dict[str, Any] = {
            "counters": dict(counters),
            "gauges": {**self.data["gauges"], **other.data["gauges"]},
        }
        ours, theirs = self.data.get("lmcache"), other.data.get("lmcache")
        if ours or theirs:
            ours, theirs = ours or {}, theirs or {}
            added["lmcache"] = {name: [*ours.get(name, ()), *theirs.get(name, ())] for name in {**ours, **theirs}}
        return ConnectorStats(added)

    def reduce(self) -> dict[str, int | float]:
        return {**self.data["counters"], **self.data["gauges"]}

    def is_empty(self) -> bool:
        return not (self.data["counters"] or self.data["gauges"] or self.data.get("lmcache"))


class StatsCollector:
    """Collects where things happen; for any thread, as LMCache evicts and restores on threads of its own."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._gauges_set: dict[str, float] = {}
        self._decisions: list[tuple[Decision, Decision | None]] = []
        self._lock = threading.Lock()

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def set_gauges(self, gauges: dict[str, float]) -> None:
        """Replaces what was set of the same names."""
        with self._lock:
            self._gauges_set.update(gauges)

    def add_decision(self, decision: Decision, remote: Decision | None = None) -> None:
        """Counted when the statistics are taken, so that a lookup does not wait for it.

        Args:
            remote: the remote tier's, if there is one.
        """
        self._decisions.append((decision, remote))

    def take(self) -> ConnectorStats | None:
        """Hand over what was collected since the last call; None if nothing was."""
        # Every engine step waits for this. What another thread adds meanwhile goes with the next one.
        if not (self._decisions or self._counters or self._gauges_set):
            return None
        decisions, self._decisions = self._decisions, []
        counters: dict[str, int] = {}
        gauges: dict[str, float] = {}
        if self._counters or self._gauges_set:
            with self._lock:
                counters, self._counters = self._counters, {}
                gauges, self._gauges_set = self._gauges_set, {}
        for decision, remote in decisions:
            _count(counters, decision)
            if remote is not None:
                _count_remote(counters, remote)
        if decisions:
            _set_gauges(gauges, *decisions[-1])
        return ConnectorStats({"counters": counters, "gauges": gauges})


def _add(counters: dict[str, int], name: str, amount: int = 1) -> None:
    counters[name] = counters.get(name, 0) + amount


def _count(counters: dict[str, int], decision: Decision) -> None:
    # An outcome is its text.
    _add(counters, "decisions." + decision.outcome)
    if decision.pressure:
        _add(counters, "decisions_pressure")
    if decision.estimate_above:
        _add(counters, "decisions_estimate_above")
    if decision.full_and_evicting:
        _add(counters, "decisions_full_and_evicting")
    if decision.full_and_evicting is None:
        _add(counters, "decisions_stale_report")
    if not decision.save:
        _add(counters, "declined_chunks", decision.new_full_chunks)


def _count_remote(counters: dict[str, int], decision: Decision) -> None:
    _add(counters, "remote_decisions." + decision.outcome)
    if decision.pressure:
        _add(counters, "remote_decisions_pressure")
    if not decision.save:
        _add(counters, "remote_declined_chunks", decision.new_full_chunks)


def _set_gauges(gauges: dict[str, float], decision: Decision, remote: Decision | None) -> None:
    estimate = decision.estimate
    gauges["pressure"] = 1.0 if decision.pressure else 0.0
    gauges["working_set_bytes"] = estimate.bytes
    gauges["active_pool_tasks"] = estimate.active_pool
    gauges["mean_prompt_tokens"] = estimate.mean_prompt_tokens
    _set_gauges_of_tier(gauges, decision, "tier_", "")
    if remote is not None:
        gauges["remote_pressure"] = 1.0 if remote.pressure else 0.0
        _set_gauges_of_tier(gauges, remote, "remote_", "remote_")


def _set_gauges_of_tier(gauges: dict[str, float], decision: Decision, tier: str, report: str) -> None:
    """What is known of a tier, under names with these prefixes."""
    if decision.capacity_bytes is not None:
        gauges[tier + "capacity_bytes"] = decision.capacity_bytes
    if decision.tier_report is not None and decision.report_age_s is not None:
        gauges[tier + "occupancy_ratio"] = decision.tier_report.occupancy
        gauges[tier + "evicted_chunks_window"] = decision.tier_report.evicted_chunks
        gauges[report + "report_age_s"] = decision.report_age_s


#: What is registered in this process. Several engines of one process have one registry.
_registered: list[Any] = []


def _unregister() -> None:
    """As vLLM does with metrics named `vllm:` when it makes its loggers anew: for a second engine in a process, or for
    another number of engines (elastic scaling)."""
    while _registered:
        with suppress(KeyError):  # not there: another registry's, as Ray's
            REGISTRY.unregister(_registered.pop())


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Registers every metric up front, so that a dashboard shows zeros before the first request.

    Args:
        lmcache: the metrics of LMCache's own connector, where it has any.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        lmcache: KVConnectorPromMetrics | None = None,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._lmcache = lmcache
        _unregister()

        def counter(name: str, help_text: str, labelnames: list[str]) -> Any:
            _registered.append(metric_types[Counter](_PREFIX + name, help_text, labelnames=labelnames))
            return _registered[-1]

        def gauge(name: str, help_text: str) -> Any:
            made = metric_types[Gauge](_PREFIX + name, help_text, labelnames=labelnames, multiprocess_mode="mostrecent")
            _registered.append(made)
            return made

        self._counters: dict[str, dict[int, Any]] = {}
        for name, help_text in OUTCOME_COUNTERS.items():
            outcomes = counter(name, help_text, [*labelnames, "outcome"])
            self._counters |= {
                f"{name}.{outcome.value}": {
                    engine: outcomes.labels(*values, outcome.value) for engine, values in per_engine_labelvalues.items()
                }
                for outcome in Outcome
            }
        plain = {**DECISION_COUNTERS, **REMOTE_COUNTERS, **WORKER_COUNTERS, **TELEMETRY_COUNTERS}
        for name, help_text in plain.items():
            self._counters[name] = self._per_engine(counter(name, help_text, labelnames))
        self._gauges = {name: self._per_engine(gauge(name, help_text)) for name, help_text in GAUGES.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data["counters"].items():
            self._counters[name][engine_idx].inc(amount)
        for name, value in transfer_stats_data["gauges"].items():
            self._gauges[name][engine_idx].set(value)
        if self._lmcache is not None and "lmcache" in transfer_stats_data:
            self._lmcache.observe(transfer_stats_data["lmcache"], engine_idx)

    def _per_engine(self, metric: Counter | Gauge) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
