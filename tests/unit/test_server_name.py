"""Server mode under a name of its own, for models whose layers form several groups of KV caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from efficient_lmcache.connector import plugin, vllm_adapter
from efficient_lmcache.connector.metrics import ConnectorStats
from efficient_lmcache.connector.options import OptionError
from efficient_lmcache.connector.server_connector import EfficientLMCacheMPConnector


def transfer_config(name: str) -> KVTransferConfig:
    plugin.register()
    return KVTransferConfig(kv_connector=name, kv_role="kv_both")


@pytest.mark.parametrize(
    ("name", "groups"), [("EfficientLMCacheMPConnector", True), ("EfficientLMCacheConnector", False)]
)
def test_vllm_keeps_its_hybrid_kv_cache_manager_for_server_modes_own_name_alone(name, groups):
    assert KVConnectorFactory.supports_hma_config(transfer_config(name)) is groups


def test_its_statistics_are_ours():
    plugin.register()
    named = KVConnectorFactory.get_connector_class_by_name(EfficientLMCacheMPConnector.__name__)
    assert named is EfficientLMCacheMPConnector
    stats = named.build_kv_connector_stats({"counters": {"stored_tokens": 2}, "gauges": {}})
    assert isinstance(stats, ConnectorStats)


def test_another_mode_is_an_error_that_names_what_is_allowed():
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"efficient.mode": "in_process"})
    )
    with pytest.raises(
        OptionError, match=r"efficient\.mode='in_process' .* EfficientLMCacheMPConnector; allowed: server"
    ):
        EfficientLMCacheMPConnector(config, KVConnectorRole.SCHEDULER, None)  # type: ignore[arg-type]


def test_what_a_token_takes_is_added_up_over_the_groups():
    def group(layers: int, page_bytes: int) -> Any:
        return SimpleNamespace(
            layer_names=[f"layer {layer}" for layer in range(layers)],
            kv_cache_spec=SimpleNamespace(page_size_bytes=page_bytes),
        )

    # Two attention layers of 256 bytes a token, six recurrent ones whose state is kept every 256 tokens, a scratch one.
    config: Any = SimpleNamespace(kv_cache_groups=[group(2, 4096), group(6, 8192), group(1, 999)])
    assert vllm_adapter.grouped_bytes_per_token(config, [16, 256, 0]) == 2 * 256 + 6 * 32
