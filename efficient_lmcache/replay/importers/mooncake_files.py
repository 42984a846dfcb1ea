"""Mooncake's request traces, as Mooncake publishes them, and as AIPerf and Dynamo write them: a line a request.

    {"timestamp"?: ms, "session_id"?, "delay"?: ms, "input_length", "output_length", "hash_ids": [...]}

A delay begins with the response before it in the session. The size of blocks is not in the file; other fields
(priority, extra, …) are not regarded.
"""

from __future__ import annotations

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.block_requests import BlockRequest

BLOCK_TOKENS = 512


def parse_request(line: bytes, where: str, block_tokens: int) -> BlockRequest:
    """One line; `where` ends with its "line number"."""
    record = records.parse_object(line, where)
    session = records.identifier(record, "session_id", where)
    block_ids, prompt_tokens = records.blocks(record, where, block_tokens)
    return BlockRequest(
        name=where.rpartition(": ")[2] if session is None else str(session),
        where=where,
        key=session,
        continues=session,
        start_s=records.seconds(record, "timestamp", where) / 1000,
        interval_s=records.seconds(record, "delay", where) / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=records.integer(record, "output_length", where),
        block_ids=block_ids,
        full_blocks=prompt_tokens // block_tokens,
    )
