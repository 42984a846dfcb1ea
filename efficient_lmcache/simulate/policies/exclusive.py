"""Exclusive tiers: a chunk is written when the GPU evicts it, so that host and GPU together hold C_H + K_G.

    sole     chunks that the host alone holds
    spare    copies of what the GPU holds too: restored chunks, kept while there is room, since a copy need not be
             written again when the GPU evicts it; they are the first to go
    bypass   the GPU evicts a chunk and the tier does not take it

The GPU evicts a prompt's tail first, and the tier evicts in the order of arrival or by a rule that takes tails first:
what it holds of a prompt follows what the GPU holds. A lookup goes on behind the GPU's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from efficient_lmcache.core.references import Ints
from efficient_lmcache.simulate.policies.blocks import chunk_of_block
from efficient_lmcache.sizing.workload import Workload


class ExclusiveTier:
    """The oldest arrival is evicted first. One engine's: it must hear of all that its GPU computes and evicts.

    Attributes:
        stored_tokens: copied from GPU to host since the start, per rank.
        sole, spare: chunks by arrival.
        evicted_chunks: sole ones that made room. bypassed_chunks: that the GPU evicted and the tier did not take.
    """

    def __init__(self, workload: Workload, capacity_chunks: int) -> None:
        self.stored_tokens = 0
        self.evicted_chunks = 0
        self.bypassed_chunks = 0
        self.sole: dict[int, None] = {}
        self.spare: dict[int, None] = {}
        self._chunks = workload.chunks
        self._capacity_chunks = capacity_chunks
        self._chunk_of_block = chunk_of_block(workload)
        # What the latest lookup found: until the call's first step, the engine counts on it. Whoever is looked up next
        # was behind it in the queue.
        self._awaited: frozenset[int] = frozenset()
        self._awaited_by = -1
        self._filled_chunks = [0] * len(workload.chunks)

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        chunk_tokens = self._chunks.chunk_tokens
        keys = self._chunks.call_keys(call)[: tokens // chunk_tokens].tolist()
        self._seen(call, keys, now_s)
        found = gpu_tokens // chunk_tokens
        while found < len(keys) and (keys[found] in self.sole or keys[found] in self.spare):
            found += 1
        self._filled_chunks[call] = 0
        self._awaited, self._awaited_by = frozenset(keys[:found]), call
        return found * chunk_tokens

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        if call == self._awaited_by:
            self._awaited = frozenset()
        first, last = self._filled_chunks[call], tokens // self._chunks.chunk_tokens
        self._filled_chunks[call] = last
        for key in self._chunks.call_keys(call)[first:last].tolist():
            if key in self.sole:
                self._leave(key)
                self.spare[key] = None
        return 0

    def evicted(self, blocks: Ints, now_s: float) -> int:
        written = 0
        self._begin(now_s)
        for key in self._chunk_of_block[blocks].tolist():
            if key < 0 or key in self.sole:
                continue
            if key in self.spare:
                del self.spare[key]
            elif self._makes_room(key):
                written += 1
            else:
                self.bypassed_chunks += 1
                continue
            self._arrive(key)
        self.stored_tokens += written * self._chunks.chunk_tokens
        return written * self._chunks.chunk_tokens

    def _makes_room(self, key: int) -> bool:
        if len(self.sole) + len(self.spare) < self._capacity_chunks:
            return True
        victim = self._victim(key)
        if victim is None:
            return False
        if victim in self.spare:
            del self.spare[victim]
        else:
            self._leave(victim)
            self.evicted_chunks += 1
        return True

    def _is_awaited(self, key: int) -> bool:
        return key in self._awaited

    def _arrive(self, key: int) -> None:
        self.sole[key] = None

    def _leave(self, key: int) -> None:
        del self.sole[key]

    def _seen(self, call: int, keys: list[int], now_s: float) -> None:
        """A call asks for these chunks."""

    def _begin(self, now_s: float) -> None:
        """The GPU evicts something now."""

    def _victim(self, key: int) -> int | None:
        """The chunk that makes room for this one; None to bypass."""
        spare = self._latest_spare()
        return next(self._not_awaited(self.sole), None) if spare is None else spare

    def _latest_spare(self) -> int | None:
        """The copy that the GPU will be the last to need."""
        return next(self._not_awaited(reversed(self.spare)), None)

    def _not_awaited(self, keys: Iterable[int]) -> Iterator[int]:
        return (key for key in keys if not self._is_awaited(key))
