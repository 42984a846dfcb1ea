"""A stream of model calls as the chunks they reference: what stack distances, profiles and the planner read.

A chunk's key identifies all tokens up to its end, so a call's keys are a path from the conversation's start:

    keys        chunk numbers, 0 and up in order of first appearance; call c has keys[offsets[c] : offsets[c + 1]]
    head, tail  a call's first and last chunk
    lookup      the leading chunks that the call's prompt fills; later ones (its output's) are only left behind
    lane        one chain of calls, each sent after the previous one's response: an agent or one of its sub-agents
    session     the lanes of one conversation, sub-agents included
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """Consecutive calls of a stream. Arrays are one-dimensional; `calls` long unless said otherwise.

    Attributes:
        chunk_tokens: b.
        keys: int64 [references]: chunk numbers, head to tail within a call.
        offsets: int64 [calls + 1]: where each call's keys begin; the last one is the number of references.
        lookup_chunks: int64: how many leading keys a lookup asks for, floor(n / b) at most.
        prompt_tokens: int64: n.
        output_tokens: int64: m; 0 where it is not known.
        lane: int64: lane numbers, 0 and up.
        session: int64: session numbers, 0 and up.
        start_s: float64: recorded dispatch in seconds since the recording began; nan where it is not known.
        interval_s: float64: seconds from the end of the lane's previous response to this dispatch (the agent's and its
            tools' own time); nan where it is not known.
    """

    chunk_tokens: int
    keys: Ints
    offsets: Ints
    lookup_chunks: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    lane: Ints
    session: Ints
    start_s: Floats
    interval_s: Floats

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"References.chunk_tokens is {self.chunk_tokens}; it must be at least 1")
        calls = len(self)
        for name in _PER_CALL:
            if len(getattr(self, name)) != calls:
                raise ValueError(f"References.{name} has {len(getattr(self, name))} entries for {calls} calls")
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.keys):
            raise ValueError(f"References.offsets must run from 0 to {len(self.keys)}, the number of keys")

    def __len__(self) -> int:
        """Calls."""
        return len(self.offsets) - 1

    def call_keys(self, call: int) -> Ints:
        """The keys of one call, head to tail; a view."""
        return self.keys[self.offsets[call] : self.offsets[call + 1]]

    def between(self, begin: int, end: int) -> References:
        """Calls `begin` to `end` - 1, as views where possible. Keys keep their numbers."""
        if begin == 0 and end == len(self):
            return self
        low, high = self.offsets[begin], self.offsets[end]
        return References(
            chunk_tokens=self.chunk_tokens,
            keys=self.keys[low:high],
            offsets=self.offsets[begin : end + 1] - low,
            **{name: getattr(self, name)[begin:end] for name in _PER_CALL},
        )

    def reordered(self, order: Ints) -> References:
        """The same calls in another order: entry i of the result is call order[i]. Keys keep their numbers."""
        lengths = np.diff(self.offsets)[order]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        # Every reference's place in the old stream: its call's old start, plus its distance from the new start.
        places = np.repeat(self.offsets[:-1][order] - offsets[:-1], lengths) + np.arange(offsets[-1])
        per_call = {name: getattr(self, name)[order] for name in _PER_CALL}
        return References(chunk_tokens=self.chunk_tokens, keys=self.keys[places], offsets=offsets, **per_call)

    @staticmethod
    def concatenate(batches: Iterable[References]) -> References:
        """One stream from its consecutive batches; at least one."""
        parts = list(batches)
        if not parts:
            raise ValueError("concatenate needs at least one batch")
        if len({part.chunk_tokens for part in parts}) > 1:
            raise ValueError("batches of different chunk_tokens do not make one stream")
        starts = np.cumsum([0, *(len(part.keys) for part in parts[:-1])])
        offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=True)]
        total = np.array([sum(len(part.keys) for part in parts)], np.int64)
        per_call = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _PER_CALL}
        return References(
            chunk_tokens=parts[0].chunk_tokens,
            keys=np.concatenate([part.keys for part in parts]),
            offsets=np.concatenate([*offsets, total]).astype(np.int64),
            **per_call,
        )


_PER_CALL = tuple(field.name for field in fields(References) if field.name not in ("chunk_tokens", "keys", "offsets"))
