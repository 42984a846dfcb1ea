"""Every internal of LMCache 0.5.6 that server mode relies on, as the installed version has it (`test_upstream.py`)."""

from __future__ import annotations

import pytest
from upstream import parameters, source

pytestmark = pytest.mark.integration

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")


def test_the_connector_hooks_that_we_override_exist_with_these_arguments():
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    expected = {
        "__init__": ["self", "vllm_config", "role", "kv_cache_config"],
        "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "build_connector_meta": ["self", "scheduler_output"],
        "on_new_request": ["self", "request"],
        "request_finished": ["self", "request", "block_ids"],
        "get_kv_connector_stats": ["self"],
        "shutdown": ["self"],
    }
    for name, arguments in expected.items():
        assert parameters(getattr(LMCacheMPConnector, name)) == arguments, name
    # With several cache groups, the end of a request comes this way.
    assert "self.request_finished(" in source(LMCacheMPConnector.request_finished_all_groups)


def test_a_lookup_is_resolved_once_it_is_not_none_and_its_match_is_on_the_tracker():
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    body = source(LMCacheMPConnector.get_num_new_matched_tokens)
    assert "return None, True" in body
    assert "tracker.num_lmcache_hit_tokens = ret" in body
    assert "self.request_trackers: dict[str, LMCacheMPRequestTracker] = {}" in source(LMCacheMPConnector.__init__)


def test_what_a_client_asks_of_a_request_without_a_tracker_raises_when_it_ends():
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    body = source(LMCacheMPConnector.request_finished)
    asked = body.index('"cached_token_stats" in params')
    assert asked < body.index("self._get_request_tracker(request.request_id)")
    assert "assert request_id in self.request_trackers" in source(LMCacheMPConnector._get_request_tracker)


def test_a_lookup_stays_locked_when_its_session_ends_and_only_what_it_locked_is_unlocked():
    """`ServerSide.release_unscheduled` unlocks it; once LMCache does, that can go."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter
    from lmcache.v1.multiprocess.modules.lookup import LookupModule

    assert "free_lookup_locks" not in source(LMCacheMPConnector.request_finished)
    assert "finish_read_prefetched(" not in source(LookupModule.end_session)
    unlocks = source(LookupModule.free_lookup_locks)
    assert "hit_chunks = session.prefetch_hit_chunks" in unlocks
    assert "if hit_chunks < 0" in unlocks
    assert "self._pending_lookups.discard(request_id)" in source(LMCacheMPSchedulerAdapter.cleanup_lookup_result)
    assert parameters(LMCacheMPSchedulerAdapter.free_lookup_locks) == [
        "self",
        "token_ids",
        "start",
        "end",
        "request_id",
        "cache_salt",
        "request_configs",
    ]
    assert "PREFETCHING" in LMCacheMPRequestState.__members__


def test_stores_of_a_request_end_at_its_trackers_limit_before_lazy_offload_sees_them():
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata

    body = " ".join(source(LMCacheMPRequestMetadata.GetStoreMetadata).split())
    assert "if tracker.max_offload_tokens is not None: min_available_tokens = min(" in body
    for step in (LMCacheMPConnector._process_new_requests, LMCacheMPConnector._process_cached_requests):
        steps = source(step)
        assert steps.index("GetStoreMetadata") < steps.index("self._lazy_offload_manager.add_store_candidate(r_meta)")


def test_a_preempted_request_gets_a_new_tracker_and_is_looked_up_again():
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    body = source(LMCacheMPConnector._get_or_create_request_tracker)
    assert "RequestStatus.PREEMPTED" in body
    assert "LMCacheMPRequestTracker(request)" in body


def test_keys_have_the_salt_that_a_tracker_has():
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata

    assert "cache_salt=tracker.cache_salt" in source(LMCacheMPConnector.get_num_new_matched_tokens)
    for metadata in (LMCacheMPRequestMetadata.GetStoreMetadata, LMCacheMPRequestMetadata.GetRetrieveMetadata):
        assert "cache_salt=tracker.cache_salt" in source(metadata)


def test_the_end_of_a_store_is_reported_for_every_request_that_ended_restored_or_not():
    """`AbortedRestores` keeps some of them from vLLM; once LMCache does, it can go."""
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
    from vllm.v1.core.sched.scheduler import Scheduler

    ends = source(LMCacheMPWorkerAdapter._process_finished_stores)
    assert "retrieve" not in ends
    assert "ret_stores.add(req_id)" in ends
    # Once, where the server is not there.
    assert source(LMCacheMPWorkerAdapter.get_finished).count("ret_stores -= finished_retrieves") == 1
    hears = source(Scheduler._update_from_kv_xfer_finished)
    assert hears.index("self.connector.update_connector_output(") < hears.index("kv_connector_output.finished_recving")
    assert hears.index("kv_connector_output.finished_recving") < hears.index("kv_connector_output.finished_sending")
    assert hears.count("assert req_id in self.requests") == 2


def test_several_connectors_statistics_are_found_by_the_name_that_ours_is_registered_under():
    """vLLM's MultiConnector would end the engine, and the API server, at the first ones otherwise."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from efficient_lmcache.connector import plugin
    from efficient_lmcache.connector.connector import EfficientLMCacheConnector
    from efficient_lmcache.connector.server_connector import EfficientLMCacheMPConnector, ServerConnector

    plugin.register()
    found = {
        EfficientLMCacheConnector: EfficientLMCacheConnector,
        ServerConnector: EfficientLMCacheConnector,
        EfficientLMCacheMPConnector: EfficientLMCacheMPConnector,
    }
    for connector, registered in found.items():
        name = connector.__name__
        assert KVConnectorFactory.get_connector_class_by_name(name) is registered
        taken = {name: {"counters": {"stored_tokens": 2}, "gauges": {}}}
        stats = MultiConnector.build_kv_connector_stats(taken)
        assert stats is not None
        assert stats.reduce() == {name: {"stored_tokens": 2}}


