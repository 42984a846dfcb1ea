"""What LMCache does between its CPU tier and a remote tier, and the seams that let each tier decide for itself
(LMCache 0.5.6, in-process mode). `docs/remote-tier.md` tells it in words.

    staging     LMCache moves chunks to and from a remote tier through buffers that it takes from the CPU tier,
                evicting residents for them
    promotion   a chunk restored from a remote tier stays in its buffer, registered as a resident of the CPU tier

`tests/integration/test_upstream_remote.py` guards every internal that this module relies on.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache.v1.system_detection import NUMADetector

from efficient_lmcache.connector.tier_writes import TierWrites

if TYPE_CHECKING:
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.lookup_client.abstract_client import LookupClientInterface
    from lmcache.v1.storage_backend.storage_manager import StorageManager

_CPU_BACKEND = "LocalCPUBackend"
#: Reached through the CPU tier's buffers. A disk of the node's own is one of them.
_REMOTE_TIERS = (RemoteBackend, LocalDiskBackend)
_ASK_KEY = "lmcache.efficient.ask_cpu_match"
_logger = logging.getLogger(__name__)


def has_remote_tier(manager: StorageManager) -> bool:
    return any(isinstance(backend, _REMOTE_TIERS) for backend in manager.storage_backends.values())


class Staging:
    """Host memory beside the CPU tier, for chunks on their way to or from a remote tier.

    LMCache's own allocator, so that chunks in it are freed like any other when nobody refers to them.

    Args:
        engine: says where the memory lies.
    """

    def __init__(self, engine: LMCacheEngine, size_bytes: int) -> None:
        self._allocator = MixedMemoryAllocator(size_bytes, numa_mapping=NUMADetector.get_numa_mapping(engine.config))
        # Allocators tell LMCache's statistics how full they are, and these are the CPU tier's.
        self._allocator.pin_allocator.stats_monitor = SimpleNamespace(
            update_local_cache_usage=lambda _: None, update_active_memory_objs_count=lambda _: None
        )

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> Any:
        """LMCache's memory object; None without room."""
        return self._allocator.allocate(shapes, dtypes, fmt or MemoryFormat.KV_2LTD)


class RemoteSeams:
    """A worker's engine, where its stores and restores touch a remote tier.

    Args:
        staging: for chunks that the CPU tier declines.
        count: called with what happened, by name, and how often.

    Attributes:
        cpu_only: the storage manager to a store that leaves remote tiers alone.
        remote_only: the storage manager to a store that leaves the CPU tier alone. Without room in `staging`, the rest
            of the store is dropped.
    """

    def __init__(self, engine: LMCacheEngine, staging: Staging, count: Callable[[str, int], None]) -> None:
        manager = engine.storage_manager
        assert manager is not None, "an engine without storage has no tiers"
        self._engine = engine
        self._staging = staging
        self._count = count
        self._declined_restore = False
        self.cpu_only = _ManagerWith(manager, lambda _, backend: not isinstance(backend, _REMOTE_TIERS))
        self.remote_only = _StagedManager(manager, staging, count)
        self._without_cpu_tier = _ManagerWith(manager, lambda name, _: name != _CPU_BACKEND)

    def route_restores(self) -> None:
        """Restores of a request that the CPU tier declined leave its residents alone as long as `staging` has room.

        They are never given up: beyond that, their buffers come from where LMCache takes them, evicting if need be.
        """
        engine, manager = self._engine, self._engine.storage_manager
        tier = manager.local_cpu_backend
        retrieve, batched_get, allocate = engine.retrieve, manager.batched_get, tier.allocate

        def routed_retrieve(*args: Any, **kwargs: Any) -> Any:
            # LMCache restores one request after the other, on one thread.
            self._declined_restore = not TierWrites.of(kwargs.get("request_configs")).cpu
            try:
                return retrieve(*args, **kwargs)
            finally:
                self._declined_restore = False

        def routed_get(keys: list[Any], location: str | None = None) -> Any:
            if not self._declined_restore or location == _CPU_BACKEND:
                return batched_get(keys, location)
            chunks = self._without_cpu_tier.batched_get(keys, location)
            self._count("unpromoted_chunks", sum(chunk is not None for chunk in chunks))
            return chunks

        def routed_allocate(
            shapes: Any, dtypes: Any, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
        ) -> Any:
            buffer = self._staging.allocate(shapes, dtypes, fmt) if self._declined_restore else None
            return buffer if buffer is not None else allocate(shapes, dtypes, fmt, eviction, busy_loop)

        engine.retrieve, manager.batched_get, tier.allocate = routed_retrieve, routed_get, routed_allocate

    def answer_lookups(self) -> None:
        """Tell a scheduler that asks (`CPUMatches`) how much of what a lookup found lies in the CPU tier."""
        engine, lookup = self._engine, self._engine.lookup
        chunk_tokens = int(engine.config.chunk_size)

        def answered_lookup(*args: Any, **kwargs: Any) -> int:
            configs = dict(kwargs.get("request_configs") or {})
            asked = configs.pop(_ASK_KEY, False)
            if not asked:
                return int(lookup(*args, **kwargs))
            found_tokens = int(lookup(*args, **{**kwargs, "request_configs": configs or None}))
            pinned = engine.lookup_pins.get(kwargs.get("lookup_id"), {})
            return _LongAnswer(found_tokens, min(found_tokens, len(pinned.get(_CPU_BACKEND, ())) * chunk_tokens))

        engine.lookup = answered_lookup


