"""Every internal of vLLM 0.32 and LMCache 0.5.6 that the adapters rely on, as the installed versions have it.

These tests say nothing about our code. When one fails after an upgrade, the adapter of that side needs a look.
"""

from __future__ import annotations

import re

import pytest
from upstream import parameters, source

pytestmark = pytest.mark.integration

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")


#: Every hook that vLLM may call of a connector. In-process and in server mode the ones below are ours, with LMCache's
#: behind them; all others are LMCache's or vLLM's defaults, by inheritance.
HOOKS = {
    "bind_connector_metadata",
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "build_connector_meta",
    "build_connector_worker_meta",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "clear_connector_metadata",
    "finish_forward",
    "get_block_ids_with_load_errors",
    "get_external_cache_hit_sources",
    "get_finished",
    "get_finished_count",
    "get_handshake_metadata",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "get_num_new_matched_tokens",
    "get_required_kvcache_layout",
    "get_transfer_results",
    "handle_preemptions",
    "has_connector_metadata",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "register_finished_partial_tail",
    "register_kv_caches",
    "request_finished",
    "requires_kv_delivery",
    "requires_piecewise_for_cudagraph",
    "reset_cache",
    "reset_capture_state",
    "role",
    "save_kv_layer",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "shutdown",
    "start_load_kv",
    "supports_divergent_local_hybrid_hits",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
}
#: What vLLM asks of a class, of ours in either mode, and not of an object.
CLASS_HOOKS = {
    "build_kv_connector_stats",
    "build_prom_metrics",
    "get_required_kvcache_layout",
    "requires_piecewise_for_cudagraph",
}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


