"""An LRU tier's recency list, compiled: a prediction serves a whole stream dozens of times.

The list is doubly linked and circular through a sentinel, its last entry: the sentinel's newer neighbour is the least
recent chunk, its older neighbour the most recent one. A kernel calls compiled functions of its own file only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from efficient_lmcache.core._compiled import compiled
from efficient_lmcache.core.references import Ints

ABSENT = -1


class Recency(NamedTuple):
    """int64 [chunks + 1] both: each chunk's neighbours in recency; ABSENT for a chunk that the tier does not hold."""

    newer: Ints
    older: Ints


def empty(chunks: int) -> Recency:
    """A tier for chunks numbered 0 to `chunks` - 1 that holds none of them."""
    recency = Recency(np.full(chunks + 1, ABSENT), np.full(chunks + 1, ABSENT))
    recency.newer[chunks] = recency.older[chunks] = chunks
    return recency


@compiled
def match(recency: Recency, keys: Ints) -> int:
    """How many leading keys the tier holds."""
    for place in range(len(keys)):
        if recency.newer[keys[place]] == ABSENT:
            return place
    return len(keys)


@compiled
def use(recency: Recency, keys: Ints, registered: int, capacity: int) -> int:
    """Make one key after the other the most recent, inserting what is absent; returns how many were inserted.

    Args:
        registered: chunks in the tier before.
        capacity: K_H, at least 1; a full tier evicts its least recent chunk for each insert.
    """
    newer, older = recency
    end = len(newer) - 1
    inserted = 0
    for key in keys:
        if newer[key] != ABSENT:
            newer[older[key]], older[newer[key]] = newer[key], older[key]
        else:
            inserted += 1
            if registered < capacity:
                registered += 1
            else:
                evicted = newer[end]
                newer[end] = newer[evicted]
                older[newer[end]] = end
                newer[evicted] = ABSENT
        newest = older[end]
        newer[newest], older[key] = key, newest
        newer[key], older[end] = end, key
    return inserted


@compiled
def store(recency: Recency, keys: Ints, registered: int, capacity: int) -> int:
    """As `use`, but what the tier holds keeps its place."""
    inserted = 0
    for place in range(len(keys)):
        if recency.newer[keys[place]] == ABSENT:
            inserted += use(recency, keys[place : place + 1], min(registered + inserted, capacity), capacity)
    return inserted


@compiled
def serve(recency: Recency, keys: Ints, offsets: Ints, lookup_chunks: Ints, capacity: int, matched: Ints) -> None:
    """Every call looks up, promotes what it found and leaves the rest behind.

    Args:
        lookup_chunks: int64 [calls]: what each call looks up; further keys are written anew.
        matched: int64 [calls], filled with how many leading chunks each call finds.
    """
    registered = 0
    for call in range(len(offsets) - 1):
        first, last = offsets[call], offsets[call + 1]
        end = min(first + lookup_chunks[call], last)
        found = match(recency, keys[first:end])
        matched[call] = found
        use(recency, keys[first : first + found][::-1], registered, capacity)
        registered = min(registered + store(recency, keys[first + found : end], registered, capacity), capacity)
        registered = min(registered + use(recency, keys[end:last], registered, capacity), capacity)
