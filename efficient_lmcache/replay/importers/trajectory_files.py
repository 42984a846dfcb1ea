"""mini-swe-agent's files: what a trajectory records, read and checked.

Read are a ``.jsonl`` or ``.jsonl.gz`` with one trajectory a line, one ``.traj.json``, or a directory of them, as
``mini-swe-agent-1`` and ``-1.1`` write them. Version 1.1 differs in that tool-calling models answer with ``tool_calls``
and get their observations as role ``tool``, that every message has a timestamp, and that a last message of role
``exit``, which no model ever saw, holds the submission.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.importers.messages import message_text, optional
from efficient_lmcache.replay.trace import TraceError

FORMATS = ("mini-swe-agent-1", "mini-swe-agent-1.1")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_UNSENT_ROLE = "exit"


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

    @property
    def calls(self) -> int:
        return sum(message.role == "assistant" for message in self.messages)


def read_trajectories(source: Path, skip: Callable[[TraceError], None] | None = None) -> Iterator[Trajectory]:
    """Every trajectory, a file's in its order, a directory's by path.

    TraceError names file, line and field of what is malformed; with `skip`, a malformed trajectory is left out instead,
    and `skip` called with its error.
    """
    if not source.exists():
        raise TraceError(f"{source}: no such file or directory")
    if source.is_dir():
        files = sorted(source.rglob("*.traj.json"))
        if not files:
            raise TraceError(f"{source}: holds no *.traj.json")
        for file in files:
            yield from _good(partial(_read_single, file), skip)
    elif source.name.endswith(".traj.json"):
        yield from _good(partial(_read_single, source), skip)
    elif source.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _read_lines(source, skip)
    else:
        raise TraceError(f"{source}: unknown kind of file; allowed are *.jsonl, *.jsonl.gz, *.traj.json or a directory")


def _good(read: Callable[[], Trajectory], skip: Callable[[TraceError], None] | None) -> Iterator[Trajectory]:
    try:
        trajectory = read()
    except TraceError as error:
        if skip is None:
            raise
        skip(error)
    else:
        yield trajectory


def _read_single(file: Path) -> Trajectory:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: cannot be read: {error}") from error
    return _parse(text, str(file), default_id=file.name.removesuffix(".traj.json"))


def _read_lines(file: Path, skip: Callable[[TraceError], None] | None) -> Iterator[Trajectory]:
    number = 0
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{file}: line {number}"
                    yield from _good(partial(_parse, line, where, default_id=None), skip)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: cannot be read after line {number}: {error}") from error


def _parse(text: str, where: str, default_id: str | None) -> Trajectory:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: a trajectory is a JSON object, not a {type(record).__name__}")
    version = record.get("trajectory_format", FORMATS[0])
    if version not in FORMATS:
        raise TraceError(f"{where}: trajectory_format is {version!r}; this build reads {', '.join(FORMATS)}")
    task_id = record.get("instance_id", default_id)
    if not isinstance(task_id, str) or not task_id:
        raise TraceError(f"{where}: instance_id must be a text, not {task_id!r}")
    rows = record.get("messages")
    if not isinstance(rows, list):
        raise TraceError(f"{where}: messages must be a list, not {type(rows).__name__}")
    parsed = (_message(row, f"{where}: messages[{number}]") for number, row in enumerate(rows))
    return Trajectory(task_id, tuple(message for message in parsed if message.role != _UNSENT_ROLE), where)


def _message(row: Any, where: str) -> Message:
    if not isinstance(row, dict):
        raise TraceError(f"{where} must be an object, not {type(row).__name__}")
    if row.get("object") == "response":
        raise TraceError(f"{where} is an OpenAI Responses-API object; only chat-completions recordings are supported")
    role = row.get("role")
    if role not in (*_ROLES, _UNSENT_ROLE):
        raise TraceError(f"{where}.role is {role!r}; allowed are {', '.join(_ROLES)} and {_UNSENT_ROLE}")
    extra = optional(row, "extra", dict, where) or {}
    response = optional(extra, "response", dict, f"{where}.extra") or {}
    usage = optional(response, "usage", dict, f"{where}.extra.response") or {}
    stamped = extra if "timestamp" in extra else row
    return Message(
        role=role,
        text=message_text(row, where),
        timestamp_s=optional(stamped, "timestamp", (int, float), where),
        created_s=optional(response, "created", (int, float), f"{where}.extra.response"),
        completion_tokens=optional(usage, "completion_tokens", int, f"{where}.extra.response.usage"),
    )
