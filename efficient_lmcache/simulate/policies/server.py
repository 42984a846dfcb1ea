"""LMCache's server mode: one L1 that evicts in the background, and stores that are dropped where there is no room.

eager    a prompt's chunks are sent to the server as soon as they are computed
lazy     a request's chunks are sent once the GPU is about to evict one of them, with all before it (lazy offload)

The server looks at its L1 once a second: from the watermark on it evicts a share of its chunks, the least recent ones.
"""

from __future__ import annotations

import numpy as np

from efficient_lmcache.core.references import Ints
from efficient_lmcache.simulate.policies.blocks import chunk_of_block
from efficient_lmcache.simulate.policies.inclusive import ChunkTier
from efficient_lmcache.sizing.workload import Workload

# Defaults of LMCache 0.5.6: `--eviction-trigger-watermark`, `--eviction-ratio`, and its controller's period.
_WATERMARK = 0.8
_EVICTED_SHARE = 0.2
_PERIOD_S = 1.0


class ServerTier(ChunkTier):
    """The L1 of an LMCache server; K_H is all of its memory."""

    def __init__(self, workload: Workload, capacity_chunks: int) -> None:
        super().__init__(workload.chunks, capacity_chunks)
        self._period = 0

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        self._tick(now_s)
        return super().look_up(call, tokens, gpu_tokens, now_s)

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        self._tick(now_s)
        written = super().fill(call, tokens, now_s)
        # What found no room is not offered again.
        prompt_tokens = int(self._chunks.prompt_tokens[call])
        self._saved[call] = min(tokens, prompt_tokens) // self._chunks.chunk_tokens
        return written

    def _enters(self, key: int, now_s: float) -> bool:
        return len(self._used_s) < self._capacity_chunks

    def _tick(self, now_s: float) -> None:
        period = int(now_s // _PERIOD_S)
        if period == self._period:
            return
        # Several periods without an event are one: nothing came that would bring the L1 over the watermark again.
        self._period = period
        if len(self._used_s) >= _WATERMARK * self._capacity_chunks:
            for _ in range(int(_EVICTED_SHARE * len(self._used_s))):
                self._used_s.popitem(last=False)


class LazyServerTier(ServerTier):
    """The same with lazy offload. That a block is evicted before its chunk was sent does not happen here."""

    def __init__(self, workload: Workload, capacity_chunks: int) -> None:
        super().__init__(workload, capacity_chunks)
        self._chunk_of_block = chunk_of_block(workload)
        # The call that computed or used a chunk last holds it in its buffer; and how far that call has come.
        self._holder: dict[int, int] = {}
        self._ready = np.zeros(len(workload.chunks), np.int64)

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        ready = min(tokens, int(self._chunks.prompt_tokens[call]))
        first = int(self._ready[call]) // self._chunks.chunk_tokens
        self._ready[call] = ready
        for key in self._chunks.call_keys(call)[first : ready // self._chunks.chunk_tokens].tolist():
            self._holder[key] = call
        return 0

    def evicted(self, blocks: Ints, now_s: float) -> int:
        self._tick(now_s)
        copied = 0
        for key in self._chunk_of_block[blocks].tolist():
            call = self._holder.pop(key, None) if key >= 0 else None
            if call is not None:
                copied += super().fill(call, int(self._ready[call]), now_s)
        return copied
