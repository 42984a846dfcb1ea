"""Agentic Weka sessions, as block recordings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.importers.weka_files import WekaBlocks, parse_session, sessions
from efficient_lmcache.sizing.readers.recording import BlockRecording, ChunkedCall, NumberedPath, Numbering, block_call

_PRIVATE = "block ids are private to a session: sharing across sessions (system prompts, tools) is not recorded"


class WekaSessions(BlockRecording):
    """Sessions one after another, each session's lanes interleaved by time. Every agent and sub-agent is a lane."""

    notes: tuple[str, ...] = (
        "sessions follow one another in the file's order; each has a clock of its own, from which start_s counts",
        "blocks are known for prompts only: what outputs leave behind is seen when a later prompt contains it",
        _PRIVATE,
        "interval_s is think_time, or where absent t minus the previous request's t + api_time, where that is recorded",
        "a finished sub-agent's t is its end, so it began duration_ms earlier; a launched one's t is its beginning",
        "requests to different models count as one model's",
    )

    def __init__(self, path: Path, chunk_tokens: int, *, are_global: bool, **options: Any) -> None:
        super().__init__(path, chunk_tokens, **options)
        self.has_shared_chunks = are_global
        if are_global:
            self.notes = tuple(note for note in self.notes if note != _PRIVATE)

    def _calls(self) -> Iterator[ChunkedCall]:
        numbering = Numbering()
        shared = numbering.table()
        expected = WekaBlocks(self._block_tokens, are_global=self.has_shared_chunks)
        parse = partial(parse_session, expected=expected)
        for session, requests in enumerate(self._parsed(sessions(self.path, self._progress), parse)):
            table = shared if expected.are_global else numbering.table()
            lanes: dict[str, tuple[int, NumberedPath]] = {}
            for request in requests:
                if request.lane_name not in lanes:
                    path = NumberedPath(table, self._blocks_per_chunk)
                    lanes[request.lane_name] = self._new_lane(request.lane_name), path
                lane, path = lanes[request.lane_name]
                yield block_call(request, path.move_to(request.block_ids), lane, session)
