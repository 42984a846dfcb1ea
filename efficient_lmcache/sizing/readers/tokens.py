"""Recordings with token ids: a chunk's key is the hash of the key before it and the chunk's own tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

from efficient_lmcache.core.references import Ints
from efficient_lmcache.replay.describe import shared_tokens
from efficient_lmcache.replay.importers.records import Progress, RecordError
from efficient_lmcache.replay.trace import Call, Tokens, TraceError, common_prefix_tokens
from efficient_lmcache.sizing.readers.recording import ChunkedCall, Numbering, Recording, SharedTokens

_KEY_BYTES = 16


class TokenRecording(Recording):
    """A stream of exact tokens, a task after the other. One task is one lane and one session.

    With `with_outputs`, a call's keys go on behind its lookup: to the chunks that its output fills or completes. The
    last output token is not among them, as an engine computes KV for it only where a later prompt contains it.
    """

    def __init__(
        self, path: Path, chunk_tokens: int, *, skip_bad: bool, progress: Progress | None, with_outputs: bool
    ) -> None:
        super().__init__(path, chunk_tokens, skip_bad=skip_bad, progress=progress)
        self._with_outputs = with_outputs

    @abstractmethod
    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        """Every task's name and calls; the calls raise TraceError or RecordError where the task is damaged."""

    def _calls(self) -> Iterator[ChunkedCall]:
        self.shared = shared = SharedTokens([], [])
        table = Numbering().table()
        for name, calls in self.tasks():
            lane = len(self.lanes)
            try:
                task = list(self._chunked(calls, table, lane))
            except (TraceError, RecordError) as error:
                self._skip_or_raise(error)
                continue
            if task:
                self._new_lane(name)
            for call, previous_prompt, cache_stable in task:
                shared.previous_prompt.append(previous_prompt)
                shared.cache_stable.append(cache_stable)
                yield call

    def _chunked(
        self, calls: Iterable[Call], table: defaultdict[Hashable, int], lane: int
    ) -> Iterator[tuple[ChunkedCall, int, int]]:
        """A task's calls, each with the tokens it shares with the previous prompt, and with that and its output."""
        chunks = _TokenChunks(self.chunk_tokens, table)
        previous: Call | None = None
        for call in calls:
            prompt, output = call.prompt_tokens, call.output_tokens
            left_behind = np.concatenate((prompt, output[:-1])) if self._with_outputs else prompt
            chunked = ChunkedCall(
                keys=chunks.move_to(left_behind),
                lookup_chunks=len(prompt) // self.chunk_tokens,
                prompt_tokens=len(prompt),
                output_tokens=len(output),
                lane=lane,
                session=lane,
                start_s=math.nan if call.start_s is None else call.start_s,
                interval_s=call.interval_s,
            )
            yield chunked, *((0, 0) if previous is None else shared_tokens(previous, call))
            previous = call


class _TokenChunks:
    """The tokens of a task's latest call, and its full chunks' keys and numbers."""

    def __init__(self, chunk_tokens: int, table: defaultdict[Hashable, int]) -> None:
        self._chunk_tokens = chunk_tokens
        self._table = table
        self._tokens: Tokens = np.empty(0, np.uint32)
        self._keys: list[bytes] = []
        self._numbers: Ints = np.empty(0, np.int64)

    def move_to(self, tokens: Tokens) -> Ints:
        """The numbers of the full chunks of `tokens`; those that the call before had as well are not hashed again."""
        size = self._chunk_tokens
        first = min(common_prefix_tokens(self._tokens, tokens) // size, len(self._keys))
        del self._keys[first:]
        key = self._keys[-1] if self._keys else b""
        for begin in range(first * size, len(tokens) - size + 1, size):
            key = blake2b(key + tokens[begin : begin + size].tobytes(), digest_size=_KEY_BYTES).digest()
            self._keys.append(key)
        new = [self._table[key] for key in self._keys[first:]]
        self._tokens, self._numbers = tokens, np.concatenate((self._numbers[:first], np.array(new, np.int64)))
        return self._numbers
