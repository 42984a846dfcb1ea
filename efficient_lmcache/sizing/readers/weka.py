"""Agentic sessions as Weka publishes them: a JSON line a session, with block ids that only that session knows.

    {"id", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t", "type": "n" | "s", "in", "out", "hash_ids", "api_time"?, "think_time"?},
        {"t", "type": "subagent", "agent_id", "duration_ms", "requests": [...]}]}

Times are in seconds; those of a sub-agent's requests begin with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.core.references import Ints
from efficient_lmcache.sizing.readers import records
from efficient_lmcache.sizing.readers.recording import BlockRecording, ChunkedCall, NumberedPath, Numbering
from efficient_lmcache.sizing.readers.records import RecordError

_SUB_AGENT = "subagent"
_LOCAL = "local"


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    lane_name: str
    start_s: float
    interval_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: Ints


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
        for session, requests in enumerate(self._parsed(records.lines(self.path, self._progress), self._session)):
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

    def _session(self, line: bytes, where: str) -> list[_Request]:
        """A session's requests by time; those of one lane stay in recorded order."""
        record = records.parse_object(line, where)
        block_tokens = records.integer(record, "block_size", where, least=1)
        if block_tokens != self._block_tokens:
            raise RecordError(f"{where}: block_size is {block_tokens}; it must be {self._block_tokens}, as in line 1")
        if record.get("hash_id_scope", _LOCAL) != _LOCAL:
            raise RecordError(f"{where}: hash_id_scope is {record['hash_id_scope']!r}; allowed is {_LOCAL!r}")
        requests = self._requests(record, where, records.text(record, "id", where), 0.0)
        return sorted(requests, key=lambda request: request.start_s)

    def _requests(self, record: dict[str, Any], where: str, lane_name: str, began_s: float) -> Iterator[_Request]:
        """The requests of one agent and of its sub-agents."""
        previous_end_s = math.nan
        for row, place in records.objects(record, "requests", where):
            t_s = began_s + records.seconds(row, "t", place, required=True)
            if row.get("type") == _SUB_AGENT:
                duration_s = records.seconds(row, "duration_ms", place) / 1000
                sub_name = f"{lane_name}/{records.text(row, 'agent_id', place)}"
                yield from self._requests(row, place, sub_name, t_s if math.isnan(duration_s) else t_s - duration_s)
                continue
            interval_s = records.seconds(row, "think_time", place)
            if math.isnan(interval_s):
                interval_s = max(0.0, t_s - previous_end_s) if not math.isnan(previous_end_s) else math.nan
            yield self._request(row, place, lane_name, t_s, interval_s)
            previous_end_s = t_s + records.seconds(row, "api_time", place)

    def _request(self, row: dict[str, Any], where: str, lane_name: str, start_s: float, interval_s: float) -> _Request:
        prompt_tokens = records.integer(row, "in", where, least=1)
        block_ids = records.integers(row, "hash_ids", where)
        records.check_blocks(len(block_ids), prompt_tokens, self._block_tokens, "hash_ids", where)
        return _Request(
            lane_name=lane_name,
            start_s=start_s,
            interval_s=interval_s,
            prompt_tokens=prompt_tokens,
            output_tokens=records.integer(row, "out", where),
            block_ids=block_ids[: prompt_tokens // self._block_tokens],
        )
