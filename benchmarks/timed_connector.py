"""The connector with a stopwatch, for `admission_overhead.py`: the engine's processes load it by its module path.

Every first lookup, decision and store becomes a line of JSON (seconds) in `$TIMINGS_DIR`, written after it was timed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from efficient_lmcache.connector.connector import EfficientLMCacheConnector


class TimedConnector(EfficientLMCacheConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rows = open(Path(os.environ["TIMINGS_DIR"]) / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115
        if self._admission is not None:
            self._time_first_lookups()

    def _start_offload(self) -> None:
        super()._start_offload()
        if self._offload is not None:
            self._time_stores()

    def _write(self, **seconds: float) -> None:
        self._rows.write(json.dumps(seconds) + "\n")

    def _time_first_lookups(self) -> None:
        """Split a first lookup into LMCache's part and the decision that follows it."""
        lookup, decide = self._lmcache_engine.get_num_new_matched_tokens, self._admission.on_lookup
        latest_s = 0.0

        def timed_lookup(*args: Any) -> Any:
            nonlocal latest_s
            start_s = time.perf_counter()
            result = lookup(*args)
            latest_s = time.perf_counter() - start_s
            return result

        def timed_decision(request: Any, host_match_tokens: Any) -> None:
            if request.request_id in self._admission._decided:
                return
            start_s = time.perf_counter()
            decide(request, host_match_tokens)
            decision_s = time.perf_counter() - start_s
            self._write(lookup=latest_s, decision=decision_s)

        self._lmcache_engine.get_num_new_matched_tokens = timed_lookup
        self._admission.on_lookup = timed_decision

    def _time_stores(self) -> None:
        """Split a store into all of it and the key checks inside it."""
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

        adapter.contains = timed_contains
        lmcache.store = timed_store
