"""Import of agentic Weka sessions: every agent and sub-agent is a task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.records import Skip, kept, stop
from efficient_lmcache.replay.importers.tasks import DECODE_TOKENS_PER_S, BlockCall, BlockTask, pause_s
from efficient_lmcache.replay.importers.weka_files import WekaBlocks, WekaRequest, blocks_of, parse_session, sessions

ASSUMPTIONS = (
    "an agent is the task named as its session, a sub-agent beside it the task session/agent_id",
    "block ids are private to a session, so sessions share nothing and what they shared (system prompts, tools) is not "
    "recorded, unless hash_id_scope is global",
    "requests to different models are replayed as one model's",
    "interval_s is think_time; where absent, t minus the previous request's t and api_time; where that is absent too, "
    f"a call is taken to last out / {DECODE_TOKENS_PER_S:.0f} s",
    "start_s counts from the session's own beginning; a finished sub-agent's t is taken for its end",
)


def tasks(source: Path, skip: Skip = stop) -> Iterator[BlockTask]:
    """Every lane of every session; RecordError names file, line and field of what is malformed."""
    blocks: WekaBlocks | None = None
    unnamed = 0

    def read(line: bytes, where: str) -> tuple[str, list[WekaRequest]]:
        nonlocal blocks
        expected = blocks or blocks_of(records.parse_object(line, where), where)
        requests = parse_session(line, where, expected)
        blocks = expected
        return where, requests

    for where, session in kept((partial(read, line, where) for where, line in sessions(source)), skip):
        assert blocks is not None
        lanes: dict[str, list[WekaRequest]] = {}
        for request in session:
            lanes.setdefault(request.lane_name, []).append(request)
        for name, requests in lanes.items():
            calls: list[BlockCall] = []
            for number, request in enumerate(requests):
                unnamed -= 1
                interval_s = _interval_s(requests[number - 1], request) if number else 0.0
                calls.append(_call(request, blocks.tokens, interval_s, unnamed))
            yield BlockTask(name, where, calls, blocks.tokens, scope=None if blocks.are_global else where)


def _call(request: WekaRequest, size: int, interval_s: float, tail_id: int) -> BlockCall:
    """Partial blocks have no ids; as nothing tells that two are equal, each gets one of its own."""
    ids = request.block_ids
    path = np.append(ids, tail_id) if request.prompt_tokens % size else ids
    return BlockCall(request.prompt_tokens, request.output_tokens, path, interval_s, request.start_s)


def _interval_s(previous: WekaRequest, request: WekaRequest) -> float:
    if not math.isnan(request.interval_s):
        return request.interval_s
    return pause_s(request.start_s - previous.start_s, previous.output_tokens)
