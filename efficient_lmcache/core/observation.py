"""What one engine saw of a pool of agents, and A and N of the pool from what all its engines saw.

Requests are routed by load, so a task may show up on several engines, and no engine sees the pool. A task counts once
for the pool because its hash is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

#: Task hashes are uniform in [0, HASH_RANGE).
HASH_RANGE = 2**63
#: No message lists more tasks; of more active ones, it lists those with the smallest hashes.
MAX_TASK_HASHES = 4096


@dataclass(frozen=True, slots=True)
class Observation:
    """One engine's activity window, as its scheduler saw it.

    Attributes:
        engine_id: who saw it.
        sequence: counts the engine's observations.
        window_s: a task is active for so long after a first lookup.
        task_hashes: ascending; every active task whose hash is below `hash_threshold`.
        hash_threshold: `HASH_RANGE` where all active tasks are listed.
        window_lookups: first lookups inside the window.
        prompt_lookups: the latest first lookups, whose prompts are summed up; bounded by their number, not by time.
        prompt_tokens: the sum of those prompts' lengths.
        pressure: of the latest decision; None without one inside the window.
        received_s: the *receiver's* monotonic clock at receipt; never travels.
    """

    engine_id: str
    sequence: int
    window_s: float
    task_hashes: tuple[int, ...]
    hash_threshold: int
    window_lookups: int
    prompt_lookups: int
    prompt_tokens: int
    pressure: bool | None = None
    received_s: float = float("-inf")

    @property
    def mean_prompt_tokens(self) -> float:
        """N as this engine sees it; 0 before the first lookup."""
        return self.prompt_tokens / self.prompt_lookups if self.prompt_lookups else 0.0

    def age_s(self, now_s: float) -> float:
        """Seconds since receipt on the receiver's clock."""
        return now_s - self.received_s


class PoolEstimate(NamedTuple):
    """A and N of a pool.

    Attributes:
        active_pool: A, distinct active tasks of all engines.
        mean_prompt_tokens: N, the engines' means weighted by their lookups.
        window_lookups: of all engines.
        engines: whose observations these are.
    """

    active_pool: int
    mean_prompt_tokens: float
    window_lookups: int
    engines: int


def smallest_hashes(hashes: Collection[int]) -> tuple[tuple[int, ...], int]:
    """What an observation lists of these distinct task hashes: its `task_hashes` and `hash_threshold`."""
    ascending = sorted(hashes)
    if len(ascending) <= MAX_TASK_HASHES:
        return tuple(ascending), HASH_RANGE
    return tuple(ascending[:MAX_TASK_HASHES]), ascending[MAX_TASK_HASHES]


class PoolTasks(NamedTuple):
    """The distinct active tasks of a pool.

    Attributes:
        hashes: of every one whose hash is below the threshold.
        hash_threshold: `HASH_RANGE` where all are listed.
    """

    hashes: frozenset[int]
    hash_threshold: int

    @property
    def active_pool(self) -> int:
        """A; extrapolated where not all are listed."""
        if self.hash_threshold == HASH_RANGE:
            return len(self.hashes)
        return round(len(self.hashes) * HASH_RANGE / self.hash_threshold)


def pool_tasks(observations: Collection[Observation]) -> PoolTasks:
    """The tasks of the given observations, at most one of each engine."""
    threshold = min((seen.hash_threshold for seen in observations), default=HASH_RANGE)
    return PoolTasks(
        frozenset(task for seen in observations for task in seen.task_hashes if task < threshold), threshold
    )


def pool_estimate(observations: Collection[Observation]) -> PoolEstimate:
    """A and N over the given observations, at most one of each engine.

    A is exact while every engine lists all its tasks. Beyond that it extrapolates from the hashes below the smallest
    threshold, of which at least `MAX_TASK_HASHES` are known (a theta sketch: relative standard error 1.6 %).

    N weighs by the lookups of the activity window and not by the summed prompts, whose number says nothing of an
    engine's share once it has reached its bound. In a pool at rest, where no window holds a lookup, the latter decide.
    """
    window_lookups = sum(seen.window_lookups for seen in observations)
    weights = [(seen.window_lookups if window_lookups else seen.prompt_lookups, seen) for seen in observations]
    weight = sum(lookups for lookups, _ in weights)
    mean = sum(lookups * seen.mean_prompt_tokens for lookups, seen in weights) / weight if weight else 0.0
    return PoolEstimate(pool_tasks(observations).active_pool, mean, window_lookups, len(observations))
