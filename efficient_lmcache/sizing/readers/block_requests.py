"""Block traces of requests (Mooncake's, Qwen-Bailian's), as block recordings."""

from __future__ import annotations

from collections.abc import Iterator

from efficient_lmcache.replay.importers import bailian, bailian_files, mooncake, mooncake_files, records
from efficient_lmcache.replay.importers.block_requests import BlockRequest, Lanes, Parse
from efficient_lmcache.sizing.readers.recording import BlockRecording, ChunkedCall, NumberedPath, Numbering, block_call

_OUTPUTS = "blocks are known for prompts only: what outputs leave behind is seen when a later prompt contains it"


class Requests(BlockRecording):
    """Requests in the file's order. Where it tells no lanes and sessions, a lane is a guess and a session is a lane."""

    _parse_request: Parse

    def _calls(self) -> Iterator[ChunkedCall]:
        lanes = Lanes()
        table = Numbering().table()
        paths: list[NumberedPath] = []  # by lane
        for request in self._parsed(records.lines(self.path, self._progress), self._request):
            lane, session = lanes.place(request)
            if lane == len(self.lanes):
                self._new_lane(request.name)
                paths.append(NumberedPath(table, self._blocks_per_chunk))
            yield block_call(request, paths[lane].move_to(request.full_block_ids), lane, session)
        self.lanes_are_guessed = lanes.guessed > 0
        lanes.require_whole_prompts(self.path)

    def _request(self, line: bytes, where: str) -> BlockRequest:
        return type(self)._parse_request(line, where, self._block_tokens)


class MooncakeRequests(Requests):
    """Mooncake's, and those that AIPerf and Dynamo write."""

    notes: tuple[str, ...] = (
        "a session_id's requests are a lane; without one no conversations are recorded: a request is taken for the "
        "next of the lane whose last prompt it extends, by at least that one's output; any other begins a lane",
        _OUTPUTS,
        "interval_s is delay; elsewhere it is not known, as responses' ends are not recorded",
        mooncake.BLOCKS,
    )

    _parse_request = staticmethod(mooncake_files.parse_request)


class BailianRequests(Requests):
    """Qwen-Bailian's usage traces."""

    notes: tuple[str, ...] = (
        bailian.CONVERSATIONS,
        _OUTPUTS,
        "responses' ends are not recorded, so interval_s is not known",
        bailian.BLOCKS,
    )

    _parse_request = staticmethod(bailian_files.parse_request)
