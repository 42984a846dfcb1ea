"""Import of Mooncake's request traces: a session, or where none is told a guessed lane, is a task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from efficient_lmcache.replay.importers.block_requests import BLOCKS_UNSIZED, lane_tasks, parsed
from efficient_lmcache.replay.importers.mooncake_files import BLOCK_TOKENS, parse_request
from efficient_lmcache.replay.importers.records import Skip, stop
from efficient_lmcache.replay.importers.tasks import DECODE_TOKENS_PER_S, BlockTask

BLOCKS = BLOCKS_UNSIZED.format(BLOCK_TOKENS)
ASSUMPTIONS = (
    "requests of one session_id are a task, in the file's order; without one no conversations are recorded: a request "
    "is taken for the next call of the task whose last prompt it extends, by at least that one's output; any other "
    "begins a task, named after its line",
    "interval_s is delay; elsewhere a call is taken to last output_length / "
    f"{DECODE_TOKENS_PER_S:.0f} s, as responses' ends are not recorded, and what remains until the next request's "
    "timestamp, at least 0, to be the client's",
    BLOCKS,
)


def tasks(source: Path, skip: Skip = stop) -> Iterator[BlockTask]:
    """Every task, by its first request; RecordError names file, line and field of what is malformed."""
    size, requests = parsed(source, parse_request, BLOCK_TOKENS, skip)
    yield from lane_tasks(source, requests, size)
