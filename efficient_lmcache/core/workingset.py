"""The reuse working set of a pool of agents (paper, Eq. 5) and what it says of a deployment (Section 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple


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
        others = self.active_pool - 1 if self.active_pool else 0
        return others * self.mean_prompt_tokens * self.bytes_per_token


def reuse_working_set_bytes(active_pool: int, mean_prompt_tokens: float, bytes_per_token: int) -> float:
    """Eq. 5: what the other A - 1 agents reference before one agent returns, in bytes per rank."""
    return WorkingSetEstimate(active_pool, mean_prompt_tokens, bytes_per_token).bytes


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

    O(1) amortised per observation; memory is one entry per active task and per prompt of the window. Time is an
    argument, in seconds on any monotonic clock; an earlier time than the latest one seen counts as the latest one.
    """

    def __init__(self, bytes_per_token: int, window_s: float = 60.0, prompt_window_lookups: int = 256) -> None:
        if bytes_per_token < 0 or window_s <= 0 or prompt_window_lookups < 1:
            raise ValueError(
                f"bytes_per_token={bytes_per_token} must be >= 0, window_s={window_s} > 0, "
                f"prompt_window_lookups={prompt_window_lookups} >= 1"
            )
        self._bytes_per_token = bytes_per_token
        self._window_s = window_s
        self._prompt_window_lookups = prompt_window_lookups
        # Oldest first: a dict keeps insertion order, and an observed task is inserted anew.
        self._last_lookup_s: dict[Hashable, float] = {}
        self._prompts: deque[int] = deque()
        self._prompt_sum_tokens = 0
        self._latest_s = float("-inf")

    def observe(self, task: Hashable, prompt_tokens: int, now_s: float) -> WorkingSetEstimate:
        """Count a request's first lookup: its task is active, its prompt enters the mean. Returns the new estimate."""
        if now_s < self._latest_s:
            now_s = self._latest_s
        active, prompts = self._last_lookup_s, self._prompts
        active.pop(task, None)
        active[task] = now_s
        prompts.append(prompt_tokens)
        self._prompt_sum_tokens += prompt_tokens
        if len(prompts) > self._prompt_window_lookups:
            self._prompt_sum_tokens -= prompts.popleft()
        return self.estimate(now_s)

    def estimate(self, now_s: float) -> WorkingSetEstimate:
        """The estimate at `now_s`; zero tasks and a zero mean before the first observation."""
        if now_s > self._latest_s:
            self._latest_s = now_s
        active, prompts = self._last_lookup_s, self._prompts
        oldest_kept_s = self._latest_s - self._window_s
        while active and active[oldest := next(iter(active))] < oldest_kept_s:
            del active[oldest]
        mean = self._prompt_sum_tokens / len(prompts) if prompts else 0.0
        return WorkingSetEstimate(len(active), mean, self._bytes_per_token)

    def active_tasks(self) -> list[Hashable]:
        """The tasks that the latest estimate or observation counted, longest inactive first."""
        return list(self._last_lookup_s)

    @property
    def prompts(self) -> tuple[int, int]:
        """The prompts that make up the mean: how many, and the sum of their lengths in tokens."""
        return len(self._prompts), self._prompt_sum_tokens
