"""mini-swe-agent's files: what a trajectory records, read and checked.

Read are a ``.jsonl`` with one trajectory a line, a ``.json`` with one (by default ``.traj.json``), either of them plain
or gzip, or a directory of ``.traj.json``, as ``mini-swe-agent-1`` and ``-1.1`` write them. Version 1.1 differs in that
tool-calling models answer with ``tool_calls`` and get their observations as role ``tool``, that every message has a
timestamp, and that a last message of role ``exit``, which no model ever saw, holds the submission. Models behind
OpenAI's Responses API answer with its objects instead (`responses`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.messages import message_text, optional
from efficient_lmcache.replay.importers.records import RecordError, RecordingError, Skip, stop
from efficient_lmcache.replay.importers.responses import as_chat_message

FORMATS = ("mini-swe-agent-1", "mini-swe-agent-1.1")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_UNSENT_ROLE = "exit"
_SINGLE = ".traj.json"


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `created_s` is its response's time, `timestamp_s` when the agent appended it (s since 1970)."""

    role: str
    text: str
    timestamp_s: float | None
    created_s: float | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One task. `where` names its file (and line) for errors."""

    task_id: str
    messages: tuple[Message, ...]
    where: str


def read_trajectories(source: Path, skip: Skip = stop) -> Iterator[Trajectory]:
    """Every trajectory, a file's in its order, a directory's by path.

    RecordError names file, line and field of what is malformed. RecordingError for what cannot be read at all.
    """
    return records.kept(_readers(source), skip)


def _readers(source: Path) -> Iterator[Callable[[], Trajectory]]:
    """What reads each trajectory."""
    if not source.exists():
        raise RecordingError(f"{source}: no such file or directory")
    if source.is_dir():
        files = records.files(source, _SINGLE, deep=True)
        if not files:
            raise RecordingError(f"{source}: holds no *{_SINGLE}")
        yield from (partial(_read_single, file) for file in files)
    elif source.name.endswith((".jsonl", ".jsonl.gz")):
        yield from (partial(_read_line, line, where, source) for where, line in records.lines(source))
    elif source.name.endswith((".json", ".json.gz")):
        yield partial(_read_single, source)
    else:
        raise RecordingError(
            f"{source}: unknown kind of file; allowed are *.jsonl and *.json, either also .gz, or a directory of "
            f"*{_SINGLE}"
        )


def _read_single(file: Path) -> Trajectory:
    return _parse(records.read_object(file), str(file), default_id=records.stem(file))


def _read_line(line: bytes, where: str, file: Path) -> Trajectory:
    number = where.removeprefix(f"{file}: ")
    return _parse(records.parse_object(line, where), where, records.stem(file) if where == str(file) else number)


def _parse(record: dict[str, Any], where: str, default_id: str) -> Trajectory:
    version = record.get("trajectory_format")
    if version is not None and version not in FORMATS:
        raise RecordError(f"{where}: trajectory_format is {version!r}; this build reads {', '.join(FORMATS)}")
    named = records.identifier(record, "instance_id", where)
    parsed = (_message(row, place) for row, place in records.objects(record, "messages", where))
    task_id = default_id if named is None else str(named)
    return Trajectory(task_id, tuple(message for message in parsed if message.role != _UNSENT_ROLE), where)


def _message(row: dict[str, Any], where: str) -> Message:
    row = as_chat_message(row, where)
    role = row.get("role")
    if role not in (*_ROLES, _UNSENT_ROLE):
        raise RecordError(f"{where}.role is {role!r}; allowed are {', '.join(_ROLES)} and {_UNSENT_ROLE}")
    extra = optional(row, "extra", dict, where) or {}
    response = optional(extra, "response", dict, f"{where}.extra") or {}
    usage = optional(response, "usage", dict, f"{where}.extra.response") or {}
    stamped = extra if "timestamp" in extra else row
    return Message(
        role=role,
        text=message_text(row, where),
        timestamp_s=_clock_s(stamped, "timestamp", where),
        created_s=_clock_s(response, "created", f"{where}.extra.response"),
        completion_tokens=optional(usage, "completion_tokens", int, f"{where}.extra.response.usage"),
    )


def _clock_s(row: dict[str, Any], key: str, where: str) -> float | None:
    value_s: float | None = optional(row, key, (int, float), where)
    records.check_clock(value_s, f"{where}.{key}")
    return value_s
