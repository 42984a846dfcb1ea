"""The cluster view for Prometheus: one scrape shows every engine of a deployment that is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from efficient_lmcache.telemetry.status import ClusterStatus

_PREFIX = "efficient_lmcache:cluster_"

#: Of every rank, by the names of `EngineStatus.record()`.
RANK_GAUGES = {
    "tier_occupancy_ratio": "Registered chunks over the host tier's capacity.",
    "tier_registered_chunks": "Chunks that a lookup can find.",
    "tier_capacity_chunks": "Full chunks that the host tier can hold.",
    "tier_capacity_bytes": "C_H: host tier capacity of the rank.",
    "tier_capacity_tokens": "Tokens that the host tier can hold, in full chunks; ranks hold shards of the same ones.",
    "tier_evicted_chunks_window": "Chunks evicted to make room in the report's window.",
    "pressure": "1 while the engine's latest decision was under pressure.",
    "active_pool_tasks": "A as the engine alone sees it.",
    "mean_prompt_tokens": "N as the engine alone sees it.",
    "age_s": "Seconds since the engine was heard; the older of its report and its observation.",
}
RANK_COUNTERS = {"tier_evicted_chunks": "Chunks evicted to make room since the tier started."}
#: Of the deployment, by the names of `ClusterStatus.record()["pool"]`.
POOL_GAUGES = {
    "engines": "Engines that are alive.",
    "engines_under_pressure": "Those whose latest decision was under pressure.",
    "active_tasks": "A of the pool: distinct active tasks of all engines.",
    "mean_prompt_tokens": "N of the pool: the engines' means, weighted by their lookups.",
}
REDIS_UP = ("redis_up", "1 while the exporter hears Redis.")
BAD_MESSAGES = ("bad_messages", "Messages that were no telemetry, and were ignored.")


def in_plain_text(app: Any) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """`app`, as if nobody asked for OpenMetrics, in which prometheus_client writes colons of names as underscores."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        body: Iterable[bytes] = app(environ, start_response)
        return body

    return answer


class ClusterCollector(Collector):
    """Asks for the status at every scrape. An engine that is not in it has no series, rather than old ones."""

    def __init__(self, deployment: str, status: Callable[[], ClusterStatus], is_connected: Callable[[], bool]) -> None:
        self._deployment = deployment
        self._status = status
        self._is_connected = is_connected

    def collect(self) -> Iterable[Metric]:
        record: dict[str, Any] = self._status().record(self._deployment)
        labels = ["deployment", "engine", "rank"]
        for name, text in RANK_GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
            self._add_ranks(gauge, record["engines"], name)
            yield gauge
        for name, text in RANK_COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            self._add_ranks(counter, record["engines"], f"{name}_total")
            yield counter
        pool = {f"pool_{name}": (record["pool"][name], text) for name, text in POOL_GAUGES.items()}
        pool[REDIS_UP[0]] = (self._is_connected(), REDIS_UP[1])
        for name, (value, text) in pool.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=labels[:1])
            gauge.add_metric([self._deployment], float(value))
            yield gauge
        bad = CounterMetricFamily(_PREFIX + BAD_MESSAGES[0], BAD_MESSAGES[1], labels=labels[:1])
        bad.add_metric([self._deployment], record["bad_messages"])
        yield bad

    def describe(self) -> Iterable[Metric]:
        """Registering must not wait for a status."""
        return []

    def _add_ranks(self, metric: Any, engines: list[dict[str, Any]], name: str) -> None:
        for row in engines:
            if row[name] is not None:
                metric.add_metric([self._deployment, row["engine"], str(row["rank"])], float(row[name]))
