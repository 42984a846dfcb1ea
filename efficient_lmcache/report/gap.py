"""Section 1: the gap between two turns of an agent on the server, and what the tier loses in it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from efficient_lmcache.report.latency import Quantiles, quantiles
from efficient_lmcache.report.lookups import lookups
from efficient_lmcache.report.prefixes import CallPrefix, call_prefixes
from efficient_lmcache.report.runs import Run, Unavailable


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
    found = lookups(run)
    rows = _answered(run)
    decided = [lookup for lookup in found if (lookup.task, lookup.call) in rows]
    if not decided:
        raise Unavailable("no answered call has a decision")
    # The server's clock and the driver's differ by a constant. No lookup precedes its call's dispatch, so the smallest
    # difference is that constant, but for the time that the promptest lookup took.
    offset_s = min(lookup.now_s - rows[lookup.task, lookup.call]["dispatched_s"] for lookup in decided)
    gaps_s, owns_s = [], []
    for lookup in decided:
        previous = rows.get((lookup.task, lookup.call - 1))
        if previous is not None:
            gaps_s.append(lookup.now_s - offset_s - previous["finished_s"])
            owns_s.append(rows[lookup.task, lookup.call]["dispatched_s"] - previous["finished_s"])
    if not gaps_s:
        raise Unavailable("no task was answered twice")
    gap_s, own_s = quantiles(gaps_s), quantiles(owns_s)
    waiting_s = quantiles([gap - own for gap, own in zip(gaps_s, owns_s, strict=True)])
    return ReuseGap(gap_s, own_s, waiting_s, gap_s.p50 / own_s.p50 if own_s.p50 > 0 else None)


def evicted_before_reuse(run: Run) -> EvictedBeforeReuse:
    """Raises Unavailable as `reuse_gap`, and without the trace."""
    found = {(lookup.task, lookup.call): lookup for lookup in lookups(run)}
    prefixes, rows = call_prefixes(run.trace), _answered(run)
    written = needed = evicted = recomputed = 0
    for (task, call), lookup in found.items():
        following = found.get((task, call + 1))
        if not lookup.save or following is None or (task, call + 1) not in rows:
            continue
        first, end = lookup.host_match_tokens // run.chunk_tokens, lookup.prompt_tokens // run.chunk_tokens
        shared = min(end, prefixes[task][call + 1].previous_prompt // run.chunk_tokens)
        matched = following.host_match_tokens // run.chunk_tokens
        cached = (rows[task, call + 1]["cached_tokens"] or 0) // run.chunk_tokens
        written += end - first
        needed += max(0, shared - first)
        evicted += max(0, shared - max(first, matched))
        recomputed += max(0, shared - max(first, matched, cached))
    return EvictedBeforeReuse(
        written, needed, evicted, recomputed, _share(evicted, written), _share(recomputed, written)
    )


def new_kv_reuse(run: Run) -> NewKvReuse:
    """Raises Unavailable without the trace."""
    new = reappearing = last = 0
    for calls in call_prefixes(run.trace).values():
        for call, following in pairwise(calls):
            new += _added(call)
            reappearing += max(0, following.cache_stable - call.cache_stable)
        last += _added(calls[-1])
    return NewKvReuse(new, reappearing, _share(reappearing, new), _share(reappearing, new + last))


def _added(call: CallPrefix) -> int:
    return call.prompt + call.output - call.cache_stable


def _answered(run: Run) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["task"], row["call"]): row for row in run.calls if row["status"] == "answered"}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
