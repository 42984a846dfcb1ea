"""What a recording's calls look like: how long, how much of them repeats, and how much is read again.

Recordings of tokens give exact figures. Recordings of blocks know whole blocks of prompts only, and none of outputs:
their shares are lower bounds, and their new KV is that of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.replay.describe import distribution, shared_prefix
from efficient_lmcache.replay.trace import common_prefix_tokens
from efficient_lmcache.sizing.streams import ReferenceStream


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The calls of a recording; arrays are [calls], in recorded order.

    Attributes:
        name: the recording's.
        chunk_tokens: b.
        exact: shares are counted in tokens; otherwise in chunks of b, hence from below.
        lane, session, prompt_tokens, output_tokens, interval_s: as in `References`.
        previous_prompt_tokens: shared with the lane's previous prompt; 0 for a lane's first call.
        cache_stable_tokens: shared with the previous prompt followed by its output (paper, Section 2); without recorded
            outputs, the same as `previous_prompt_tokens`.
        references: keys of all calls.
        distinct_chunks: different keys.
        shared_chunks: keys that calls of at least two sessions have; None where that is not recorded.
        skipped: bad records left out.
        notes: what the recording does not tell.
    """

    name: str
    chunk_tokens: int
    exact: bool
    lane: Ints
    session: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    interval_s: Floats
    previous_prompt_tokens: Ints
    cache_stable_tokens: Ints
    references: int
    distinct_chunks: int
    shared_chunks: int | None
    skipped: int
    notes: tuple[str, ...]

    @property
    def calls_per_lane(self) -> Ints:
        """[lanes]."""
        return np.bincount(self.lane)

    def places(self) -> Ints:
        """[calls]: how many calls of its lane come before each call."""
        order = np.argsort(self.lane, kind="stable")
        begins = np.cumsum(self.calls_per_lane) - self.calls_per_lane
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order)) - begins[self.lane[order]]
        return places

    def new_kv_tokens(self) -> tuple[int, int]:
        """New KV of the calls that have a next one in their lane, and how much of it that next call shares.

        A call's new KV is its prompt beyond the cache-stable length, and its output where those are recorded.
        """
        order = np.argsort(self.lane, kind="stable")
        followed = self.lane[order][:-1] == self.lane[order][1:]
        call, following = order[:-1][followed], order[1:][followed]
        known = self.prompt_tokens + (self.output_tokens if self.exact else 0)
        new = known[call] - self.cache_stable_tokens[call]
        reused = np.clip(self.cache_stable_tokens[following] - self.cache_stable_tokens[call], 0, new)
        return int(new.sum()), int(reused.sum())

    def facts(self) -> dict[str, Any]:
        """The profile in numbers, JSON-able; names are those of `trace info` where the numbers are."""
        new, reused = self.new_kv_tokens()
        prompt_tokens = int(self.prompt_tokens.sum())
        later = self.places() > 0
        return {
            "name": self.name,
            "chunk_tokens": self.chunk_tokens,
            "shares_are": "exact" if self.exact else f"lower bounds, in chunks of {self.chunk_tokens} tokens",
            "calls": len(self.lane),
            "lanes": len(self.calls_per_lane),
            "sessions": len(np.unique(self.session)),
            "prompt_tokens": prompt_tokens,
            "output_tokens": int(self.output_tokens.sum()),
            "distributions": {
                "calls_per_lane": distribution(self.calls_per_lane.tolist()),
                "prompt_tokens_per_call": distribution(self.prompt_tokens.tolist()),
                "output_tokens_per_call": distribution(self.output_tokens.tolist()),
                "cache_stable_tokens_per_later_call": distribution(self.cache_stable_tokens[later].tolist()),
                "interval_s": distribution(self.interval_s[later & ~np.isnan(self.interval_s)].tolist()),
            },
            "shared_prefix": shared_prefix(
                int(self.previous_prompt_tokens.sum()), int(self.cache_stable_tokens.sum()), prompt_tokens
            ),
            "new_kv": {
                "of": "prompts and outputs" if self.exact else "prompts",
                "tokens": new,
                "reused_by_next_call_tokens": reused,
                "reused_by_next_call_share": reused / max(1, new),
            },
            "chunks": {
                "references": self.references,
                "distinct": self.distinct_chunks,
                "in_several_sessions": self.shared_chunks,
                "in_several_sessions_share": None
                if self.shared_chunks is None
                else self.shared_chunks / max(1, self.distinct_chunks),
            },
            "skipped_records": self.skipped,
            "notes": list(self.notes),
        }


def profile(stream: ReferenceStream) -> Profile:
    """Read a stream through. Memory grows with calls and distinct chunks, not with references.

    Raises RecordingError as iterating the stream does.
    """
    batches: list[References] = []
    sessions = _SessionsOfChunks()
    latest: dict[int, Ints] = {}
    shared_chunks: list[int] = []
    references = 0
    for batch in stream:
        for call in range(len(batch)):
            keys, lane = batch.call_keys(call), int(batch.lane[call])
            shared = common_prefix_tokens(latest[lane], keys) if lane in latest else 0
            sessions.add(keys[shared:], int(batch.session[call]))
            latest[lane] = keys.copy()  # a view would keep the whole batch
            shared_chunks.append(min(shared, int(batch.lookup_chunks[call])))
        references += len(batch.keys)
        batches.append(_without_keys(batch))
    calls = References.concatenate(batches)
    shares = stream.shared
    by_chunk = np.array(shared_chunks, np.int64) * stream.chunk_tokens
    return Profile(
        name=stream.name,
        chunk_tokens=stream.chunk_tokens,
        exact=shares is not None,
        lane=calls.lane,
        session=calls.session,
        prompt_tokens=calls.prompt_tokens,
        output_tokens=calls.output_tokens,
        interval_s=calls.interval_s,
        previous_prompt_tokens=by_chunk if shares is None else np.array(shares.previous_prompt, np.int64),
        cache_stable_tokens=by_chunk if shares is None else np.array(shares.cache_stable, np.int64),
        references=references,
        distinct_chunks=sessions.chunks,
        shared_chunks=sessions.shared_chunks if stream.has_shared_chunks else None,
        skipped=stream.skipped,
        notes=stream.notes,
    )


class _SessionsOfChunks:
    """Which chunks several sessions have: a chunk's first session, or that there is a second."""

    _UNSEEN, _SHARED = -1, -2

    def __init__(self) -> None:
        self._first: Ints = np.full(1024, self._UNSEEN, np.int64)
        self.chunks = 0

    def add(self, keys: Ints, session: int) -> None:
        """A call of `session` has these keys."""
        if not len(keys):
            return
        self.chunks = max(self.chunks, int(keys.max()) + 1)
        if self.chunks > len(self._first):
            added = np.full(max(self.chunks, 2 * len(self._first)) - len(self._first), self._UNSEEN, np.int64)
            self._first = np.concatenate((self._first, added))
        first = self._first[keys]
        self._first[keys] = np.where((first == self._UNSEEN) | (first == session), session, self._SHARED)

    @property
    def shared_chunks(self) -> int:
        return int((self._first == self._SHARED).sum())


def _without_keys(batch: References) -> References:
    """The batch's calls alone."""
    return References(
        chunk_tokens=batch.chunk_tokens,
        keys=np.empty(0, np.int64),
        offsets=np.zeros(len(batch) + 1, np.int64),
        lookup_chunks=batch.lookup_chunks,
        prompt_tokens=batch.prompt_tokens,
        output_tokens=batch.output_tokens,
        lane=batch.lane,
        session=batch.session,
        start_s=batch.start_s,
        interval_s=batch.interval_s,
    )
