"""Writes docs/configuration.md and docs/metrics.md from the option model and the metric definitions.

python scripts/write_reference.py
"""

from __future__ import annotations

from pathlib import Path

from efficient_lmcache.connector.metrics import DECISION_COUNTERS, GAUGES, TELEMETRY_COUNTERS, WORKER_COUNTERS
from efficient_lmcache.connector.options import PREFIX, ConnectorOptions, allowed_values, option_names
from efficient_lmcache.core.admission import Outcome
from efficient_lmcache.telemetry.exporter import BAD_MESSAGES, POOL_GAUGES, RANK_COUNTERS, RANK_GAUGES, REDIS_UP

DOCS = Path(__file__).parents[1] / "docs"

_CONFIGURATION = """# Configuration

<!-- Written by scripts/write_reference.py; edit efficient_lmcache/connector/options.py. -->

Options of the connector go into `kv_connector_extra_config`. They are checked before the engine starts: an unknown
key or a value out of range stops it with one message that names key, value and what is allowed.

```bash
vllm serve MODEL --kv-transfer-config '{
  "kv_connector": "EfficientLMCacheConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"efficient.admission": "conditioned", "efficient.write_threshold_chunks": 8}}'
```

Everything else is configured where it always was: LMCache through its YAML file, its `LMCACHE_*` variables or
`lmcache.*` keys beside these, vLLM through its own options. The footprint, the chunk size and the tier's capacity are
read from them.

| option | default | allowed | meaning |
|---|---|---|---|
"""

_METRICS = """# Metrics

<!-- Written by scripts/write_reference.py; edit efficient_lmcache/connector/metrics.py and telemetry/exporter.py. -->

They appear in vLLM's own `/metrics`, with vLLM's labels (`model_name`, `engine`). What workers count is per rank,
as the first rank sees it: ranks hold shards of the same tokens. Every counter is there from the start, at zero.

| metric | kind | meaning |
|---|---|---|
"""

_CLUSTER_METRICS = """
## Of a deployment

`efficient-lmcache telemetry export` serves these, from what engines with `efficient.telemetry.transport: redis` say. An
engine that has been silent for 10 s (`--max-age`) has no series.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def configuration() -> str:
    """docs/configuration.md."""
    rows = [
        f"| `{PREFIX}{name}` | `{'null' if field.default is None else field.default}` | {allowed_values(name)} "
        f"| {field.description} |"
        for name, field in ((name, ConnectorOptions.model_fields[field]) for name, field in option_names().items())
    ]
    return _CONFIGURATION + "\n".join(rows) + "\n"


def metrics() -> str:
    """docs/metrics.md."""
    outcomes = ", ".join(f"`{outcome.value}`" for outcome in Outcome)
    rows = [f"| `efficient_lmcache:decisions_total` | counter | Admission decisions by `outcome`: {outcomes}. |"]
    for name, text in {**DECISION_COUNTERS, **WORKER_COUNTERS, **TELEMETRY_COUNTERS}.items():
        rows.append(f"| `efficient_lmcache:{name}_total` | counter | {text} |")
    rows += [f"| `efficient_lmcache:{name}` | gauge | {text} |" for name, text in GAUGES.items()]
    return _METRICS + "\n".join(rows) + "\n" + _CLUSTER_METRICS + "\n".join(_cluster_rows()) + "\n"


def _cluster_rows() -> list[str]:
    of_rank, of_pool = "`deployment`, `engine`, `rank`", "`deployment`"
    metrics = [
        *((name, "gauge", of_rank, text) for name, text in RANK_GAUGES.items()),
        *((f"{name}_total", "counter", of_rank, text) for name, text in RANK_COUNTERS.items()),
        *((f"pool_{name}", "gauge", of_pool, text) for name, text in POOL_GAUGES.items()),
        (REDIS_UP[0], "gauge", of_pool, REDIS_UP[1]),
        (f"{BAD_MESSAGES[0]}_total", "counter", of_pool, BAD_MESSAGES[1]),
    ]
    return [
        f"| `efficient_lmcache:cluster_{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in metrics
    ]


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration())
    (DOCS / "metrics.md").write_text(metrics())
