"""Section 1: the gap between two turns of an agent on the server, and what the tier loses in it."""

from __future__ import annotations

from dataclasses import dataclass

from efficient_lmcache.report.latency import Quantiles
from efficient_lmcache.report.runs import Run


@dataclass(frozen=True, slots=True)
class ReuseGap:
    """Between the end of a task's response and its next call, over all pairs of consecutive answered calls.

    Attributes:
        gap_s: to the next call's first lookup, when the scheduler considers it: own time and waiting.
        own_s: to the next call's dispatch: the agent's and its tools' own time, as replayed.
        median_ratio: median gap over median own time; None where the latter is 0.
        waiting_s: gap less own time.
    """

    gap_s: Quantiles
    own_s: Quantiles
    waiting_s: Quantiles
    median_ratio: float | None


@dataclass(frozen=True, slots=True)
class EvictedBeforeReuse:
    """What became of the chunks that a call wrote to the tier by its task's next call.

    Attributes:
        written_chunks: new full chunks of admitted requests whose task called again.
        needed_chunks: of those, in the next call's prompt at the same place.
        evicted_chunks: of those, beyond the next call's host match.
        recomputed_chunks: of those, neither on the GPU, so that they were computed again.
        evicted_share, recomputed_share: of the written chunks; None without any.
    """

    written_chunks: int
    needed_chunks: int
    evicted_chunks: int
    recomputed_chunks: int
    evicted_share: float | None
    recomputed_share: float | None


@dataclass(frozen=True, slots=True)
class NewKvReuse:
    """Of a trace: how much of the KV that a call adds its task's next call needs.

    A call adds what of its prompt and output lies beyond its cache-stable prompt length.

    Attributes:
        new_tokens: added by calls that have a next one.
        reappearing_tokens: of those, within the next call's cache-stable prompt length.
        share: of new_tokens.
        share_of_all: the same over all calls, a task's last one included (nothing of it reappears).
    """

    new_tokens: int
    reappearing_tokens: int
    share: float | None
    share_of_all: float | None


def reuse_gap(run: Run) -> ReuseGap:
    """Raises Unavailable without decisions, or where they do not name the trace's tasks."""
    raise NotImplementedError


def evicted_before_reuse(run: Run) -> EvictedBeforeReuse:
    """Raises Unavailable as `reuse_gap`, and without the trace."""
    raise NotImplementedError


def new_kv_reuse(run: Run) -> NewKvReuse:
    """Raises Unavailable without the trace."""
    raise NotImplementedError
