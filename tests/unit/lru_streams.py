"""Streams of all kinds, and what a plain LRU tier does with them: what distances and curves are checked against."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.core.stackdistance import PromotionOrder

ORDERS = list(PromotionOrder)
Calls = list[list[int]]

# The first example of a test may compile kernels.
compiles = settings(deadline=None)


def stream(calls: Calls, *, lookup_chunks: list[int] | None = None, chunk_tokens: int = 4, rest: int = 0) -> References:
    """A stream of these keys; a prompt is its lookup chunks and `rest` more tokens."""
    lengths = [len(keys) for keys in calls]
    numbers = np.arange(len(calls), dtype=np.int64)
    lookup = np.array(lengths if lookup_chunks is None else lookup_chunks, np.int64)
    return References(
        chunk_tokens=chunk_tokens,
        keys=np.array([key for keys in calls for key in keys], np.int64),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        lookup_chunks=lookup,
        prompt_tokens=lookup * chunk_tokens + rest,
        output_tokens=numbers * 0,
        lane=numbers,
        session=numbers,
        start_s=numbers * np.nan,
        interval_s=numbers * np.nan,
    )


def split(references: References, cuts: list[int]) -> list[References]:
    """The stream in batches that begin at these calls."""
    bounds = [0, *sorted(cut % (len(references) + 1) for cut in cuts), len(references)]
    calls = np.arange(len(references))
    return [references.reordered(calls[low:high]) for low, high in pairwise(bounds)]


# Any keys in any order, some of them twice in one call.
arbitrary_calls: st.SearchStrategy[Calls] = st.lists(st.lists(st.integers(0, 25), max_size=12), max_size=25)


@st.composite
def paths(draw: st.DrawFn) -> Calls:
    """Conversations that grow, are edited, forked and cut, all from the same few first chunks, in any interleaving."""
    numbers: dict[tuple[int, ...], int] = {}
    lanes: list[list[int]] = [[0, 1, 2] for _ in range(draw(st.integers(1, 5)))]
    calls = []
    for tokens in range(draw(st.integers(1, 40))):
        lane = draw(st.integers(0, len(lanes) - 1))
        change = draw(st.sampled_from(["grow", "grow", "grow", "edit", "fork", "cut", "repeat"]))
        if change == "fork":
            lanes[lane] = list(lanes[draw(st.integers(0, len(lanes) - 1))])
        if change in ("edit", "cut"):
            lanes[lane] = lanes[lane][: draw(st.integers(0, len(lanes[lane])))]
        if change in ("grow", "edit"):
            lanes[lane] = lanes[lane] + [100 * tokens + chunk for chunk in range(draw(st.integers(1, 6)))]
        path = tuple(lanes[lane])
        calls.append([numbers.setdefault(path[: end + 1], len(numbers)) for end in range(len(path))])
    return calls


any_calls = st.one_of(arbitrary_calls, paths())


def recency_before(calls: Calls, order: PromotionOrder) -> Iterator[tuple[list[int], list[int]]]:
    """Each call's keys, and all chunks from the most to the least recent one when it is looked up."""
    recent: OrderedDict[int, None] = OrderedDict()
    for keys in calls:
        yield keys, list(reversed(recent))
        for key in promoted(keys, order):
            recent[key] = None
            recent.move_to_end(key)


def promoted(keys: list[int], order: PromotionOrder) -> list[int]:
    return keys if order is PromotionOrder.HEAD_FIRST else keys[::-1]


def lru_coverage(references: References, capacity: int, order: PromotionOrder) -> Ints:
    """Tokens that each call finds in an LRU tier of so many chunks."""
    tier: OrderedDict[int, None] = OrderedDict()
    covered = []
    for call in range(len(references)):
        keys = references.call_keys(call).tolist()
        found = 0
        for key in keys[: references.lookup_chunks[call]]:
            if key not in tier:
                break
            found += 1
        covered.append(found * references.chunk_tokens)
        for key in promoted(keys, order):
            tier[key] = None
            tier.move_to_end(key)
            if len(tier) > capacity:
                tier.popitem(last=False)
    return np.array(covered, np.int64)


def lru_hits(calls: Calls, capacity: int, order: PromotionOrder, declined: frozenset[int] = frozenset()) -> list[bool]:
    """Whether each reference, in the order of promotion, hits an LRU tier that declines to insert at some of them."""
    tier: OrderedDict[int, None] = OrderedDict()
    hits = []
    for reference, key in enumerate(key for keys in calls for key in promoted(keys, order)):
        hits.append(key in tier)
        if key in tier or reference not in declined:
            tier[key] = None
            tier.move_to_end(key)
            if len(tier) > capacity:
                tier.popitem(last=False)
    return hits
