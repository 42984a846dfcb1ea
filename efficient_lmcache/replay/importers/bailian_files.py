"""Alibaba's Qwen-Bailian usage traces, ``qwen_*_blksz_16.jsonl``: a request a line.

{"chat_id", "parent_chat_id": -1 at a conversation's beginning, "timestamp": s, "input_length", "output_length",
 "type": "text" | "search" | "image" | "file" | …, "turn", "hash_ids": [...]}
"""

from __future__ import annotations

import math

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.block_requests import BlockRequest

BLOCK_TOKENS = 16
_NO_PARENT = (-1, "-1")


def parse_request(line: bytes, where: str, block_tokens: int) -> BlockRequest:
    """One line."""
    record = records.parse_object(line, where)
    chat = records.required_identifier(record, "chat_id", where)
    parent = records.identifier(record, "parent_chat_id", where)
    block_ids, prompt_tokens = records.blocks(record, where, block_tokens)
    return BlockRequest(
        name=f"chat {chat}",
        where=where,
        key=chat,
        continues=None if parent in _NO_PARENT else parent,
        start_s=records.clock_s(record, "timestamp", where),
        interval_s=math.nan,
        prompt_tokens=prompt_tokens,
        output_tokens=records.integer(record, "output_length", where),
        block_ids=block_ids,
        full_blocks=prompt_tokens // block_tokens,
    )
