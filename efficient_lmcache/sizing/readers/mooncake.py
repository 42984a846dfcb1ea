"""Mooncake's request traces: ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}`` a line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from efficient_lmcache.core.references import Ints
from efficient_lmcache.sizing.readers import records
from efficient_lmcache.sizing.readers.lanes import LaneGuess
from efficient_lmcache.sizing.readers.recording import BlockRecording, ChunkedCall, NumberedPath, Numbering

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    where: str
    start_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: Ints


class MooncakeRequests(BlockRecording):
    """Requests in the file's order; a lane is a guess, a session is a lane."""

    notes: tuple[str, ...] = (
        "no conversations are recorded: a request is taken for the next of the lane whose last prompt it extends, by "
        "at least that one's output; any other begins a lane",
        "blocks are known for prompts only: what outputs leave behind is seen when a later prompt contains it",
        "responses' ends are not recorded, so interval_s is not known",
    )

    def _calls(self) -> Iterator[ChunkedCall]:
        path = NumberedPath(Numbering().table())
        guess = LaneGuess()
        for request in self._parsed(records.lines(self.path, self._progress), self._request):
            blocks = request.block_ids.tolist()
            lane = guess.find(blocks, request.prompt_tokens)
            if lane is None:
                lane = self._new_lane(request.where)
            guess.set_tip(lane, blocks, request.prompt_tokens + request.output_tokens)
            keys = path.move_to(request.block_ids[self._blocks_per_chunk - 1 :: self._blocks_per_chunk])
            yield ChunkedCall(
                keys=keys,
                lookup_chunks=len(keys),
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                lane=lane,
                session=lane,
                start_s=request.start_s,
                interval_s=math.nan,
            )

    def _request(self, line: bytes, where: str) -> _Request:
        record = records.parse_object(line, where)
        prompt_tokens = records.integer(record, "input_length", where, least=1)
        block_ids = records.integers(record, "hash_ids", where)
        records.check_blocks(len(block_ids), prompt_tokens, self._block_tokens, "hash_ids", where)
        return _Request(
            where=where.rpartition(": ")[2],
            start_s=records.seconds(record, "timestamp", where, required=True) / 1000,
            prompt_tokens=prompt_tokens,
            output_tokens=records.integer(record, "output_length", where),
            block_ids=block_ids[: prompt_tokens // self._block_tokens],
        )
