"""Agentic sessions as Weka publishes them: a JSON line a session, or a directory with a file for each.

    {"id", "block_size": 64, "hash_id_scope": "local" | "global", "requests": [
        {"t", "type": "n" | "s", "in", "out", "hash_ids", "api_time"?, "think_time"?},
        {"t", "type": "subagent", "agent_id", "duration_ms", "requests": [...]}]}

Block ids are known to their session only, or where their scope is global to the whole recording. Times are in seconds;
those of a sub-agent's requests begin with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_lmcache.core.references import Ints
from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.records import Progress, RecordError

_SUB_AGENT = "subagent"
_LOCAL, _GLOBAL = _SCOPES = ("local", "global")


@dataclass(frozen=True, slots=True, eq=False)
class WekaRequest:
    """One request; `block_ids` are those of its full blocks, `interval_s` is nan where nothing tells it."""

    lane_name: str
    start_s: float
    interval_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: Ints


def session_files(source: Path) -> list[Path]:
    """The files of a recording, by name."""
    return records.files(source, ".json") if source.is_dir() else [source]


def sessions(source: Path, progress: Progress | None = None) -> Iterator[tuple[str, bytes]]:
    """Every session, and where it is; see `records.lines`. Of a directory, `progress` counts files."""
    files = session_files(source)
    for number, file in enumerate(files, 1):
        yield from records.lines(file, progress if len(files) == 1 else None)
        if progress is not None and len(files) > 1:
            progress(number, len(files))


@dataclass(frozen=True, slots=True)
class WekaBlocks:
    """What all sessions of a recording have in common: a block's size, and whether ids are the whole recording's."""

    tokens: int
    are_global: bool


def blocks_of(record: dict[str, Any], where: str) -> WekaBlocks:
    """A session's blocks."""
    scope = record.get("hash_id_scope", _LOCAL)
    if scope not in _SCOPES:
        raise RecordError(f"{where}: hash_id_scope is {scope!r}; allowed are {', '.join(map(repr, _SCOPES))}")
    return WekaBlocks(records.integer(record, "block_size", where, least=1), scope == _GLOBAL)


def parse_session(line: bytes, where: str, expected: WekaBlocks) -> list[WekaRequest]:
    """A session's requests by time; those of one lane (an agent or a sub-agent) stay in recorded order."""
    record = records.parse_object(line, where)
    blocks = blocks_of(record, where)
    if (size := blocks.tokens) != expected.tokens:
        raise RecordError(f"{where}: block_size is {size}; it must be {expected.tokens}, as in the first session")
    if blocks.are_global != expected.are_global:
        scope, allowed = _SCOPES[blocks.are_global], _SCOPES[expected.are_global]
        raise RecordError(f"{where}: hash_id_scope is {scope!r}; it must be {allowed!r}, as in the first session")
    requests = _requests(record, where, records.text(record, "id", where), 0.0, blocks.tokens)
    return sorted(requests, key=lambda request: request.start_s)


def _requests(record: dict[str, Any], where: str, lane_name: str, began_s: float, size: int) -> Iterator[WekaRequest]:
    """The requests of one agent and of its sub-agents."""
    previous_end_s = math.nan
    for row, place in records.objects(record, "requests", where):
        t_s = began_s + records.seconds(row, "t", place, required=True)
        if row.get("type") == _SUB_AGENT:
            duration_s = records.seconds(row, "duration_ms", place) / 1000
            sub_name = f"{lane_name}/{records.text(row, 'agent_id', place)}"
            yield from _requests(row, place, sub_name, t_s if math.isnan(duration_s) else t_s - duration_s, size)
            continue
        interval_s = records.seconds(row, "think_time", place)
        if math.isnan(interval_s):
            interval_s = max(0.0, t_s - previous_end_s) if not math.isnan(previous_end_s) else math.nan
        yield _request(row, place, lane_name, t_s, interval_s, size)
        previous_end_s = t_s + records.seconds(row, "api_time", place)


def _request(
    row: dict[str, Any], where: str, lane_name: str, start_s: float, interval_s: float, size: int
) -> WekaRequest:
    prompt_tokens = records.integer(row, "in", where, least=1)
    block_ids = records.integers(row, "hash_ids", where)
    records.check_blocks(len(block_ids), prompt_tokens, size, "hash_ids", where)
    return WekaRequest(
        lane_name=lane_name,
        start_s=start_s,
        interval_s=interval_s,
        prompt_tokens=prompt_tokens,
        output_tokens=records.integer(row, "out", where),
        block_ids=block_ids[: prompt_tokens // size],
    )