class TestVLLM:
    def test_versions_are_the_pinned_pair(self):
        import vllm

        assert vllm.__version__.startswith("0.32.")

    def test_the_factory_registers_by_name_and_passes_three_arguments(self):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        assert parameters(KVConnectorFactory.register_connector) == ["name", "module_path", "class_name"]
        assert isinstance(KVConnectorFactory._registry, dict)

    def test_the_connector_hooks_that_we_override_exist_with_these_arguments(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

        expected = {
            "__init__": ["self", "vllm_config", "role", "kv_cache_config"],
            "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
            "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
            "on_new_request": ["self", "request"],
            "build_connector_meta": ["self", "scheduler_output"],
            "request_finished": ["self", "request", "block_ids"],
            "register_kv_caches": ["self", "kv_caches"],
            "get_finished": ["self", "finished_req_ids"],
        }
        for name, arguments in expected.items():
            assert parameters(getattr(LMCacheConnectorV1, name)) == arguments, name
        for name in ("get_kv_connector_stats", "build_kv_connector_stats", "build_prom_metrics", "shutdown"):
            assert hasattr(KVConnectorBase_V1, name), name
        assert "self._lmcache_engine = cls(" in source(LMCacheConnectorV1.__init__)

    def test_a_connector_has_no_hook_that_nobody_has_thought_of(self):
        from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

        assert public(KVConnectorBase_V1) == HOOKS
        assert public(LMCacheConnectorV1) <= HOOKS
        # What a connector says that handles several groups of KV caches, and an option of LMCache's.
        beyond = {"request_finished_all_groups", "transfer_intermediate_tensors"}
        assert public(LMCacheMPConnector) <= HOOKS | beyond

    def test_what_vllm_asks_of_a_class_has_the_same_answer_in_either_mode(self):
        from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

        of_classes = {name for name, hook in vars(KVConnectorBase_V1).items() if isinstance(hook, classmethod)}
        assert of_classes == CLASS_HOOKS
        for connector in (LMCacheConnectorV1, LMCacheMPConnector):
            assert connector.get_required_kvcache_layout(None) is None
            assert connector.requires_piecewise_for_cudagraph({}) is False

    def test_statistics_of_scheduler_and_workers_are_collected_and_added_up(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
        from vllm.v1.core.sched.scheduler import Scheduler

        assert "self.connector.get_kv_connector_stats()" in source(Scheduler)
        for name in ("aggregate", "reduce", "is_empty", "reset", "to_dict"):
            assert hasattr(KVConnectorStats, name), name
        assert parameters(KVConnectorPromMetrics.observe) == ["self", "transfer_stats_data", "engine_idx"]

    def test_a_request_has_what_admission_reads_and_its_parameters_reach_the_connector(self):
        from vllm.v1.core.sched.output import NewRequestData
        from vllm.v1.request import Request

        body = source(Request)
        for name in ("block_hashes", "cache_salt", "kv_transfer_params", "num_prompt_tokens", "prompt_token_ids"):
            assert f"self.{name}" in body, name
        assert "sampling_params=request.sampling_params" in source(NewRequestData.from_request)

    def test_adapters_and_embeddings_are_told_apart_by_what_the_connector_reads(self):
        from vllm.lora.request import LoRARequest
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
        from vllm.v1.request import Request

        assert '[("lora", lora_request.lora_name, lora_request.lora_path)]' in source(
            kv_cache_utils._gen_lora_extra_hash_keys
        )
        assert {"lora_name", "lora_path"} <= set(LoRARequest.__struct_fields__)
        body = source(Request)
        assert "self.prompt_embeds = prompt_embeds" in body
        assert "[0] * self.num_prompt_tokens" in body
        assert {"prompt_token_ids", "prompt_embeds"} <= set(NewRequestData.__dataclass_fields__)
        assert isinstance(NewRequestData.prompt_len, property)
        assert "resumed_req_ids" in CachedRequestData.__dataclass_fields__

    def test_several_connectors_statistics_are_filed_under_their_classes_names(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        assert "connector_id = c.__class__.__name__" in source(MultiConnector.get_kv_connector_stats)
        assert "get_connector_class_by_name(" in source(MultiConnector.build_kv_connector_stats)
        assert "prom_metrics[connector_cls.__name__]" in source(MultiConnector.build_prom_metrics)

    def test_block_hashes_exist_wherever_there_is_a_connector_and_it_is_told_of_how_many_tokens(self):
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.v1.engine.core import EngineCore

        assert "enable_prefix_caching or kv_connector is not None" in source(EngineCore.__init__)
        assert "kv_cache_config.hash_block_size = hash_block_size" in source(EngineCore._initialize_kv_caches)
        assert "self._kv_cache_config = kv_cache_config" in source(KVConnectorBase_V1.__init__)

    def test_the_configuration_has_what_the_footprint_reads(self):
        from vllm.config import ModelConfig, ParallelConfig, VllmConfig
        from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

        for name in ("get_num_layers", "get_num_kv_heads", "get_head_size", "use_mla"):
            assert hasattr(ModelConfig, name), name
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "rank"):
            assert name in ParallelConfig.__dataclass_fields__, name
        assert "instance_id" in VllmConfig.__dataclass_fields__
        assert parameters(kv_cache_dtype_str_to_dtype) == ["kv_cache_dtype", "model_config"]

    def test_a_restore_that_fails_fails_its_request_unless_told_otherwise(self):
        from vllm.config import KVTransferConfig

        assert KVTransferConfig.__dataclass_fields__["kv_load_failure_policy"].default == "fail"


class TestLMCache:
    def test_skip_save_is_read_from_the_requests_transfer_parameters_and_keeps_keys_as_they_are(self):
        from lmcache.integration.vllm import vllm_v1_adapter
        from lmcache.integration.vllm.utils import extract_request_configs_from_sampling_params
        from lmcache.utils import CacheEngineKey

        assert 'get("lmcache.skip_save", False)' in source(vllm_v1_adapter.ReqMeta.from_request_tracker)
        assert '"kv_transfer_params"' in source(extract_request_configs_from_sampling_params)
        assert 'startswith("lmcache.tag.")' in source(CacheEngineKey.__post_init__)

    def test_a_new_request_is_announced_before_anything_reads_its_parameters(self):
        """`client_params` takes away what LMCache would raise on."""
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
        from vllm.v1.core.sched.scheduler import Scheduler

        body = source(Scheduler.add_request)
        assert body.index("self.connector.on_new_request(request)") < body.index("request.kv_transfer_params")
        reads = source(LMCacheConnectorV1Impl.update_state_after_alloc)
        for field in ("receiver_host", "receiver_init_port", "receiver_alloc_port", "req_id"):
            assert f'req_disagg_spec["{field}"]' in reads, field
        # What a client asks of a request that ends without a token: `drop_question` can go when this is asked first.
        assert "request._output_token_ids[0]" in source(LMCacheConnectorV1Impl.request_finished)

    def test_a_chunk_has_room_for_the_layers_that_lmcache_counts_and_a_draft_models_are_not_among_them(self):
        from lmcache.integration.vllm.utils import calculate_draft_layers
        from lmcache.integration.vllm.vllm_service_factory import VllmServiceFactory
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

        assert isinstance(LMCacheConnectorV1Impl.lmcache_engine_metadata, property)
        counts = " ".join(source(VllmServiceFactory.get_or_create_metadata).split())
        assert "num_layer += num_draft_layers" in counts
        assert "kv_shape = ( num_layer," in counts
        assert "use_eagle()" in source(calculate_draft_layers)
        assert 'draft_model"' not in source(calculate_draft_layers)

    def test_the_lookup_client_remembers_a_resolved_lookup(self):
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
        from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient

        assert parameters(LMCacheLookupClient.lookup_cache) == ["self", "lookup_id"]
        assert parameters(LMCacheLookupClient.clear_lookup_status) == ["self", "lookup_id"]
        body = source(LMCacheConnectorV1Impl)
        for name in ("self.load_specs", "self._requests_priority", "self.async_loading", "self.config"):
            assert f"{name}" in body, name

    def test_a_resumed_request_must_have_computed_what_its_lookup_found(self):
        """`SchedulerSide.settle_resumed` makes it so; once LMCache does not assert it, that can go."""
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl, LoadSpec

        body = " ".join(source(LMCacheConnectorV1Impl.build_connector_meta).split())
        assert "if preempted: assert load_spec is not None" in body
        assert "expected = max(lmcache_cached_tokens, load_spec.vllm_cached_tokens)" in body
        assert "assert request.num_computed_tokens == expected" in body
        assert list(LoadSpec.__dataclass_fields__) == ["vllm_cached_tokens", "lmcache_cached_tokens", "can_load"]
        assert "self._unfinished_requests[request.request_id] = request" in source(LMCacheConnectorV1Impl)

    def test_a_capped_restore_is_offered_as_more_than_what_is_recorded_of_it(self):
        """`SchedulerSide.restorable_tokens` mends it; once both are the same, that can go."""
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

        body = " ".join(source(LMCacheConnectorV1Impl.get_num_new_matched_tokens).split())
        assert "need_to_allocate = cap #" in body
        assert "capped_lmcache_tokens = ( (num_computed_tokens + cap) // self._lmcache_chunk_size" in body
        assert "assert ( num_external_tokens ==" in " ".join(
            source(LMCacheConnectorV1Impl.update_state_after_alloc).split()
        )

    def test_an_asynchronous_restore_leaves_its_event_behind_and_a_steps_end_releases_by_it_again(self):
        """`connector/async_restores.py` takes it away; once LMCache does, that can go."""
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
        from lmcache.v1.cache_engine import LMCacheEngine

        assert "pop_event" not in source(LMCacheEngine._async_process_tokens_internal)
        assert "pop_event" not in source(LMCacheEngine.retrieve)
        assert "self.cleanup_memory_objs(lookup_id)" in source(LMCacheEngine.lookup_unpin)
        assert "self.lmcache_engine.lookup_unpin(request.req_id)" in source(LMCacheConnectorV1Impl.wait_for_save)
        assert "self.async_loading" in source(LMCacheConnectorV1Impl)

    def test_what_is_computed_over_a_lost_restore_is_stored(self):
        """`connector/lost_restores.py` withholds it; once LMCache does, that can go."""
        from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl, ReqMeta, SaveSpec
        from lmcache.v1.cache_engine import LMCacheEngine
        from lmcache.v1.storage_backend.storage_manager import StorageManager
        from lmcache.v1.token_database import ChunkedTokenDatabase

        store = source(LMCacheConnectorV1Impl.wait_for_save)
        assert "save_spec is None or not save_spec.can_save" in " ".join(store.split())
        assert "_invalid_block_ids" not in store
        assert "self._invalid_block_ids.update(missing_blocks)" in source(LMCacheConnectorV1Impl.start_load_kv)
        assert "_block_size" in source(LMCacheConnectorV1Impl)
        assert list(SaveSpec.__dataclass_fields__) == ["skip_leading_tokens", "can_save"]
        assert {"req_id", "token_ids", "slot_mapping", "save_spec", "request_configs"} <= set(
            ReqMeta.__dataclass_fields__
        )
        assert {"tokens", "request_configs"} <= set(parameters(ChunkedTokenDatabase.process_tokens))
        assert parameters(StorageManager.remove)[:2] == ["self", "key"]
        assert "self.metadata = metadata" in source(LMCacheEngine.__init__)

    def test_keys_know_nothing_of_adapters_and_a_prompt_must_have_token_ids(self):
        """`connector/isolation.py` is for this; what of it LMCache has learned can go."""
        from lmcache.integration.vllm import lmcache_mp_connector, lmcache_mp_metadata, utils, vllm_v1_adapter

        assert not [module for module in (vllm_v1_adapter, utils, lmcache_mp_metadata) if "lora" in source(module)]
        assert "lora_request" not in source(lmcache_mp_connector)
        assert "len(new_request.prompt_token_ids)" in source(vllm_v1_adapter.RequestTracker.from_new_request)
        assert "self.all_token_ids = request.all_token_ids" in source(lmcache_mp_metadata.LMCacheMPRequestTracker)

    def test_a_stores_event_names_the_last_chunk_that_it_saw_as_a_chunks_parent(self):
        from lmcache.utils import CacheStoreEvent
        from lmcache.v1.cache_engine import LMCacheEngine

        body = source(LMCacheEngine.store)
        assert "parent_block_hash=None if start == 0 else prev_key" in body
        assert "self.kv_events.append(stored_event)" in body
        assert "parent_block_hash" in CacheStoreEvent.__dataclass_fields__

    def test_store_takes_its_chunks_from_the_token_database_and_allocates_one_by_one(self):
        from lmcache.v1.cache_engine import LMCacheEngine

        body = source(LMCacheEngine.store)
        assert "in self.token_database.process_tokens(" in body
        assert "self.gpu_connector.batched_from_gpu(memory_objs, starts, ends, **kwargs)" in body
        assert 'kwargs.get("transfer_spec"' in body
        # `_EngineWith` stands in for the engine and must not be written to.
        assert not re.search(r"^\s+self\.\w+ = ", body, re.MULTILINE)

    def test_restores_pass_objects_starts_and_ends(self):
        from lmcache.v1.cache_engine import LMCacheEngine

        body = " ".join(source(LMCacheEngine.retrieve).split())
        assert "self.gpu_connector.batched_to_gpu(" in body
        assert parameters(LMCacheEngine.lookup_unpin) == ["self", "lookup_id"]

    def test_the_cpu_tier_evicts_inside_allocation_through_batched_remove(self):
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        assert "self.batched_remove(evict_keys, force=False)" in source(LocalCPUBackend.allocate)
        assert "force=False" not in source(LocalCPUBackend.clear)
        assert parameters(LocalCPUBackend.batched_remove) == ["self", "keys", "force"]
        assert parameters(LocalCPUBackend.contains) == ["self", "key", "pin"]
        body = source(LocalCPUBackend.__init__)
        for name in ("self.hot_cache", "self.use_hot", "self.memory_allocator"):
            assert name in body, name

    def test_allocators_say_their_size_and_alignment(self):
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

        body = source(MixedMemoryAllocator.__init__)
        assert "self.size = size" in body
        assert "self.align_bytes" in body

    def test_device_transfers_are_chosen_by_a_function_of_the_module_at_call_time(self):
        from lmcache.integration.vllm.vllm_service_factory import VllmServiceFactory
        from lmcache.v1 import gpu_connector

        assert "from lmcache.v1.gpu_connector import CreateGPUConnector" in source(
            VllmServiceFactory.get_or_create_lmcache_engine
        )
        assert hasattr(gpu_connector, "torch_device_type")

    def test_metadata_gives_shapes_types_and_rank(self):
        from lmcache.v1.memory_management import get_size_bytes
        from lmcache.v1.metadata import LMCacheMetadata

        for name in ("get_shapes", "get_dtypes"):
            assert callable(getattr(LMCacheMetadata, name)), name
        assert parameters(get_size_bytes) == ["shapes", "kv_dtypes"]
