"""What vLLM loads: `--kv-transfer-config '{"kv_connector": "EfficientLMCacheConnector", "kv_role": "kv_both"}'`.

The name is registered by the `vllm.general_plugins` entry point (`plugin.register`). Where plugins are switched off,
`"kv_connector_module_path": "efficient_lmcache.connector"` loads the same class.

    connector.py         EfficientLMCacheConnector: LMCacheConnectorV1 and the calls into the modules below
    server_connector.py  what it makes instead in server mode: LMCacheMPConnector and the same calls; has a name, too
    options.py           the `efficient.*` options
    client_params.py     scheduler side: what clients send that LMCache cannot use
    isolation.py         scheduler side: what keeps requests apart that LMCache's keys do not
    admission.py         scheduler side: one decision per request, remembered until it ends
    aborted_restores.py  the same in server mode: of requests aborted while they are restored
    server_admission.py  the same in server mode, by the pool's A and N
    server_tier.py       an LMCache server's tier as one rank sees it
    offload.py           worker side: deduplicating store, transfer counts, tier probe and its publication
    telemetry.py         what either side publishes and hears, put together as the options say
    metrics.py           counters and gauges in vLLM's own /metrics
    vllm_adapter.py      every vLLM internal that is read or set
    lmcache_adapter.py   every LMCache internal that is read, set or wrapped
    cpu_transfer.py      paged KV <-> chunk copies on vLLM's CPU backend
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efficient_lmcache.connector.connector import EfficientLMCacheConnector

__all__ = ["EfficientLMCacheConnector"]


def __getattr__(name: str) -> Any:
    # Importing vLLM and LMCache takes seconds; whoever only reads options should not pay for it.
    if name == "EfficientLMCacheConnector":
        from efficient_lmcache.connector.connector import EfficientLMCacheConnector

        return EfficientLMCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
