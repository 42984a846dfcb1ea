"""What lies behind an engine's GPU cache: LMCache's CPU tier of one rank, with the connector's own admission policy."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from efficient_lmcache.core.admission import Decision, RequestFacts
from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.sizing.policy_tier import Admission, HostTier, TierReports


class KVTier(Protocol):
    """Keeps KV outside the GPU; one engine's, or several engines' together.

    Attributes:
        stored_tokens: copied from GPU to host since the start, per rank.
    """

    stored_tokens: int

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        """h: tokens up to which tier and GPU together hold the call; LMCache's counts from the tier's first chunk on.

        Args:
            tokens: the prompt's, and after a preemption those of the output so far.
            gpu_tokens: leading ones that the GPU's cache holds.
        """
        ...

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        """The GPU holds the call's first `tokens` tokens now. Returns how many are copied to the tier for it."""
        ...

    def evicted(self, blocks: Ints, now_s: float) -> int:
        """The GPU's prefix cache loses these blocks, in this order. Returns how many tokens are copied for it."""
        ...


class Remote(Protocol):
    """What lies afar, where all engines fetch from over one link."""

    def fetch(self, call: int, engine: int, gpu_tokens: int, now_s: float) -> float:
        """When the engine has what it needs of the call from afar; `now_s` if that is nothing.

        Args:
            engine: its number.
            gpu_tokens: leading ones that the engine's GPU caches.
        """
        ...


class NoTier:
    """Recompute: nothing is kept."""

    stored_tokens = 0

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        return 0

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        return 0

    def evicted(self, blocks: Ints, now_s: float) -> int:
        return 0


class LMCacheTier:
    """LMCache's CPU tier: a prompt's full chunks are written as soon as they are computed, unless it is declined.

    Args:
        chunks: the calls as chunks of b tokens; a call's session is its task.
        capacity_chunks: K_H, at least 1.
        bytes_per_token: beta per rank.

    Attributes:
        policy: the connector's own object; asked at each call's first lookup.
        decisions: of every call that was looked up.
        evicted_chunks: to make room, since the start.
    """

    def __init__(self, chunks: References, capacity_chunks: int, admission: Admission, bytes_per_token: int) -> None:
        self.policy = admission.policy(chunks.chunk_tokens, bytes_per_token, capacity_chunks)
        self.decisions: dict[int, Decision] = {}
        self.stored_tokens = 0
        self._chunks = chunks
        self._tier = HostTier(capacity_chunks, int(chunks.keys.max(initial=-1)) + 1)
        self._reports = TierReports(self._tier, chunks.chunk_tokens, bytes_per_token, admission.activity_window_s)
        self._deduplicates = admission.deduplicates
        # Chunks of each call that it found or stored: LMCache's tracker goes on behind them.
        self._saved = np.zeros(len(chunks), np.int64)

    @property
    def registered_chunks(self) -> int:
        return self._tier.registered_chunks

    @property
    def evicted_chunks(self) -> int:
        return self._reports.evictions.grand_total

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        chunks = self._chunks
        keys = chunks.call_keys(call)[: tokens // chunks.chunk_tokens]
        report = self._reports.latest(now_s)
        found = self._tier.match(keys)
        self._tier.use(keys[:found][::-1])
        self._saved[call] = found
        if call not in self.decisions:
            facts = RequestFacts(
                int(chunks.session[call]), int(chunks.prompt_tokens[call]), found * chunks.chunk_tokens
            )
            self.decisions[call] = self.policy.decide(facts, report, now_s)
        return found * chunks.chunk_tokens

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        chunk_tokens = self._chunks.chunk_tokens
        first, last = int(self._saved[call]), min(tokens, int(self._chunks.prompt_tokens[call])) // chunk_tokens
        if last <= first or not self.decisions[call].save:
            return 0
        keys = self._chunks.call_keys(call)[first:last]
        self._reports.latest(now_s)
        inserted, evicted = self._tier.store(keys)
        self._saved[call] = last
        self._reports.evictions.add(evicted, now_s)
        copied = (inserted if self._deduplicates else len(keys)) * chunk_tokens
        self.stored_tokens += copied
        return copied

    def evicted(self, blocks: Ints, now_s: float) -> int:
        return 0
