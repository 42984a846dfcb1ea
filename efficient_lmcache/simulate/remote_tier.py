"""A tier that engines share behind one link, with LMCache's CPU tier of each engine in front of it.

    retention   what no call asked for or computed for so long is gone; each use restarts the window
    link        reads wait for it in turn; a call is not queued before its read has ended. Writes are not counted
    local       an engine's own CPU tier: what it holds does not cross the link

The shared tier has no capacity: what it must hold for a retention is a result. It holds whatever a local tier does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.sizing.policy_tier import HostTier


class Reads(NamedTuple):
    """What crossed the link, read by read: float64 [reads], in the order of the asking."""

    asked_s: Floats
    ready_s: Floats
    size_bytes: Floats


class RemoteTier:
    """One store, for so many engines.

    Args:
        chunks: the calls as chunks of b tokens.
        bytes_per_token: of all ranks together.
        engines: how many share it.
        link_bytes_per_s: inf for no wait.
        retention_s: inf to keep everything.
        local_chunks: K_H of each engine's own tier; 0 for none.
    """

    def __init__(
        self,
        chunks: References,
        bytes_per_token: int,
        engines: int = 1,
        *,
        link_bytes_per_s: float = math.inf,
        retention_s: float = math.inf,
        local_chunks: int = 0,
    ) -> None:
        # Over a slower link than that reads would end after what a float can count of seconds.
        if not link_bytes_per_s >= 1:
            raise ValueError(f"RemoteTier.link_bytes_per_s is {link_bytes_per_s}; it must be at least 1")
        if not retention_s > 0:
            raise ValueError(f"RemoteTier.retention_s is {retention_s}; it must be positive")
        count = int(chunks.keys.max(initial=-1)) + 1
        self.chunks = chunks
        self.locals = [HostTier(local_chunks, count) if local_chunks else None for _ in range(engines)]
        # Which of a call's chunks crossed the link for it; of no call where nobody fetches.
        self.fetched: dict[int, range] = {}
        self._chunk_bytes = chunks.chunk_tokens * bytes_per_token
        self._link_bytes_per_s = link_bytes_per_s
        self._retention_s = retention_s
        self._link_free_s = 0.0
        self._reads: list[tuple[float, float, float]] = []
        self._born_s, self._used_s = np.full(count, -math.inf), np.full(count, -math.inf)
        self._gone: list[tuple[Floats, Floats]] = []

    def engine_tiers(self) -> list[RemoteEngineTier]:
        """Each engine's view."""
        return [RemoteEngineTier(self, number) for number in range(len(self.locals))]

    def fetch(self, call: int, engine: int, gpu_tokens: int, now_s: float) -> float:
        """As `Remote.fetch`: what neither the GPU nor the engine's own tier holds crosses the link."""
        keys = self.held(self.chunks.call_keys(call), now_s)
        first = self.reach(keys, gpu_tokens // self.chunks.chunk_tokens, engine)
        self.fetched[call] = range(first, len(keys))
        missing = len(keys) - first
        if missing <= 0:
            return now_s
        size_bytes = missing * self._chunk_bytes
        self._link_free_s = max(now_s, self._link_free_s) + size_bytes / self._link_bytes_per_s
        self._reads.append((now_s, self._link_free_s, size_bytes))
        return self._link_free_s

    def reach(self, keys: Ints, first: int, engine: int) -> int:
        """Up to where the engine's own tier continues the `first` keys."""
        local = self.locals[engine]
        return first + local.match(keys[first:]) if local else first

    def held(self, keys: Ints, now_s: float) -> Ints:
        """The leading keys that are held; a view."""
        alive = self._used_s[keys] >= self._oldest_s(now_s)
        return keys if alive.all() else keys[: int(alive.argmin())]

    def use(self, keys: Ints, now_s: float) -> None:
        """Somebody asked for these or computed them."""
        anew = keys[self._used_s[keys] < self._oldest_s(now_s)]
        again = anew[np.isfinite(self._used_s[anew])]
        if len(again):
            self._gone.append((self._born_s[again], self._used_s[again] + self._retention_s))
        self._born_s[anew] = now_s
        self._used_s[keys] = now_s

    def _oldest_s(self, now_s: float) -> float:
        """Since when something must have been used to be held. Nothing is used before 0."""
        return max(now_s - self._retention_s, 0.0)

    @property
    def reads(self) -> Reads:
        columns = np.array(self._reads, np.float64).reshape(-1, 3).T
        return Reads(*columns)

    def spans(self) -> tuple[Floats, Floats]:
        """When chunks came and when they went or will go; float64 [spans] both, a chunk may have several."""
        known = np.flatnonzero(np.isfinite(self._used_s))
        spans = [*self._gone, (self._born_s[known], self._used_s[known] + self._retention_s)]
        born_s, gone_s = (np.concatenate(ends) for ends in zip(*spans, strict=True))
        return born_s, gone_s


class RemoteEngineTier:
    """What one engine sees of it, as a `KVTier`."""

    def __init__(self, remote: RemoteTier, engine: int) -> None:
        self.stored_tokens = 0
        self._remote = remote
        self._engine = engine
        self._local = remote.locals[engine]
        self._chunk_tokens = remote.chunks.chunk_tokens
        # Chunks of each call that it found or stored.
        self._saved = np.zeros(len(remote.chunks), np.int64)

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        keys = self._remote.held(self._remote.chunks.call_keys(call)[: tokens // self._chunk_tokens], now_s)
        keys = keys[: self._here(call, keys, gpu_tokens)]
        self._remote.use(keys, now_s)
        if self._local:
            self._local.use(keys[::-1])
        self._saved[call] = len(keys)
        return len(keys) * self._chunk_tokens

    def _here(self, call: int, keys: Ints, gpu_tokens: int) -> int:
        """How many of the held keys are on this side of the link: what was stored since the call's read is not."""
        fetched = self._remote.fetched.get(call)
        if fetched is None:
            return len(keys)
        here = self._remote.reach(keys, gpu_tokens // self._chunk_tokens, self._engine)
        return self._remote.reach(keys, fetched.stop, self._engine) if here in fetched else here

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        chunks = self._remote.chunks
        first, last = int(self._saved[call]), min(tokens, int(chunks.prompt_tokens[call])) // self._chunk_tokens
        if last <= first:
            return 0
        keys = chunks.call_keys(call)[first:last]
        self._remote.use(keys, now_s)
        if self._local:
            self._local.use(keys[::-1])
        self._saved[call] = last
        copied = len(keys) * self._chunk_tokens
        self.stored_tokens += copied
        return copied

    def evicted(self, blocks: Ints, now_s: float) -> int:
        return 0
