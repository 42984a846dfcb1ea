"""The connector with a stopwatch, for `admission_overhead.py`: the engine's processes load it by its module path.

Every request with a first lookup, and every store, becomes a line of JSON (seconds) in `$TIMINGS_DIR`, written once all
of it was timed:

    lookup      LMCache's own
    decision    right after it, until the lookup is answered
    whole       the lookup as vLLM sees it: LMCache's, the decision, and what else the connector does around them
    scheduled   what follows from the decision once the request is scheduled
    counted     handing over the step's statistics, the decision among them

No code of what is timed runs, and none of its data is read, between LMCache's answer and the stopwatch's start.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from efficient_lmcache.connector import vllm_adapter
from efficient_lmcache.connector.connector import EfficientLMCacheConnector

POOL_TASKS = 64
REMEMBERED_PROMPTS = 8192


class TimedConnector(EfficientLMCacheConnector):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rows = open(Path(os.environ["TIMINGS_DIR"]) / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._row: dict[str, float] = {}
        self._looked_up: set[str] = set()
        if self._admission is not None:
            self._fill_memory(vllm_adapter.hash_block_tokens(self._kv_cache_config))
            engine, admission = self._lmcache_engine, self._admission
            engine.get_num_new_matched_tokens = self._timed("lookup", engine.get_num_new_matched_tokens)
            admission.on_lookup = self._timed("decision", admission.on_lookup)  # type: ignore[method-assign]
            admission.on_scheduled = self._timed("scheduled", admission.on_scheduled)  # type: ignore[method-assign]

    def _fill_memory(self, block_tokens: int) -> None:
        """As after hours of service: all that is bounded is at its bound."""
        assert self._admission is not None
        generator, tasks = random.Random(0), self._admission._tasks
        for _ in range(REMEMBERED_PROMPTS):
            prompt = [generator.randrange(4096) for _ in range(3 * block_tokens // 2)]
            tasks.assign([generator.randbytes(32)], prompt)
        estimator: Any = self._admission._policy.estimator  # type: ignore[attr-defined]
        for lookup in range(2 * 256):
            estimator.observe(f"earlier-{lookup % POOL_TASKS}", generator.randrange(4096, 65_536), time.monotonic())

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*args)
            self._row[name] = time.perf_counter() - start_s
            return result

        return timed

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        start_s = time.perf_counter()
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._row["whole"] = time.perf_counter() - start_s
        if request.request_id in self._looked_up:
            self._row.clear()
        self._looked_up.add(request.request_id)
        return matched

    def get_kv_connector_stats(self) -> Any:
        start_s = time.perf_counter()
        stats = super().get_kv_connector_stats()
        seconds = time.perf_counter() - start_s
        if "scheduled" in self._row and "whole" in self._row:
            self._write(**self._row, counted=seconds)
            self._row.clear()
        return stats

    def _write(self, **seconds: float) -> None:
        self._rows.write(json.dumps(seconds) + "\n")

    def _start_offload(self) -> None:
        super()._start_offload()
        if self._offload is not None:
            self._time_stores()

    def _time_stores(self) -> None:
        """Split a store into all of it and the key checks inside it."""
        assert self._offload is not None
        lmcache, adapter = self._lmcache_engine.lmcache_engine, self._offload._lmcache
        store: Callable[..., None] = lmcache.store
        contains = adapter.contains
        checks_s = 0.0

        def timed_contains(key: Any) -> bool:
            nonlocal checks_s
            start_s = time.perf_counter()
            held = contains(key)
            checks_s += time.perf_counter() - start_s
            return bool(held)

        def timed_store(*args: Any, **kwargs: Any) -> None:
            nonlocal checks_s
            checks_s, start_s = 0.0, time.perf_counter()
            store(*args, **kwargs)
            self._write(store=time.perf_counter() - start_s, checks=checks_s)

        adapter.contains = timed_contains  # type: ignore[method-assign]
        lmcache.store = timed_store
