"""Agentic Weka sessions, as block recordings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from efficient_lmcache.replay.importers.weka_files import parse_session, sessions
from efficient_lmcache.sizing.readers.recording import BlockRecording, ChunkedCall, NumberedPath, Numbering


class WekaSessions(BlockRecording):
    """Sessions one after another, each session's lanes interleaved by time. Every agent and sub-agent is a lane."""

    notes: tuple[str, ...] = (
        "sessions follow one another in the file's order; each has a clock of its own, from which start_s counts",
        "blocks are known for prompts only: what outputs leave behind is seen when a later prompt contains it",
        "block ids are private to a session: sharing across sessions (system prompts, tools) is not recorded",
        "interval_s is think_time, or where absent t minus the previous request's t + api_time, where that is recorded",
        "a finished sub-agent's t is its end, so it began duration_ms earlier; a launched one's t is its beginning",
        "requests to different models count as one model's",
    )

    has_shared_chunks = False

    def _calls(self) -> Iterator[ChunkedCall]:
        numbering = Numbering()
        parse = partial(parse_session, expected_block_tokens=self._block_tokens)
        for session, requests in enumerate(self._parsed(sessions(self.path, self._progress), parse)):
            table = numbering.table()
            lanes: dict[str, tuple[int, NumberedPath]] = {}
            for request in requests:
                if request.lane_name not in lanes:
                    lanes[request.lane_name] = self._new_lane(request.lane_name), NumberedPath(table)
                lane, path = lanes[request.lane_name]
                keys = path.move_to(request.block_ids[self._blocks_per_chunk - 1 :: self._blocks_per_chunk])
                yield ChunkedCall(
                    keys=keys,
                    lookup_chunks=len(keys),
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    lane=lane,
                    session=session,
                    start_s=request.start_s,
                    interval_s=request.interval_s,
                )
