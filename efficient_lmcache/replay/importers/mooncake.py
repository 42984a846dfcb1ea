"""Import of Mooncake's request traces: a guessed lane is a task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.mooncake_files import BLOCK_TOKENS, MooncakeRequest, in_lanes, parse_request
from efficient_lmcache.replay.importers.tasks import DECODE_TOKENS_PER_S, BlockCall, BlockTask, pause_s

ASSUMPTIONS = (
    "no conversations are recorded: a request is taken for the next call of the task whose last prompt it extends, by "
    "at least that one's output; any other begins a task, named after its line",
    "interval_s: responses' ends are not recorded, so a call is taken to last output_length / "
    f"{DECODE_TOKENS_PER_S:.0f} s, and what remains until the next request's timestamp, at least 0, to be the client's",
)


def tasks(source: Path) -> Iterator[BlockTask]:
    """Every lane, by its first request; RecordError names file, line and field of what is malformed.

    All requests are in memory: a lane's may be anywhere in the file.
    """
    lanes: list[list[MooncakeRequest]] = []
    requests = (parse_request(line, where) for where, line in records.lines(source))
    for lane, request in in_lanes(requests):
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(request)
    for lane_requests in lanes:
        first = lane_requests[0].name
        yield BlockTask(first, f"{source}: {first}", list(_calls(lane_requests)), BLOCK_TOKENS, scope=None)


def _calls(requests: list[MooncakeRequest]) -> Iterator[BlockCall]:
    previous: MooncakeRequest | None = None
    for each in requests:
        elapsed_s = 0.0 if previous is None else each.start_s - previous.start_s
        interval_s = pause_s(elapsed_s, 0 if previous is None else previous.output_tokens)
        yield BlockCall(each.prompt_tokens, each.output_tokens, each.block_ids, interval_s, each.start_s)
        previous = each
