"""Recency reference by reference: one Fenwick tree over the positions of chunks' last promotions (Bennett and Kruskal,
1975), O(log chunks) for each. What runs are checked against, and faster where a stream has none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from efficient_lmcache.core._compiled import compiled, enlarged
from efficient_lmcache.core.references import Ints

_NEVER = 0
_INFINITE = np.iinfo(np.int64).max


class FenwickState(NamedTuple):
    """Recency of all chunks.

    Attributes:
        last: [chunks] the position of each chunk's last promotion; 0 for none.
        tree: [positions + 1] sums of the live positions, which begin at 1, from one to the most recent.
        used: [1] the most recent position.
    """

    last: Ints
    tree: Ints
    used: Ints


def empty_state() -> FenwickState:
    return FenwickState(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))


def with_room(state: FenwickState, keys: Ints) -> FenwickState:
    """The state, in arrays large enough for a call with these keys."""
    state = state._replace(last=enlarged(state.last, int(keys.max(initial=-1)) + 1))
    live = np.flatnonzero(state.last != _NEVER)
    live = live[np.argsort(state.last[live])]
    state.last[live] = np.arange(1, len(live) + 1)
    # Half of the positions stay free, so chunks are given new ones no more often than once per as many references.
    state = state._replace(tree=np.zeros(max(2 * (len(live) + len(keys)) + 1, len(state.tree)), np.int64))
    state.used[0] = len(live)
    _fill(state.tree, len(live))
    return state


@compiled
def observe_references(
    state: FenwickState,
    keys: Ints,
    offsets: Ints,
    call: int,
    tail_first: bool,
    at_promotion: bool,
    distance: Ints,
) -> int:
    """Distances of all references of calls, from `call` on, in the order of promotion; then promote them.

    Returns the first call for which some array is too small, or the number of calls.
    """
    last, tree = state.last, state.tree
    while call < len(offsets) - 1:
        begin, length = offsets[call], offsets[call + 1] - offsets[call]
        lowest, highest = 0, -1
        for key in keys[begin : begin + length]:
            lowest, highest = min(lowest, key), max(highest, key)
        if lowest < 0 or highest >= len(last) or state.used[0] + length >= len(tree):
            return call
        first, step = (begin + length - 1, -1) if tail_first else (begin, 1)
        if not at_promotion:
            for reference in range(length):
                distance[begin + reference] = _more_recent(last, tree, keys[first + step * reference])
        for reference in range(length):
            key = keys[first + step * reference]
            if at_promotion:
                distance[begin + reference] = _more_recent(last, tree, key)
            if last[key] != _NEVER:
                _add(tree, last[key], -1)
            state.used[0] += 1
            last[key] = state.used[0]
            _add(tree, last[key], 1)
        call += 1
    return call


@compiled
def _more_recent(last: Ints, tree: Ints, key: int) -> int:
    if last[key] == _NEVER:
        return _INFINITE
    chunks, node = 0, last[key] + 1
    while node < len(tree):
        chunks += tree[node]
        node += node & -node
    return chunks


@compiled
def _add(tree: Ints, position: int, chunks: int) -> None:
    node = position
    while node > 0:
        tree[node] += chunks
        node -= node & -node


@compiled
def _fill(tree: Ints, live: int) -> None:
    for position in range(1, live + 1):
        _add(tree, position, 1)