def test_vllm_asks_a_connectors_class_for_several_groups_of_kv_caches_and_lmcaches_class_can():
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

    assert "supports_hma(connector_cls)" in source(KVConnectorFactory.supports_hma_config)
    assert issubclass(LMCacheMPConnector, SupportsHMA)
    assert "self._group_tokens_per_block = group_tokens_per_block" in source(LMCacheMPConnector.__init__)
    assert "kv_cache_groups" in KVCacheConfig.__dataclass_fields__
    assert {"layer_names", "kv_cache_spec"} <= set(KVCacheGroupSpec.__dataclass_fields__)
    assert isinstance(KVCacheSpec.page_size_bytes, property)


def test_what_workers_are_told_to_copy_has_a_direction_and_a_range():
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPConnectorMetadata, LMCacheMPRequestMetadata
    from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

    assert LMCacheMPConnectorMetadata().requests == []
    assert {"request_id", "direction", "op"} <= set(LMCacheMPRequestMetadata.__dataclass_fields__)
    assert {"start", "end", "skip_first_n_tokens"} <= set(LoadStoreOp.__dataclass_fields__)


def test_the_scheduler_knows_its_servers_their_chunks_and_how_many_pieces_a_chunk_has():
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter, ParallelStrategy

    body = source(LMCacheMPSchedulerAdapter.__init__)
    for name in ("self._server_urls", "self.lmcache_tokens_per_chunk", "self.parallel_strategy"):
        assert name in body, name
    ranks = {"vllm_world_size": 4, "vllm_worker_id": 0, "tp_size": 4, "pp_size": 1}
    assert ParallelStrategy(mla_only=False, n_servers=1, **ranks).kv_world_size == 4
    assert ParallelStrategy(mla_only=False, n_servers=2, **ranks).kv_world_size == 2
    assert ParallelStrategy(mla_only=True, n_servers=1, **ranks).kv_world_size == 1


def test_what_lmcaches_connector_collects_is_lists_of_values():
    from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats, LMCacheMPPromMetrics

    stats = LMCacheMPConnectorStats()
    stats.record_lookup(0.5)
    assert all(isinstance(values, list) for values in stats.data.values())
    assert parameters(LMCacheMPPromMetrics.observe) == ["self", "transfer_stats_data", "engine_idx"]


def test_the_servers_memory_is_evicted_by_watermark_and_its_counters_tell_evictions_apart():
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.distributed.storage_controllers.eviction_controller import L1EvictionController
    from lmcache.v1.mp_observability.subscribers.metrics.l1 import L1MetricsSubscriber
    from lmcache.v1.mp_observability.subscribers.metrics.l1_eviction_loop import L1EvictionLoopSubscriber

    loop = source(L1EvictionController.eviction_loop)
    assert "usage = 0 if total_bytes == 0 else used_bytes / total_bytes" in loop
    # Removals are counted before the loop says that it evicted.
    assert loop.index("self.execute_eviction_action(action)") < loop.index("self._publish_triggered(")
    # A cleared cache counts as evicted.
    assert "L1_KEYS_EVICTED" in source(L1Manager._free_and_report_deleted)
    assert "lmcache_mp.l1_evicted" in source(L1MetricsSubscriber)
    assert "lmcache_mp.l1_eviction_loop_triggered" in source(L1EvictionLoopSubscriber)


def test_the_server_answers_http_on_port_8080_unless_told_otherwise():
    from lmcache.v1.multiprocess.config import DEFAULT_HTTP_FRONTEND_CONFIG

    from efficient_lmcache.connector.lmcache_server_adapter import DEFAULT_HTTP_PORT

    assert DEFAULT_HTTP_FRONTEND_CONFIG.http_port == DEFAULT_HTTP_PORT
