"""The formats that can be imported, and which of them a file or directory has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.importers import bailian, mini_swe_agent, mooncake, openhands, records, swe_agent, weka
from efficient_lmcache.replay.importers.openhands_files import completion_files, completion_folders
from efficient_lmcache.replay.importers.records import RecordError, RecordingError, Skip
from efficient_lmcache.replay.importers.tasks import BlockTask, TextTask
from efficient_lmcache.replay.importers.weka_files import session_files
from efficient_lmcache.replay.trace import TraceError, TraceReader

_PROBED_LINES = 100
_PROBED_FILES = 100
_FIELDS = {
    "qwen-bailian": {"hash_ids", "input_length", "chat_id"},
    "mooncake": {"hash_ids", "input_length"},
    "weka": {"requests"},
    "swe-agent": {"trajectory", "history"},
    "openhands-history": {"history"},
    "mini-swe-agent": {"messages"},
}
_SUFFIXES = {".traj.json": "mini-swe-agent", ".traj": "swe-agent"}


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Recordings of messages.

    Attributes:
        tasks: every task of a file or directory, one at a time; a bad record's error names file, record and field.
        assumptions: what the recording does not tell, and what is assumed instead.
    """

    tasks: Callable[[Path, Skip], Iterator[TextTask]]
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Recordings of blocks with ids; as `TextFormat`."""

    tasks: Callable[[Path, Skip], Iterator[BlockTask]]
    assumptions: tuple[str, ...]


IMPORTERS: dict[str, TextFormat | BlockFormat] = {
    "mini-swe-agent": TextFormat(mini_swe_agent.tasks, mini_swe_agent.ASSUMPTIONS),
    "swe-agent": TextFormat(swe_agent.tasks, swe_agent.ASSUMPTIONS),
    "openhands-completions": TextFormat(openhands.completions_tasks, openhands.COMPLETIONS_ASSUMPTIONS),
    "openhands-history": TextFormat(openhands.history_tasks, openhands.HISTORY_ASSUMPTIONS),
    "weka": BlockFormat(weka.tasks, weka.ASSUMPTIONS),
    "mooncake": BlockFormat(mooncake.tasks, mooncake.ASSUMPTIONS),
    "qwen-bailian": BlockFormat(bailian.tasks, bailian.ASSUMPTIONS),
}


_ALLOWED = f"--format may be {', '.join(IMPORTERS)}"


def detect(source: Path, skip_bad: bool = False) -> str:
    """The format's name; RecordingError where it is none of them, naming them all."""
    if not source.exists():
        raise RecordingError(f"{source}: no such file or directory")
    if source.is_dir():
        if (name := directory_format(source)) is None:
            raise no_recording(source, _ALLOWED)
        return name
    _require_no_trace(source)
    if (name := named_format(source)) is None:
        found = first_object(source, skip_bad)
        if found is None:
            raise RecordingError(f"{source}: has no record to tell its format; {_ALLOWED}")
        if (name := record_format(found[0])) is None:
            raise unknown_record(*found, _ALLOWED)
    return name


def no_recording(directory: Path, allowed: str) -> RecordingError:
    """The error for a directory that is no recording itself; files in it may be."""
    files = sorted(file.name for file in (*directory.glob("*.jsonl"), *directory.glob("*.jsonl.gz")))
    if files:
        named = ", ".join(files[:3]) + (", …" if len(files) > 3 else "")
        return RecordingError(f"{directory}: is a directory; a file in it may be a recording: {named}")
    return RecordingError(f"{directory}: is a directory without a recording; {allowed}")


def unknown_record(record: dict[str, Any], where: str, allowed: str) -> RecordingError:
    """The error for a record of no format that is read."""
    fields = ", ".join(list(record)[:8]) or "none"
    return RecordingError(f"{where}: of an unknown format, with the fields {fields}; {allowed}")


def _require_no_trace(source: Path) -> None:
    try:
        with TraceReader(source):
            pass
    except (TraceError, OSError):
        return
    raise RecordingError(f"{source}: is a trace already; an import makes one of a recording")


def directory_format(path: Path) -> str | None:
    """The format of a directory's files, None where it holds none of them."""
    for suffix, name in _SUFFIXES.items():
        if records.files(path, suffix, deep=True):
            return name
    if first_session(path) is not None:
        return "weka"
    return "openhands-completions" if any(map(_has_completions, completion_folders(path))) else None


def _has_completions(folder: Path) -> bool:
    """Whether a folder's first file is a call's, or no record that tells what it is."""
    try:
        record = records.read_object(completion_files(folder)[0])
    except RecordError:
        return True
    return {"messages", "response"} <= record.keys()


def first_session(path: Path) -> tuple[dict[str, Any], str] | None:
    """The first Weka session of a directory of files, and where it is; None without one."""
    for file in session_files(path)[:_PROBED_FILES]:
        try:
            found = first_object(file)
        except RecordError:
            continue  # named, or counted, by whoever reads on
        if found is not None and record_format(found[0]) == "weka":
            return found
    return None


def named_format(path: Path) -> str | None:
    """The format that a file's name tells, None where its records must."""
    return next((name for suffix, name in _SUFFIXES.items() if path.name.endswith(suffix)), None)


def record_format(record: dict[str, Any]) -> str | None:
    """The format of a line, by its fields; None for AIPerf's requests with messages, whose outputs lack text."""
    if {"messages", "output_length"} <= record.keys():
        return None
    return next((name for name, fields in _FIELDS.items() if fields <= record.keys()), None)


def first_object(path: Path, skip_bad: bool = False) -> tuple[dict[str, Any], str] | None:
    """The first record, or where bad ones are skipped the first that is JSON, and where it is; None without one."""
    for where, line in islice(records.lines(path), _PROBED_LINES):
        try:
            return records.parse_object(line, where), where
        except RecordError:
            if not skip_bad:
                raise
    return None
