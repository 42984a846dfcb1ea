"""What of a stream can be reused at all, whatever the capacity: seen before, by whom, and how long ago."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from efficient_lmcache.core.references import Floats, Ints, References


def stable_tokens(references: References) -> Ints:
    """Coverage of every call in a tier that never evicts, in tokens, int64 [calls]."""
    calls = _call_of_each_reference(references)
    first_call = np.zeros(int(references.keys.max(initial=-1)) + 1, np.int64)
    # Assigned from the last reference to the first one: what stays is the first call.
    first_call[references.keys[::-1]] = calls[::-1]
    return leading_chunks(first_call[references.keys] < calls, references) * references.chunk_tokens


def broken_tokens(references: References) -> Ints:
    """What every call's prompt would cover besides, if it had only extended its lane's previous one; int64 [calls].

    Only full chunks count; 0 for agents that only append.
    """
    by_lane = np.argsort(references.lane, kind="stable")
    continues = np.flatnonzero(np.diff(references.lane[by_lane]) == 0)
    before, call = by_lane[continues], by_lane[continues + 1]
    chunks = np.minimum(references.lookup_chunks[before], references.lookup_chunks[call])
    broken = np.zeros(len(references), np.int64)
    broken[call] = np.maximum(chunks * references.chunk_tokens - stable_tokens(references)[call], 0)
    return broken


def expired(references: References, lookup_s: Floats, ttl_s: float) -> References:
    """The stream as a tier sees it that forgets what nobody referenced for `ttl_s`: calls look up fewer chunks.

    Forgotten chunks are less recent than all others, so no distance changes and the stream serves every capacity. A
    use restarts the window (the prompt caches that providers sell count so).

    Args:
        lookup_s: when each call is looked up, float64 [calls], not decreasing.
        ttl_s: seconds, > 0.
    """
    if not ttl_s > 0:
        raise ValueError(f"ttl_s is {ttl_s}; it must be positive")
    ages_s = _ages_s(references, lookup_s)
    alive = leading_chunks(ages_s <= ttl_s, references)
    return replace(references, lookup_chunks=np.minimum(references.lookup_chunks, alive))


def salted(references: References) -> References:
    """The stream when every session's keys are salted: sessions share nothing, lanes of one session still do."""
    sessions = np.repeat(references.session, np.diff(references.offsets))
    pairs = sessions * (int(references.keys.max(initial=0)) + 1) + references.keys
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return replace(references, keys=numbers[inverse])


def leading_chunks(usable: npt.NDArray[np.bool_], references: References) -> Ints:
    """How many of a call's lookup chunks, from its head on, are usable without a gap; int64 [calls].

    Args:
        usable: bool [references].
    """
    starts = references.offsets[:-1]
    filled = np.flatnonzero(np.diff(references.offsets))
    run = np.zeros(len(references), np.int64)
    if len(filled):
        places = np.arange(len(usable)) - np.repeat(starts, np.diff(references.offsets))
        ends = np.where(usable, np.iinfo(np.int64).max, places)
        run[filled] = np.minimum.reduceat(ends, starts[filled])
    return np.minimum(run, references.lookup_chunks)


def _call_of_each_reference(references: References) -> Ints:
    return np.repeat(np.arange(len(references)), np.diff(references.offsets))


def _ages_s(references: References, lookup_s: Floats) -> Floats:
    """Seconds since the previous call that referenced the same chunk; infinite for a first reference."""
    by_key = np.argsort(references.keys, kind="stable")
    times_s = lookup_s[_call_of_each_reference(references)][by_key]
    keys = references.keys[by_key]
    ages_s = np.full(len(keys), np.inf)
    again = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    ages_s[by_key[again]] = times_s[again] - times_s[again - 1]
    return ages_s
