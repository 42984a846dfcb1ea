"""A and N of a pool at the moment of a lookup: what all engines said last, and this one's lookups since then."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.telemetry.pool import PoolSnapshot


class HasSnapshot(Protocol):
    """`pool.PoolTelemetry`, whose thread replaces the snapshot whenever it likes."""

    snapshot: PoolSnapshot | None


class _Seen(NamedTuple):
    task: int
    prompt_tokens: int
    now_s: float


class PoolNow:
    """For the one thread that looks up: no I/O, no waiting. A lookup costs one hash of its task's name."""

    def __init__(self, source: HasSnapshot) -> None:
        self._source = source
        self._snapshot: PoolSnapshot | None = None
        # This engine's lookups that the snapshot does not know of, and their tasks that it does not count.
        self._since: deque[_Seen] = deque()
        self._since_tokens = 0
        self._new_tasks: set[int] = set()

    def at_lookup(
        self, task: str, tenant: str | None, is_named: bool, prompt_tokens: int, now_s: float
    ) -> PoolEstimate | None:
        """The pool with this lookup in it; None until the pool was first estimated.

        Args:
            task, tenant, is_named, prompt_tokens, now_s: as in `pool.Lookup`.
        """
        snapshot = self._source.snapshot
        if snapshot is None:
            return None
        if snapshot is not self._snapshot:
            self._start_from(snapshot)
        self._add(snapshot, _Seen(snapshot.hasher.hash(task, tenant, is_named), prompt_tokens, now_s))
        estimate, new_lookups = snapshot.estimate, len(self._since)
        # A pool at rest has a mean, and no lookup to weigh it by.
        weight = estimate.window_lookups or min(estimate.active_pool, 1)
        tokens = weight * estimate.mean_prompt_tokens + self._since_tokens
        return PoolEstimate(
            active_pool=estimate.active_pool + len(self._new_tasks),
            mean_prompt_tokens=tokens / (weight + new_lookups),
            window_lookups=estimate.window_lookups + new_lookups,
            engines=estimate.engines,
        )

    def _start_from(self, snapshot: PoolSnapshot) -> None:
        """Take a newer snapshot, which may be older than the latest lookups."""
        known, self._snapshot = self._snapshot, snapshot
        later = [seen for seen in self._since if seen.now_s >= snapshot.seen_s]
        self._since.clear()
        self._since_tokens = 0
        self._new_tasks.clear()
        if known is not None and known.hasher == snapshot.hasher:
            for seen in later:
                self._add(snapshot, seen)

    def _add(self, snapshot: PoolSnapshot, seen: _Seen) -> None:
        self._since.append(seen)
        self._since_tokens += seen.prompt_tokens
        # A task above the threshold is among those that A extrapolates.
        if seen.task < snapshot.tasks.hash_threshold and seen.task not in snapshot.tasks.hashes:
            self._new_tasks.add(seen.task)
