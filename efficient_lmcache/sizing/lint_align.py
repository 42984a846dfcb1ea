"""Which old text a prompt brings back behind a break: runs of equal tokens, found by hashed n-grams.

A few old n-grams (one every `_GRAM` tokens) are looked up at every new position and matches are extended in both
directions, as in rsync: the cost follows the two lengths, not their product, and moved text is found as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from efficient_lmcache.replay.trace import common_prefix_tokens

Ids = npt.NDArray[np.integer[Any]]

MIN_RUN_TOKENS = 16
"""A shorter run is no evidence: chat markup and indentation repeat as much between unrelated messages."""

_GRAM = 8  # a run of 2 * _GRAM - 1 tokens holds one looked-up n-gram wherever it starts
_CANDIDATES = 8
_WINDOW = 256
_LONG_RUN_TOKENS = 256  # no need to look for a longer one
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Run:
    """`tokens` equal tokens: from `old` on in the one sequence, from `new` on in the other."""

    old: int
    new: int
    tokens: int

    @property
    def old_end(self) -> int:
        return self.old + self.tokens

    @property
    def new_end(self) -> int:
        return self.new + self.tokens


def reappearing_runs(old: Ids, new: Ids) -> tuple[Run, ...]:
    """Runs of at least `MIN_RUN_TOKENS` equal tokens, in the order of `new`; no token of either is in two of them.

    Greedy from the start of `new`; where old text repeats itself, what follows the previous run is preferred.
    """
    if min(len(old), len(new)) < MIN_RUN_TOKENS:
        return ()
    table = _Anchors(old)
    hashes = _gram_hashes(new)
    unused = np.ones(len(old), np.bool_)
    runs: list[Run] = []
    at, old_end, new_end = 0, 0, 0
    while (hit := table.first_hit(hashes, at)) is not None:
        best = Run(0, hit, 0)
        # Of the run that begins here, the looked-up n-gram may come a little later than one of a shorter run.
        for at in range(hit, min(hit + _GRAM, len(hashes))):
            for each in _nearest(table.places(hashes[at]), old_end):
                best = max(best, _extended(old, new, unused, each, at, new_end), key=lambda run: run.tokens)
            if best.tokens >= _LONG_RUN_TOKENS:
                break
        if best.tokens >= MIN_RUN_TOKENS:
            runs.append(best)
            unused[best.old : best.old_end] = False
            table.drop(unused)
            old_end, new_end = best.old_end, best.new_end
        at = max(hit + 1, best.new_end)
    return tuple(runs)


def in_order(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The heaviest subset whose old positions increase as well: what stayed in its order; the rest moved."""
    if not runs:
        return ()
    olds = np.array([run.old for run in runs])
    weights = np.zeros(len(runs), np.int64)
    before = np.full(len(runs), -1)
    for number, run in enumerate(runs):
        allowed = np.where(olds[:number] < run.old, weights[:number], 0)
        if number and allowed.max() > 0:
            before[number] = allowed.argmax()
            weights[number] = allowed.max()
        weights[number] += run.tokens
    chain = [int(weights.argmax())]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
    return tuple(runs[number] for number in reversed(chain))


class _Anchors:
    """The n-grams of the old sequence by hash: one every `_GRAM` tokens."""

    def __init__(self, old: Ids) -> None:
        places = np.arange(0, len(old) - _GRAM + 1, _GRAM)
        hashes = _gram_hashes(old)[places]
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._places = hashes[order], places[order]

    def first_hit(self, hashes: npt.NDArray[np.uint64], start: int) -> int | None:
        """The first position from `start` on whose n-gram is one of these."""
        width = _WINDOW
        while start < len(hashes) and len(self._hashes):
            window = hashes[start : start + width]
            places = np.searchsorted(self._hashes, window)
            hits = self._hashes[np.minimum(places, len(self._hashes) - 1)] == window
            first = int(hits.argmax())
            if hits[first]:
                return start + first
            start += width
            width *= 2
        return None

    def places(self, gram_hash: np.uint64) -> npt.NDArray[np.int64]:
        """Where the old sequence has an n-gram, increasing."""
        first, end = (int(np.searchsorted(self._hashes, gram_hash, side=side)) for side in ("left", "right"))
        return self._places[first:end]

    def drop(self, unused: npt.NDArray[np.bool_]) -> None:
        keep = unused[self._places]
        self._hashes, self._places = self._hashes[keep], self._places[keep]


def _gram_hashes(ids: Ids) -> npt.NDArray[np.uint64]:
    """A hash of the `_GRAM` tokens from each position on; windows double in three steps."""
    hashes = (ids.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    width = 1
    while width < _GRAM:
        hashes = (hashes[:-width] ^ (hashes[:-width] >> np.uint64(29))) * _MULTIPLIER + hashes[width:]
        width *= 2
    return hashes


def _nearest(candidates: npt.NDArray[np.int64], old_end: int) -> list[int]:
    """A few candidates, those from `old_end` on first; `candidates` increase."""
    after = int(np.searchsorted(candidates, old_end))
    return [int(each) for each in np.concatenate((candidates[after:], candidates[:after]))[:_CANDIDATES]]


def _extended(old: Ids, new: Ids, unused: npt.NDArray[np.bool_], old_at: int, new_at: int, new_from: int) -> Run:
    """The maximal run through a pair of positions, over old tokens not in a run yet and new ones from `new_from` on."""
    forward = _equal(old[old_at:], new[new_at:], unused[old_at:])
    backward = _equal(old[:old_at][::-1], new[new_from:new_at][::-1], unused[:old_at][::-1])
    return Run(old_at - backward, new_at - backward, forward + backward)


def _equal(old: Ids, new: Ids, unused: npt.NDArray[np.bool_]) -> int:
    tokens = common_prefix_tokens(old, new)
    free = unused[:tokens]
    return tokens if free.all() else int(free.argmin())
