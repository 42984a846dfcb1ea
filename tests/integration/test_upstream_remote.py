"""What `lmcache_remote_adapter` relies on, as the installed LMCache 0.5.6 has it; nothing of ours."""

from __future__ import annotations

import re

import pytest
from upstream import parameters, source

pytestmark = pytest.mark.integration

pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")


def test_a_store_takes_its_buffers_from_the_storage_manager_and_puts_them_there():
    from lmcache.v1.cache_engine import LMCacheEngine

    body = source(LMCacheEngine.store)
    assert "self.storage_manager.allocate(" in body
    assert "self.storage_manager.batched_put(" in body
    # The store then ends with what it has.
    assert "if memory_obj is None:" in body


def test_a_put_reaches_the_backends_of_its_manager_with_the_buffers_of_the_cpu_tiers_backend():
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    body = source(StorageManager.batched_put)
    assert "in self.storage_backends.items()" in body
    assert "memory_obj.ref_count_down()" in body
    # `_ManagerWith` stands in for the manager and must not be written to.
    assert not re.search(r"^\s+self\.\w+ = ", body, re.MULTILINE)
    assert "return self.local_cpu_backend" in source(RemoteBackend.get_allocator_backend)


def test_a_get_from_a_remote_tier_is_kept_if_the_manager_has_a_cpu_tier():
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    assert parameters(StorageManager.batched_get) == ["self", "keys", "location"]
    body = source(StorageManager.batched_get)
    assert '"LocalCPUBackend" in self.storage_backends' in body
    assert "in self.get_active_storage_backends(location)" in body
    assert "self.storage_manager.batched_get(" in source(LMCacheEngine._process_tokens_internal)


def test_remote_reads_take_their_buffers_from_the_cpu_tiers_backend():
    from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    assert "self.local_cpu_backend.allocate(" in source(RedisConnector._get)
    allocate = ["self", "shapes", "dtypes", "fmt", "eviction", "busy_loop"]
    assert parameters(LocalCPUBackend.allocate) == allocate


def test_stores_and_restores_bring_the_requests_configuration():
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    for name in ("start_load_kv", "wait_for_save"):
        assert "request_configs=request.request_configs," in source(getattr(LMCacheConnectorV1Impl, name)), name


def test_a_lookup_is_answered_in_four_bytes_through_a_transport_that_can_be_replaced():
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.lookup_client.hit_limit_lookup_client import HitLimitLookupClient
    from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient, LMCacheLookupServer

    server = source(LMCacheLookupServer)
    assert "self.lmcache_engine.lookup(" in server
    assert 'lookup_result.to_bytes(4, "big")' in server
    client = " ".join(source(LMCacheLookupClient.lookup).split())
    assert "lookup_id, request_configs_str, ]" in client
    assert "self.transport.send_and_recv_all(msg_buf)" in client
    assert 'int.from_bytes(resp, "big")' in client
    assert "self.lookup_pins[lookup_id] = block_mapping" in source(LMCacheEngine.lookup)
    assert "self.actual_lookup_client" in source(HitLimitLookupClient.__init__)


def test_an_allocator_reports_to_statistics_that_can_be_replaced():
    from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
    from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator

    assert parameters(MixedMemoryAllocator.allocate)[:4] == ["self", "shapes", "dtypes", "fmt"]
    assert "self.pin_allocator = TensorMemoryAllocator(" in source(MixedMemoryAllocator.__init__)
    called = set(re.findall(r"self\.stats_monitor\.(\w+)\(", source(TensorMemoryAllocator)))
    assert called == {"update_local_cache_usage", "update_active_memory_objs_count"}


def test_redis_holds_a_chunk_under_two_keys():
    from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector

    assert source(RedisConnector._put).count("self.connection.set(key_str + ") == 2


def test_the_connector_for_resp_holds_it_under_one_and_has_its_login_in_these_places():
    from lmcache.v1.storage_backend.connector.redis_adapter import RESPConnectorAdapter
    from lmcache.v1.storage_backend.connector.redis_connector import RESPConnector

    assert source(RESPConnector._put).count("self.client.set(key_str, ") == 1
    body = source(RESPConnectorAdapter.create_connector)
    for place in ('extra_config.get("username"', '"LMCACHE_RESP_USERNAME"', '"LMCACHE_RESP_PASSWORD"'):
        assert place in body, place


def test_the_scheduler_knows_which_tiers_there_are_and_how_many_ranks_store():
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend import CreateStorageBackends

    config = LMCacheEngineConfig.from_defaults()
    behind = ("remote_url", "remote_storage_plugins", "local_disk", "gds_path", "maru_path", "storage_plugins")
    assert [getattr(config, name) for name in behind] == [None] * len(behind)
    assert config.max_local_disk_size == 0
    assert '"enable_nixl_storage"' in source(CreateStorageBackends)
    assert isinstance(LMCacheConnectorV1Impl.lmcache_engine_metadata, property)
    assert {"world_size", "use_mla"} <= set(LMCacheMetadata.__dataclass_fields__)


def test_a_disk_is_reached_through_the_cpu_tiers_buffers():
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    assert "return self.local_cpu_backend" in source(LocalDiskBackend.get_allocator_backend)
    for read in (LocalDiskBackend.batched_get_blocking, LocalDiskBackend.load_bytes_from_disk):
        assert "self.local_cpu_backend.allocate(" in source(read)