class CPUMatches:
    """A scheduler's side of `RemoteSeams.answer_lookups`.

    Plain answers, as of a worker without these seams, stay plain ones: then nobody knows.
    """

    def __init__(self, client: LookupClientInterface) -> None:
        self._latest: tuple[str, int] | None = None
        # Wrappers of LMCache's that count or limit hits.
        while hasattr(client, "actual_lookup_client"):
            client = client.actual_lookup_client
        self._transport: Any = getattr(client, "transport", None)
        if self._transport is not None:
            client.transport = self
        else:
            _logger.info("LMCache's %s does not tell which tier holds a prefix", type(client).__name__)

    def tokens(self, lookup_id: str) -> int | None:
        """The matched tokens that lie in the CPU tier, of the latest lookup if it had this id; None: nobody knows."""
        return self._latest[1] if self._latest is not None and self._latest[0] == lookup_id else None

    def send_and_recv_all(self, message: list[Any]) -> list[bytes]:
        """LMCache's transport, with a question added to the way there and its answer removed from the way back."""
        *content, lookup_id, configs = message
        asking = json.dumps({**(json.loads(configs) if configs else {}), _ASK_KEY: True})
        answers: list[bytes] = self._transport.send_and_recv_all([*content, lookup_id, asking])
        of_cpu_tier = [int.from_bytes(answer[4:], "big") for answer in answers if len(answer) == 8]
        # Ranks may differ, and what one of them lacks is lacking.
        self._latest = (lookup_id, min(of_cpu_tier)) if of_cpu_tier and len(of_cpu_tier) == len(answers) else None
        return [answer[:4] for answer in answers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _LongAnswer(int):
    """Found tokens that, on their way to the scheduler, take those of the CPU tier along."""

    def __new__(cls, found_tokens: int, cpu_tokens: int) -> _LongAnswer:
        answer = super().__new__(cls, found_tokens)
        answer._cpu_tokens = cpu_tokens
        return answer

    _cpu_tokens: int

    def to_bytes(self, length: Any = 4, byteorder: Any = "big", *, signed: bool = False) -> bytes:
        return super().to_bytes(length, byteorder) + self._cpu_tokens.to_bytes(length, byteorder)


class _ManagerWith:
    """The same storage manager to LMCache's puts and gets, but with some of its backends only."""

    def __init__(self, manager: Any, has: Callable[[str, Any], bool]) -> None:
        self._manager = manager
        self._has = has

    @property
    def storage_backends(self) -> OrderedDict[str, Any]:
        # LMCache may replace a backend while it runs.
        backends = self._manager.storage_backends.items()
        return OrderedDict((name, backend) for name, backend in backends if self._has(name, backend))

    def batched_put(self, *args: Any, **kwargs: Any) -> None:
        type(self._manager).batched_put(self, *args, **kwargs)

    def batched_get(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._manager).batched_get(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class _StagedManager(_ManagerWith):
    """Remote tiers only, reached through `staging`."""

    def __init__(self, manager: Any, staging: Staging, count: Callable[[str, int], None]) -> None:
        super().__init__(manager, lambda _, backend: isinstance(backend, _REMOTE_TIERS))
        self._staging = staging
        self._count = count

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, **_: Any) -> Any:
        buffer = self._staging.allocate(shapes, dtypes, fmt)
        self._count("remote_only_chunks" if buffer is not None else "remote_dropped_stores", 1)
        return buffer
