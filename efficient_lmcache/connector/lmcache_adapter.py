"""Every LMCache internal that the connector reads, sets or wraps (LMCache 0.5.6, in-process mode).

`tests/integration/test_upstream.py` guards each of them, so that a change upstream fails there and not in service.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import get_size_bytes

from efficient_lmcache.connector.cpu_transfer import copy_chunk_to_paged, copy_paged_to_chunk
from efficient_lmcache.connector.lmcache_remote_adapter import CPUMatches, RemoteSeams, Staging, has_remote_tier
from efficient_lmcache.connector.tier_writes import TierWrites
from efficient_lmcache.telemetry.redis_tier import RedisAddress, redis_address

if TYPE_CHECKING:
    from types import ModuleType

    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from vllm.v1.request import Request


class CPUTransfer(GPUConnectorInterface):
    """LMCache's device copies where the device is vLLM's CPU backend. Not layerwise."""

    def __init__(self, metadata: LMCacheMetadata) -> None:
        self.kvcaches: list[torch.Tensor] | None = None
        self._kv_shape = metadata.kv_shape

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        if "kvcaches" in kwargs:
            self.kvcaches = kwargs["kvcaches"]

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.initialize_kvcaches_ptr(**kwargs)
        assert self.kvcaches is not None
        copy_paged_to_chunk(self.kvcaches, kwargs["slot_mapping"][start:end], memory_obj.tensor)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.initialize_kvcaches_ptr(**kwargs)
        assert self.kvcaches is not None
        slots = kwargs["slot_mapping"][start:end]
        # vLLM computed these tokens itself, and other requests may be reading their block.
        computed = min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
        copy_chunk_to_paged(memory_obj.tensor[:, :, computed:], self.kvcaches, slots[computed:])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        layers, halves, _, heads, head_dim = self._kv_shape
        return torch.Size([halves, layers, num_tokens, heads * head_dim])


def install_cpu_transfer(gpu_connector: ModuleType) -> None:
    """Let `lmcache.v1.gpu_connector` offer `CPUTransfer` where it knows no transfer for the device."""
    create = gpu_connector.CreateGPUConnector

    def create_gpu_connector(
        config: LMCacheEngineConfig, metadata: LMCacheMetadata, engine: EngineType, **kwargs: Any
    ) -> Any:
        if engine != EngineType.VLLM or gpu_connector.torch_device_type != "cpu":
            return create(config, metadata, engine, **kwargs)
        if config.use_layerwise:
            raise ValueError("on the CPU, LMCache's use_layerwise must be false")
        return CPUTransfer(metadata)

    gpu_connector.CreateGPUConnector = create_gpu_connector  # type: ignore[attr-defined]


class SchedulerSide:
    """What the scheduler's connector reads of LMCache."""

    def __init__(self, impl: LMCacheConnectorV1Impl) -> None:
        self._impl = impl
        self._cpu_matches: CPUMatches | None = None

    @property
    def chunk_tokens(self) -> int:
        return int(self._impl.config.chunk_size)

    @property
    def host_tier_bytes(self) -> int:
        """The CPU tier's configured size per rank; 0 when LMCache keeps no CPU tier."""
        config = self._impl.config
        return int(config.max_local_cpu_size * 1024**3) if config.local_cpu else 0

    @property
    def remote_url(self) -> str | None:
        url: str | None = self._impl.config.remote_url
        return url

    @property
    def has_local_disk(self) -> bool:
        config = self._impl.config
        return bool(config.local_disk) and config.max_local_disk_size > 0

    @property
    def has_remote_tier(self) -> bool:
        """Behind the CPU tier: anywhere else, or on a disk of the node's own."""
        return bool(self.remote_url or self._impl.config.remote_storage_plugins) or self.has_local_disk

    @property
    def unknown_tier(self) -> str | None:
        """LMCache's option for a tier behind the CPU tier through whose buffers it is not reached, if there is one."""
        config = self._impl.config
        if (config.extra_config or {}).get("enable_nixl_storage"):
            return "enable_nixl_storage"
        return next(
            (name for name in ("gds_path", "maru_path", "storage_plugins") if getattr(config, name, None)), None
        )

    @property
    def remote_redis(self) -> RedisAddress | None:
        """The remote tier, if it is one Redis and nothing else."""
        if self.has_local_disk or self._impl.config.remote_storage_plugins:
            return None
        given = self._impl.config.extra_config or {}
        login = {
            name: str(given.get(name) or os.environ.get(f"LMCACHE_RESP_{name.upper()}", ""))
            for name in ("username", "password")
        }
        return redis_address(self.remote_url, login)

    @property
    def ranks_storing(self) -> int:
        """Ranks that store a chunk each; with MLA the first one stores for all."""
        metadata = self._impl.lmcache_engine_metadata
        return 1 if metadata is None or metadata.use_mla else int(metadata.world_size)

    def ask_for_cpu_matches(self) -> None:
        """From now on, lookups also tell `cpu_match_tokens`."""
        if self._impl.lookup_client is not None:
            self._cpu_matches = CPUMatches(self._impl.lookup_client)

    def cpu_match_tokens(self, request_id: str) -> int | None:
        """What of `host_match_tokens` lies in the CPU tier; None where LMCache does not tell."""
        return self._cpu_matches.tokens(request_id) if self._cpu_matches is not None else None

    def host_match_tokens(self, request_id: str) -> int:
        """h over all tiers of a request whose lookup is resolved and not yet scheduled, before any cap on loading."""
        client = self._impl.lookup_client
        hit_tokens = client.lookup_cache(request_id) if client is not None else None
        # -1: a prompt without a full chunk was never looked up.
        return hit_tokens if hit_tokens is not None and hit_tokens > 0 else 0

    def restorable_tokens(self, request: Request, offered_tokens: int) -> int:
        """Of what LMCache offers to restore, as much as it says that it has.

        Under a cap (`max_tokens_per_load`) it offers more, unless the GPU's part ends where a chunk ends, and would end
        the engine with an assertion when vLLM accepts that.
        """
        found = self._impl.load_specs.get(request.request_id)
        if found is None or found.lmcache_cached_tokens == request.num_tokens:
            return offered_tokens
        return max(0, min(offered_tokens, found.lmcache_cached_tokens - found.vllm_cached_tokens))

    @property
    def is_layerwise(self) -> bool:
        """Stores and evictions then go layer by layer, past what `WorkerSide` wraps."""
        return bool(self._impl.config.use_layerwise)

    @property
    def obstacle_to_tags(self) -> str | None:
        """Why a request's `lmcache.tag.*` parameters are not part of every key here, if so."""
        config = self._impl.config
        # Lookups have the tags; these stores and restores, or presence checks, do not.
        for name in ("use_layerwise", "enable_blending", "enable_p2p", "external_lookup_client"):
            if getattr(config, name, None):
                return f"LMCache's {name} makes keys without a request's tags"
        if (config.extra_config or {}).get("nixl_presence_cache"):
            return "LMCache's nixl_presence_cache knows keys without their tags"
        return None

    def settle_resumed(self, request_ids: Collection[str]) -> None:
        """Before LMCache hears of resumed requests: what it found for them is no more than what was made of it.

        LMCache asserts that vLLM has computed or will restore as much of a preempted request as its latest lookup
        found, and would end the engine. It is less where vLLM restores nothing (`prompt_logprobs`), where LMCache
        itself advises against it (`min_retrieve_tokens`), where another connector restores, and without a lookup.
        """
        for request_id in request_ids:
            request, found = self._impl._unfinished_requests.get(request_id), self._impl.load_specs.get(request_id)
            if request is None or (found is not None and found.can_load):
                continue
            # Not at the module's head: LMCache's adapter, while it is being imported, imports this module.
            from lmcache.integration.vllm.vllm_v1_adapter import LoadSpec

            computed_tokens = request.num_computed_tokens
            found_tokens = 0 if found is None else min(found.lmcache_cached_tokens, computed_tokens)
            self._impl.load_specs[request_id] = LoadSpec(computed_tokens, found_tokens, can_load=False)

    @staticmethod
    def withhold(metadata: Any, request_ids: Collection[str]) -> None:
        """Let the worker neither restore nor store anything of these requests."""
        if request_ids:
            metadata.requests = [request for request in metadata.requests if request.req_id not in request_ids]

    def forget(self, request_id: str) -> None:
        """Drop what LMCache keeps for a request that ended before it was scheduled."""
        impl = self._impl
        # With asynchronous loading LMCache needs the status to cancel the lookup, and drops it then.
        if impl.lookup_client is not None and not impl.async_loading:
            impl.lookup_client.clear_lookup_status(request_id)
        impl.load_specs.pop(request_id, None)
        impl._requests_priority.pop(request_id, None)


