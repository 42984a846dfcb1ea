"""Writes docs/metrics.md from the metrics that an engine's connector and the exporter register.

python scripts/write_metrics_reference.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from efficient_lmcache.connector.metrics import ConnectorPromMetrics
from efficient_lmcache.core.observation import Observation
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.cluster import ClusterView
from efficient_lmcache.telemetry.exporter import ClusterCollector
from efficient_lmcache.telemetry.status import ClusterStatus, EngineStatus, cluster_status

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
CHART = ROOT / "deploy/helm/efficient-lmcache"

_HEAD = """# Metrics

<!-- Written by scripts/write_metrics_reference.py from what is registered; edit efficient_lmcache/connector/metrics.py
and efficient_lmcache/telemetry/exporter.py, then run it: python scripts/write_metrics_reference.py -->

This page is written from the metrics that the code registers, by `python scripts/write_metrics_reference.py`; a test
fails while it is older than they are. A ratio is between 0 and 1.
What to do about a value: [operations](operations.md).

## Of an engine

They appear in vLLM's own `/metrics`. What workers count is per rank, as the [first rank](ranks.md) sees it: ranks hold
shards of the same tokens. Every metric is there from the start, at zero. vLLM takes metrics from an engine when it
steps, so that an idle engine shows its last ones.

"""
_CLUSTER = """
## Of a deployment

`efficient-lmcache telemetry export` serves these, from what engines with `efficient.telemetry.transport: redis` say. An
engine that has been silent for 10 s (`--max-age`) has no series.

"""
_VLLM = """
## vLLM's own, in the dashboard and the alerts

What they mean is vLLM's to say (0.32 here).

| metric | where |
|---|---|
"""
_TABLE = "| metric | kind | unit | labels | meaning |\n|---|---|---|---|---|\n"
#: Words of names that say what is counted; a name without one is a flag, or has no unit.
_UNITS = {
    noun: noun for noun in ("bytes", "tokens", "chunks", "tasks", "engines", "messages", "decisions", "stores", "ratio")
}
_UNITS["s"] = "seconds"
_FLAGS = {"pressure", "up"}
#: Whose series a sample is, and not what it says.
_TARGET_LABELS = {"model_name", "engine", "deployment", "rank"}


@dataclass(frozen=True, slots=True)
class Row:
    """A metric as Prometheus scrapes it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """By the last word of the name that says one."""
        words = self.name.partition(":")[2].split("_")
        units = [_UNITS[word] for word in words if word in _UNITS]
        return units[-1] if units else "0 or 1" if _FLAGS & set(words) else "–"

    def markdown(self) -> str:
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.kind} | {self.unit} | {labels} | {self.meaning} |\n"


def engine_rows() -> list[Row]:
    """What the connector registers in the API server's process."""
    registry = CollectorRegistry()
    types: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    ConnectorPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {0: ["m", "0"]})
    return [_row(metric) for metric in registry.collect()]


def cluster_rows() -> list[Row]:
    """What the exporter shows of an engine that has said everything."""
    tier = TierReport("e", 1, 256, 262_144, 1, 2, 0, 0)
    seen = Observation("e", 1, 60.0, (1,), 1, 1, 1, 256, pressure=False)
    alone = cluster_status(ClusterView(), 1.0)
    status = ClusterStatus((EngineStatus("e", 0, tier, seen, 0.0),), alone.pool, 0)
    return [_row(metric) for metric in ClusterCollector("d", lambda: status, lambda: True).collect()]


def _row(metric: Metric) -> Row:
    """Raises ValueError for a metric that a scrape before the first request would not show."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    if not samples:
        raise ValueError(f"{name} has no series from the start; set its labels where it is registered")
    meaning = metric.documentation
    for label in samples[0].labels.keys() - _TARGET_LABELS:
        values = dict.fromkeys(f"`{sample.labels[label]}`" for sample in samples)
        meaning += f" `{label}`: {', '.join(values)}."
    return Row(name, metric.type, tuple(samples[0].labels), meaning)


def vllm_uses() -> dict[str, list[str]]:
    """The panels and alerts that ask for a metric of vLLM's."""
    panels = json.loads((CHART / "dashboards/efficient-lmcache.json").read_text())["panels"]
    queries = {panel["title"]: " ".join(target["expr"] for target in panel.get("targets", [])) for panel in panels}
    groups = yaml.safe_load((CHART / "alerts/rules.yaml").read_text())["groups"]
    queries |= {f"alert `{rule['alert']}`": rule["expr"] for group in groups for rule in group["rules"]}
    uses: dict[str, list[str]] = {}
    for where, query in queries.items():
        for name in dict.fromkeys(re.findall(r"\bvllm:\w+", query)):
            uses.setdefault(name, []).append(where)
    return dict(sorted(uses.items()))


def page() -> str:
    """docs/metrics.md."""
    vllm = [f"| `{name}` | {', '.join(where)} |\n" for name, where in vllm_uses().items()]
    return _HEAD + _table(engine_rows()) + _CLUSTER + _table(cluster_rows()) + _VLLM + "".join(vllm)


def _table(rows: Iterable[Row]) -> str:
    return _TABLE + "".join(row.markdown() for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
