"""A real LMCache engine with a small CPU tier and a remote tier of files; vLLM's part, the paged KV, is random."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 16
#: A chunk fills one page of LMCache's allocator.
CHUNK_BYTES = 4096


class LMCacheTiers:
    """Serves prompts as LMCache's adapter for vLLM does: look up, restore, unpin, store what lies beyond the hit."""

    def __init__(self, remote: Path, cpu_chunks: int, staging_chunks: int) -> None:
        os.environ.update(LMCACHE_LOG_LEVEL="ERROR", LMCACHE_TRACK_USAGE="false")
        import torch
        from lmcache.v1.cache_engine import LMCacheEngine
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.token_database import ChunkedTokenDatabase

        from efficient_lmcache.connector.lmcache_adapter import CPUTransfer, WorkerSide

        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=True,
            max_local_cpu_size=cpu_chunks * CHUNK_BYTES / 1024**3,
            remote_url=f"fs://local:0{remote}/",
            remote_serde="naive",
            save_unfull_chunk=False,
            enable_kv_events=True,
        )
        kv_shape = (1, 2, CHUNK_TOKENS, 2, 32)
        metadata = LMCacheMetadata(
            "model", 1, 1, 0, 0, torch.bfloat16, kv_shape, chunk_size=CHUNK_TOKENS, role="worker"
        )
        database = ChunkedTokenDatabase(config, metadata)
        ignored: Any = lambda *_: None  # noqa: E731
        self.engine = LMCacheEngine(config, metadata, database, CPUTransfer(metadata), ignored, ignored)
        self.engine.post_init()
        self.counted: Counter[str] = Counter()
        side = WorkerSide(self.engine)
        side.decide_per_tier(
            keep=lambda key: not side.contains(key),
            staging_bytes=staging_chunks * CHUNK_BYTES,
            count=lambda name, amount: self.counted.update({name: amount}),
        )
        self._remote = remote
        self._backend = self.engine.storage_manager.storage_backends["RemoteBackend"]

    @property
    def residents(self) -> list[Any]:
        """Of the CPU tier, least recently used first."""
        return list(self.engine.storage_manager.local_cpu_backend.hot_cache)

    @property
    def remote_chunks(self) -> int:
        return len(list(self._remote.glob("*.data")))

    def look_up(self, tokens: list[int]) -> int:
        """Pins what it finds, until `restore`."""
        return int(self.engine.lookup(tokens=tokens, lookup_id="request", pin=True))

    def restore(self, tokens: list[int], params: dict[str, Any]) -> Any:
        """The KV that a prompt restores, per token: `[layers, tokens, heads, head size]`, zero where nothing came."""
        import torch

        paged = [torch.zeros(len(tokens) // 4, 2, 4, 64, dtype=torch.bfloat16)]
        self.engine.retrieve(
            torch.tensor(tokens),
            torch.ones(len(tokens), dtype=torch.bool),
            kvcaches=paged,
            slot_mapping=torch.arange(len(tokens)),
            request_configs=params or None,
            req_id="request",
        )
        self.engine.lookup_unpin("request")
        return paged[0]

    def store(self, tokens: list[int], computed: Any, found_tokens: int, params: dict[str, Any]) -> None:
        """Returns when the remote tier has what it gets."""
        import torch

        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[:found_tokens] = False
        slots = torch.arange(len(tokens))
        self.engine.store(
            torch.tensor(tokens), mask=mask, kvcaches=[computed], slot_mapping=slots, request_configs=params or None
        )
        deadline_s = time.monotonic() + 20
        while self._backend.put_tasks:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def take_events(self) -> list[Any]:
        """What stores told whoever indexes KV, since the last call."""
        return list(self.engine.get_kv_events())

    def clear(self) -> None:
        """Both tiers are empty, and nothing has been counted."""
        self.engine.storage_manager.clear(["LocalCPUBackend"])
        for chunk in self._remote.glob("*.data"):
            chunk.unlink()
        self.counted.clear()
        self.take_events()

    def close(self) -> None:
        self.engine.close()