def caches_of_the_model(impl: LMCacheConnectorV1Impl, kv_caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a worker's KV caches, the model's own: those of a draft model come after them.

    LMCache does not count a draft model's layers, as it does EAGLE's, and would end the engine at its first store, for
    want of room for them in a chunk. Restored tokens then lack the draft's KV: it guesses worse there.
    """
    metadata = impl.lmcache_engine_metadata
    if metadata is None:
        return kv_caches
    return dict(itertools.islice(kv_caches.items(), metadata.kv_shape[0]))


class WorkerSide:
    """What a worker's connector reads and wraps of LMCache's engine."""

    def __init__(self, engine: LMCacheEngine) -> None:
        self._engine = engine
        self._backend = engine.storage_manager.local_cpu_backend
        metadata = engine.metadata
        self.chunk_tokens = int(engine.config.chunk_size)
        self.chunk_bytes = int(get_size_bytes(metadata.get_shapes(self.chunk_tokens), metadata.get_dtypes()))
        self.is_layerwise = bool(engine.config.use_layerwise)

    @property
    def has_host_tier(self) -> bool:
        return self._backend is not None and bool(self._backend.use_hot)

    def registered_chunks(self) -> int:
        return len(self._backend.hot_cache)

    def capacity_chunks(self) -> int:
        """K_H: how many full chunks the allocator's buffer holds, alignment included."""
        allocator = self._backend.memory_allocator
        align = getattr(allocator, "align_bytes", 1)
        # The allocator for peer-to-peer sharing names its size otherwise.
        size_bytes = allocator.size if hasattr(allocator, "size") else allocator.cpu_size
        return int(size_bytes) // (-(-self.chunk_bytes // align) * align)

    def contains(self, key: Hashable) -> bool:
        """Whether the CPU tier holds the chunk; neither pins it nor counts as a use."""
        return bool(self._backend.contains(key))

    def on_eviction(self, evicted: Callable[[int], None]) -> None:
        """Call `evicted(chunks)` for every eviction that makes room inside an allocation, and for no other removal."""
        batched_remove = self._backend.batched_remove

        def counted(keys: list[Any], force: bool = True) -> int:
            removed = int(batched_remove(keys, force=force))
            if not force:
                evicted(removed)
            return removed

        self._backend.batched_remove = counted

    def on_transfer(self, stored: Callable[[int], None], restored: Callable[[int], None]) -> None:
        """Call `stored(tokens)` for every GPU->host copy and `restored(tokens)` for every host->GPU copy.

        Not for layerwise transfers, which are generators with other arguments.
        """
        transfer = self._engine.gpu_connector
        from_gpu, to_gpu = transfer.batched_from_gpu, transfer.batched_to_gpu

        def counted_from_gpu(memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> Any:
            stored(sum(ends) - sum(starts))
            return from_gpu(memory_objs, starts, ends, **kwargs)

        def counted_to_gpu(memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> Any:
            computed = kwargs.get("vllm_cached_tokens", 0)
            spans = zip(starts, ends, strict=True)
            restored(sum(max(0, end - max(start, computed)) for start, end in spans))
            return to_gpu(memory_objs, starts, ends, **kwargs)

        transfer.batched_from_gpu, transfer.batched_to_gpu = counted_from_gpu, counted_to_gpu

    @property
    def has_remote_tier(self) -> bool:
        return has_remote_tier(self._engine.storage_manager)

    def filter_stores(self, keep: Callable[[Hashable], bool]) -> None:
        """Before each copy, drop the chunks for which `keep(key)` is false.

        LMCache's own store runs on the rest, with the request's whole slot mapping, so every contiguous run of kept
        chunks is copied from where it lies. Stores that hand KV to another engine are left alone.
        """
        view = self._without_chunks_that(keep)
        self._route_stores(lambda _: view)

    def _without_chunks_that(self, keep: Callable[[Hashable], bool], **attributes: Any) -> _EngineWith:
        """The engine to a store that drops the chunks which `keep` rejects."""
        database = _FilteredDatabase(self._engine.token_database, keep)
        events = _ChainedEvents(self._engine, database)
        return _EngineWith(self._engine, token_database=database, kv_events=events, **attributes)

    def decide_per_tier(
        self, keep: Callable[[Hashable], bool], staging_bytes: int, count: Callable[[str, int], None]
    ) -> None:
        """`filter_stores`, and chunks go to, and stay in, the tiers that their request was admitted to.

        Args:
            keep: as in `filter_stores`; not asked where the CPU tier gets nothing.
            staging_bytes: of `Staging`.
            count: called with what happened, by name, and how often.
        """
        seams = RemoteSeams(self._engine, Staging(self._engine, staging_bytes), count)
        views = {
            TierWrites(cpu=True, remote=True): self._without_chunks_that(keep),
            TierWrites(cpu=True, remote=False): self._without_chunks_that(keep, storage_manager=seams.cpu_only),
            TierWrites(cpu=False, remote=True): _EngineWith(self._engine, storage_manager=seams.remote_only),
        }
        self._route_stores(lambda configs: views.get(TierWrites.of(configs)))
        seams.route_restores()
        seams.answer_lookups()

    def _route_stores(self, view_of: Callable[[Mapping[str, Any] | None], _EngineWith | None]) -> None:
        """Let LMCache's store see the engine as `view_of(a request's configuration)`; None: it stores nothing."""
        store = type(self._engine).store

        def routed_store(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("transfer_spec") is not None:
                store(self._engine, *args, **kwargs)
            elif (view := view_of(kwargs.get("request_configs"))) is not None:
                store(view, *args, **kwargs)

        self._engine.store = routed_store

    def release(self, request_id: str) -> None:
        """Unpin what a lookup pinned for a request that ended, scheduled or not."""
        self._engine.lookup_unpin(request_id)


class _FilteredDatabase:
    """LMCache's token database, without the chunks that `keep` rejects.

    Attributes:
        parent: the key of the chunk before the one that was yielded last, rejected or not; None for the first one.
    """

    def __init__(self, database: Any, keep: Callable[[Hashable], bool]) -> None:
        self._database = database
        self._keep = keep
        self.parent: Any = None

    def process_tokens(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, int, Any]]:
        previous = None
        for start, end, key in self._database.process_tokens(*args, **kwargs):
            if self._keep(key):
                self.parent = previous
                yield start, end, key
            previous = key


class _ChainedEvents:
    """An engine's KV events to a store that does not see all chunks: LMCache takes the last one that it saw for a
    chunk's parent, and whoever indexes events could not follow the chain."""

    def __init__(self, engine: LMCacheEngine, database: _FilteredDatabase) -> None:
        self._engine = engine
        self._database = database

    def append(self, event: Any) -> None:
        if self._database.parent is not None:
            event.parent_block_hash = self._database.parent.chunk_hash
        self._engine.kv_events.append(event)


class _EngineWith:
    """The same engine to LMCache's `store`, but for some attributes."""

    def __init__(self, engine: LMCacheEngine, **attributes: Any) -> None:
        self._engine = engine
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
