"""Tiers that write a prompt's chunks as soon as they are computed, as LMCache does, and ask about each chunk.

A refused chunk ends a call's writes: what lies behind it would not be found. Stores leave out what the tier holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from efficient_lmcache.core.references import Ints, References

_SAMPLE_FACTOR = 10


class ChunkTier:
    """An LRU tier of K_H chunks; lookups promote what they find tail first, so that the tail is evicted first.

    Attributes:
        stored_tokens: copied from GPU to host since the start, per rank.
    """

    def __init__(self, chunks: References, capacity_chunks: int) -> None:
        self.stored_tokens = 0
        self._chunks = chunks
        self._capacity_chunks = capacity_chunks
        # Least recently used first, with the time of the last use.
        self._used_s: OrderedDict[int, float] = OrderedDict()
        # Chunks of each call that it found or stored: LMCache's tracker goes on behind them.
        self._saved = np.zeros(len(chunks), np.int64)

    @property
    def registered_chunks(self) -> int:
        return len(self._used_s)

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        chunk_tokens = self._chunks.chunk_tokens
        keys = self._chunks.call_keys(call)[: tokens // chunk_tokens].tolist()
        self._seen(keys, now_s)
        found = 0
        while found < len(keys) and keys[found] in self._used_s:
            found += 1
        for key in reversed(keys[:found]):
            self._used_s[key] = now_s
            self._used_s.move_to_end(key)
        self._saved[call] = found
        return found * chunk_tokens

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        chunk_tokens = self._chunks.chunk_tokens
        first, last = int(self._saved[call]), min(tokens, int(self._chunks.prompt_tokens[call])) // chunk_tokens
        written = 0
        for key in self._chunks.call_keys(call)[first:last].tolist():
            if key not in self._used_s:
                if not self._enters(key, now_s):
                    break
                self._used_s[key] = now_s
                written += 1
            self._saved[call] += 1
        self.stored_tokens += written * chunk_tokens
        return written * chunk_tokens

    def evicted(self, blocks: Ints, now_s: float) -> int:
        return 0

    def _seen(self, keys: list[int], now_s: float) -> None:
        """A call asks for these chunks."""

    def _enters(self, key: int, now_s: float) -> bool:
        """Make room for an absent chunk; False to refuse it."""
        if len(self._used_s) >= self._capacity_chunks:
            self._used_s.popitem(last=False)
        return True


class FrequencyGate(ChunkTier):
    """A chunk is written from its second sighting on (vLLM's OffloadingConnector with `store_threshold` = 2)."""

    _THRESHOLD = 2

    def __init__(self, chunks: References, capacity_chunks: int) -> None:
        super().__init__(chunks, capacity_chunks)
        self._sightings: Counter[int] = Counter()

    def _seen(self, keys: list[int], now_s: float) -> None:
        self._sightings.update(keys)

    def _enters(self, key: int, now_s: float) -> bool:
        return self._sightings[key] >= self._THRESHOLD and super()._enters(key, now_s)


class TinyLFU(ChunkTier):
    """A full tier takes a chunk that was seen more often lately than the one it would evict (Einziger et al., 2017).

    Counts are exact, where the paper's are a sketch's; they are halved once the sample is ten times the tier.
    """

    def __init__(self, chunks: References, capacity_chunks: int) -> None:
        super().__init__(chunks, capacity_chunks)
        self._sightings: Counter[int] = Counter()
        self._sample = 0

    def _seen(self, keys: list[int], now_s: float) -> None:
        self._sightings.update(keys)
        self._sample += len(keys)
        if self._sample >= _SAMPLE_FACTOR * self._capacity_chunks:
            self._sample //= 2
            self._sightings = Counter({key: count // 2 for key, count in self._sightings.items() if count > 1})

    def _enters(self, key: int, now_s: float) -> bool:
        if len(self._used_s) >= self._capacity_chunks:
            oldest = next(iter(self._used_s))
            if self._sightings[key] <= self._sightings[oldest]:
                return False
        return super()._enters(key, now_s)


class Retention(ChunkTier):
    """A chunk stays for so many seconds after its last use; a store that finds only younger ones is dropped."""

    def __init__(self, chunks: References, capacity_chunks: int, retention_s: float) -> None:
        super().__init__(chunks, capacity_chunks)
        self._retention_s = retention_s

    def _enters(self, key: int, now_s: float) -> bool:
        if len(self._used_s) >= self._capacity_chunks:
            oldest_s = next(iter(self._used_s.values()))
            if now_s - oldest_s < self._retention_s:
                return False
        return super()._enters(key, now_s)
