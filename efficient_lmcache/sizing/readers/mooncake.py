"""Mooncake's request traces, as block recordings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.mooncake_files import BLOCK_TOKENS, in_lanes, parse_request
from efficient_lmcache.sizing.readers.recording import BlockRecording, ChunkedCall, NumberedPath, Numbering

__all__ = ["BLOCK_TOKENS", "MooncakeRequests"]


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
        for lane, request in in_lanes(self._parsed(records.lines(self.path, self._progress), parse_request)):
            if lane == len(self.lanes):
                self._new_lane(request.name)
            keys = path.move_to(request.full_block_ids[self._blocks_per_chunk - 1 :: self._blocks_per_chunk])
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
