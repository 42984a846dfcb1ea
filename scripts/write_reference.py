"""Writes docs/configuration.md from the option model.

python scripts/write_reference.py
"""

from __future__ import annotations

from pathlib import Path

from efficient_lmcache.connector.options import PREFIX, ConnectorOptions, allowed_values, option_names

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

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
read from them. Two secrets come from the environment: `EFFICIENT_LMCACHE_REDIS_PASSWORD`, and
`EFFICIENT_LMCACHE_TENANT_KEY` for the digests of `cache_salt` ([isolation](isolation.md)).

| option | default | allowed | meaning |
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


if __name__ == "__main__":
    PAGE.write_text(configuration())
