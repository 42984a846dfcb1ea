"""Figure 6: when the chunks that admission declined are referenced again, against what the tier holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.report.latency import Quantiles, quantiles
from efficient_lmcache.report.lookups import Lookup, lookups
from efficient_lmcache.report.runs import Run, Unavailable


@dataclass(frozen=True, slots=True)
class DeclinedReuse:
    """One run's declined chunks by D, the distinct other chunks referenced before the next reference.

    Attributes:
        capacity_chunks: K_H.
        declined: requests declined.
        chunks: their new full chunks, once per decline.
        beyond: with D >= K_H.
        never: not referenced again.
        within: with D < K_H.
        condition_share: (beyond + never) / chunks, the condition of Proposition 1; None without declined chunks.
        ratio: quantiles of D / K_H over the chunks referenced again; None without any.
    """

    capacity_chunks: int
    declined: int
    chunks: int
    beyond: int
    never: int
    within: int
    condition_share: float | None
    ratio: Quantiles | None


def declined_reuse(run: Run) -> DeclinedReuse:
    """Raises Unavailable without decisions, or without the trace (ImportError without numba).

    Every request references the full chunks of its prompt at its first lookup, in the order of the decisions. D is the
    reference distance of a chunk's next reference, promoted tail first: the paper's reference model.
    """
    from efficient_lmcache.core.stackdistance import reference_distances

    found = lookups(run)
    capacity = _capacity_chunks(run)
    stream = _stream(run.trace, run.chunk_tokens).in_order([(lookup.task, lookup.call) for lookup in found])
    if not np.array_equal(stream.prompt_tokens, [lookup.prompt_tokens for lookup in found]):
        raise Unavailable("the decisions' prompts are not those of the trace's calls")
    chosen = _new_chunks_of_declined(found, stream)
    distances = reference_distances(stream)
    following = _next_reference(stream.keys)[chosen]
    again = distances[following[following >= 0]]
    beyond = int((again >= capacity).sum())
    never = len(chosen) - len(again)
    return DeclinedReuse(
        capacity_chunks=capacity,
        declined=sum(not lookup.save for lookup in found),
        chunks=len(chosen),
        beyond=beyond,
        never=never,
        within=len(again) - beyond,
        condition_share=(beyond + never) / len(chosen) if len(chosen) else None,
        ratio=quantiles(again / capacity) if len(again) and capacity else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """A trace's prompts as references in recorded order, and where each call is in them."""

    references: References
    places: dict[tuple[str, int], int]

    def in_order(self, calls: Sequence[tuple[str, int]]) -> References:
        try:
            return self.references.reordered(np.array([self.places[call] for call in calls], np.int64))
        except KeyError as error:
            raise Unavailable(f"the trace has no call {error}") from None


@lru_cache(maxsize=2)
def _stream(trace: Path, chunk_tokens: int) -> _Stream:
    from efficient_lmcache.sizing.streams import open_stream

    try:
        stream = open_stream(trace, chunk_tokens)
        references = References.concatenate(stream)
    except ValueError as error:
        raise Unavailable(str(error)) from error
    places: dict[tuple[str, int], int] = {}
    calls: Counter[str] = Counter()
    for place, lane in enumerate(references.lane):
        task = stream.lanes[lane]
        places[task, calls[task]] = place
        calls[task] += 1
    return _Stream(references, places)


def _capacity_chunks(run: Run) -> int:
    """K_H, from C_H as the last decision knew it. Raises Unavailable where it did not."""
    last = run.decisions[-1]
    if last["capacity_bytes"] is None:
        raise Unavailable("the run's tier never told its capacity")
    return int(last["capacity_bytes"] // (run.chunk_tokens * last["estimate"]["bytes_per_token"]))


def _new_chunks_of_declined(found: Sequence[Lookup], stream: References) -> Ints:
    """The places of references to the new full chunks of declined requests; int64."""
    size = stream.chunk_tokens
    ranges = [
        np.arange(stream.offsets[call] + lookup.host_match_tokens // size, stream.offsets[call + 1])
        for call, lookup in enumerate(found)
        if not lookup.save
    ]
    return np.concatenate([np.zeros(0, np.int64), *ranges])


def _next_reference(keys: Ints) -> Ints:
    """The place of every reference's next one to the same chunk; -1 without one. int64 [references]."""
    by_key = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[by_key][1:] == keys[by_key][:-1])
    following = np.full(len(keys), -1, np.int64)
    following[by_key[same]] = by_key[same + 1]
    return following
