"""The reuse working set of a pool of agents (paper, Eq. 5) and what it says of a deployment (Section 3)."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import NamedTuple

# Makes a named tuple of its values, without the function that calling its class runs.
_new = tuple.__new__


class WorkingSetEstimate(NamedTuple):
    """A, N and beta at one moment.

    Attributes:
        active_pool: A, tasks with a first lookup inside the window.
        mean_prompt_tokens: N, mean length of the latest first-looked-up prompts.
        bytes_per_token: beta, KV bytes per token on one rank.
    """

    active_pool: int
    mean_prompt_tokens: float
    bytes_per_token: int

    @property
    def bytes(self) -> float:
        """Eq. 5: (A - 1) N beta, in bytes per rank."""
        return reuse_working_set_bytes(self.active_pool, self.mean_prompt_tokens, self.bytes_per_token)


def reuse_working_set_bytes(active_pool: int, mean_prompt_tokens: float, bytes_per_token: int) -> float:
    """Eq. 5: what the other A - 1 agents reference before one agent returns, in bytes per rank."""
    return (active_pool - 1 if active_pool else 0) * mean_prompt_tokens * bytes_per_token


def gamma_h(working_set_bytes: float, host_capacity_bytes: float) -> float:
    """The reuse working set over the host capacity C_H, both per rank; infinite without a host tier."""
    return working_set_bytes / host_capacity_bytes if host_capacity_bytes > 0 else float("inf")


def gamma_g(active_pool: int, mean_prompt_tokens: float, gpu_kv_tokens: float) -> float:
    """The pool's context A N over the GPU's KV capacity K_G, both in tokens."""
    if gpu_kv_tokens <= 0:
        raise ValueError(f"gpu_kv_tokens is {gpu_kv_tokens}; it must be positive")
    return active_pool * mean_prompt_tokens / gpu_kv_tokens


class WorkingSetEstimator:
    """A over a window of task activity, N over the latest first lookups (Appendix D, Table 7).

    An observation costs O(1), and O(log A) more at most once per task and window; memory is one entry per active task
    and per prompt of the window. Time is an argument, in seconds on any monotonic clock; an earlier time than the
    latest one seen counts as the latest one.
    """

    __slots__ = (
        "_bytes_per_token",
        "_entries",
        "_first_seen_s",
        "_last_lookup_s",
        "_latest_s",
        "_next_prompt",
        "_prompt_count",
        "_prompt_sum_tokens",
        "_prompts",
        "_seen",
        "_window_s",
    )

    def __init__(self, bytes_per_token: int, window_s: float = 60.0, prompt_window_lookups: int = 256) -> None:
        if bytes_per_token < 0 or window_s <= 0 or prompt_window_lookups < 1:
            raise ValueError(
                f"bytes_per_token={bytes_per_token} must be >= 0, window_s={window_s} > 0, "
                f"prompt_window_lookups={prompt_window_lookups} >= 1"
            )
        self._bytes_per_token = bytes_per_token
        self._window_s = window_s
        self._last_lookup_s: dict[Hashable, float] = {}
        # A heap with one entry per active task: when it was seen, which need not be the latest time.
        self._seen: list[tuple[float, int, Hashable]] = []
        self._entries = 0
        # The heap's first time: no task leaves before it has left the window.
        self._first_seen_s = float("inf")
        # A ring: the next prompt takes the place of the oldest one.
        self._prompts = [0] * prompt_window_lookups
        self._next_prompt = 0
        self._prompt_count = 0
        self._prompt_sum_tokens = 0
        self._latest_s = float("-inf")

    def observe(self, task: Hashable, prompt_tokens: int, now_s: float) -> WorkingSetEstimate:
        """Count a request's first lookup: its task is active, its prompt enters the mean. Returns the new estimate."""
        # As in `admission.decide`: between a lookup and its answer, whatever the interpreter does rarely is slow.
        if now_s < self._latest_s:
            now_s = self._latest_s
        else:
            self._latest_s = now_s
        active = self._last_lookup_s
        if task not in active:
            self._enter(task, now_s)
        active[task] = now_s
        if now_s - self._window_s > self._first_seen_s:
            self._expire()
        prompts, place = self._prompts, self._next_prompt
        self._prompt_sum_tokens = sum_tokens = self._prompt_sum_tokens + prompt_tokens - prompts[place]
        prompts[place] = prompt_tokens
        count = len(prompts)
        place += 1
        self._next_prompt = place if place < count else 0
        if self._prompt_count < count:
            self._prompt_count = count = self._prompt_count + 1
        return _new(WorkingSetEstimate, (len(active), sum_tokens / count, self._bytes_per_token))

    def estimate(self, now_s: float) -> WorkingSetEstimate:
        """The estimate at `now_s`; zero tasks and a zero mean before the first observation."""
        if now_s > self._latest_s:
            self._latest_s = now_s
        if self._latest_s - self._window_s > self._first_seen_s:
            self._expire()
        mean = self._prompt_sum_tokens / self._prompt_count if self._prompt_count else 0.0
        return WorkingSetEstimate(len(self._last_lookup_s), mean, self._bytes_per_token)

    def active_tasks(self) -> list[Hashable]:
        """The tasks that the latest estimate or observation counted, longest inactive first."""
        return sorted(self._last_lookup_s, key=self._last_lookup_s.__getitem__)

    @property
    def prompts(self) -> tuple[int, int]:
        """The prompts that make up the mean: how many, and the sum of their lengths in tokens."""
        return self._prompt_count, self._prompt_sum_tokens

    def _enter(self, task: Hashable, now_s: float) -> None:
        # The number keeps the heap from comparing tasks.
        self._entries += 1
        heappush(self._seen, (now_s, self._entries, task))
        self._first_seen_s = self._seen[0][0]

    def _expire(self) -> None:
        """Tasks that were last seen before the window leave; those seen again since their entry get a later one."""
        oldest_kept_s, active, seen = self._latest_s - self._window_s, self._last_lookup_s, self._seen
        while seen and seen[0][0] < oldest_kept_s:
            task = heappop(seen)[2]
            if active[task] < oldest_kept_s:
                del active[task]
            else:
                self._enter(task, active[task])
        self._first_seen_s = seen[0][0] if seen else float("inf")
