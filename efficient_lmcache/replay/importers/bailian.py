"""Import of Qwen-Bailian usage traces: a conversation is a task, and so is each branch of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from efficient_lmcache.replay.importers.bailian_files import BLOCK_TOKENS, parse_request
from efficient_lmcache.replay.importers.block_requests import BLOCKS_UNSIZED, lane_tasks, parsed
from efficient_lmcache.replay.importers.records import Skip, stop
from efficient_lmcache.replay.importers.tasks import DECODE_TOKENS_PER_S, BlockTask

CONVERSATIONS = (
    "a request continues the one whose chat_id is its parent_chat_id; a second one with that parent is a branch, a "
    "lane of its own, and one whose parent is not in the file begins a conversation"
)
BLOCKS = BLOCKS_UNSIZED.format(BLOCK_TOKENS)
ASSUMPTIONS = (
    CONVERSATIONS,
    "interval_s: responses' ends are not recorded, so a call is taken to last output_length / "
    f"{DECODE_TOKENS_PER_S:.0f} s, and what remains until the next request's timestamp, at least 0, to be the client's",
    BLOCKS,
)


def tasks(source: Path, skip: Skip = stop) -> Iterator[BlockTask]:
    """Every lane, by its first request; RecordError names file, line and field of what is malformed."""
    size, requests = parsed(source, parse_request, BLOCK_TOKENS, skip)
    yield from lane_tasks(source, requests, size)
