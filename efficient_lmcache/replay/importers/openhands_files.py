"""OpenHands' recordings: ``output.jsonl`` with an instance's events a line, or a folder of ``llm_completions``.

    output.jsonl        {"instance_id", "history": [event, ...]}
    llm_completions/    <instance>/*.json, one a call:
                        {"messages": [...], "response": {"choices": [...], "usage": {...}}, "timestamp"}

Completions hold the messages of every call exactly. A history is replayed: every response is a call, sent with all
messages before it. After a condensation its prompts cannot be told from a history, which is then malformed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.messages import role_and_text
from efficient_lmcache.replay.importers.records import RecordError
from efficient_lmcache.replay.importers.trajectory_files import Message, Trajectory

_UNSENT_OBSERVATIONS = ("agent_state_changed", "null")
_UNSENT_ACTIONS = ("change_agent_state", "condensation_request", "null", "recall")
_SAID_ARGUMENTS = ("thought", "content", "command", "code", "url", "browser_actions", "final_thought")
_SOURCES = ("agent", "user", "environment")
_COMPLETIONS = "llm_completions"


@dataclass(frozen=True, slots=True)
class Completion:
    """One call: its messages (role, text), when its response had arrived (s since 1970), and its tokens if recorded."""

    timestamp_s: float
    messages: list[tuple[str, str]]
    response: str
    completion_tokens: int | None


def completion_folders(path: Path) -> list[Path]:
    """The folders of calls: `path` itself, or those in it or in its llm_completions; none where it is no recording."""
    inner = path / _COMPLETIONS
    root = inner if inner.is_dir() else path
    return [folder for folder in (root, *sorted(root.iterdir())) if folder.is_dir() and completion_files(folder)]


def completion_files(folder: Path) -> list[Path]:
    """The files of a folder's calls, by name."""
    return records.files(folder, ".json")


def read_completion(file: Path) -> Completion:
    """One call's file; RecordError names the field that is malformed."""
    where = str(file)
    record = records.read_object(file)
    # Every call's file repeats the conversation; its texts are kept once.
    said = (role_and_text(row, place) for row, place in records.objects(record, "messages", where))
    messages = [(sys.intern(role), sys.intern(text)) for role, text in said]
    if not messages:
        raise RecordError(f"{where}: messages is empty; a call needs a prompt")
    timestamp_s = records.clock_s(record, "timestamp", where)
    response = record.get("response")
    return Completion(
        timestamp_s,
        messages,
        _response_text(response, f"{where}: response"),
        _completion_tokens(response, f"{where}: response"),
    )


def parse_history(line: bytes, where: str) -> Trajectory:
    """An instance of ``output.jsonl``."""
    record = records.parse_object(line, where)
    messages: list[Message] = []
    latest_response: Any = None
    if record.get("history", ()) is None:  # of an instance whose run ended in an error
        record = {**record, "history": []}
    for event, place in records.objects(record, "history", where):
        if event.get("action") == "condensation":
            raise RecordError(f"{place}: is a condensation, after which prompts are not told; use its llm_completions")
        metadata = event.get("tool_call_metadata") or {}
        response = records.as_object(metadata, f"{place}: tool_call_metadata").get("model_response") or {}
        if "action" in event and response:
            if response == latest_response:
                continue  # one response with several tool calls is recorded as several actions
            latest_response = response
        message = _event_message(event, response, bool(metadata), place)
        if message is not None:
            messages.append(message)
    named = records.required_identifier(record, "instance_id", where)
    return Trajectory(str(named), tuple(messages), where)


def _event_message(event: dict[str, Any], response: Any, is_tool: bool, where: str) -> Message | None:
    """What the model saw or said in an event, None for bookkeeping."""
    if "kind" in event:
        raise RecordError(f"{where}: is an event of OpenHands' version 1; read are version 0's, and logged completions")
    source = event.get("source")
    if source not in _SOURCES:
        raise RecordError(f"{where}: source is {source!r}; allowed are {', '.join(_SOURCES)}")
    if "action" not in event and "observation" not in event:
        raise RecordError(f"{where}: must have an action or an observation, as OpenHands' version 0 writes them")
    if "observation" in event:
        role, content = "tool" if is_tool else "user", event.get("content")
        if event["observation"] in _UNSENT_OBSERVATIONS or not content:
            return None
    elif event.get("action") == "system":
        role, content = "system", _argument(event, "content", where)
    elif source == "user":
        role, content = "user", _argument(event, "content", where) if event.get("action") == "message" else None
    elif source == "environment" or event.get("action") in _UNSENT_ACTIONS:
        return None
    else:
        role = "assistant"
        content = _response_text(response, f"{where}: model_response") if response else _said(event, where)
    if not content and not (role == "assistant" and response):
        return None
    _, text = role_and_text({"role": role, "content": content}, where)
    return Message(role, text, _timestamp_s(event, where), created_s=None, completion_tokens=None)


def _response_text(response: Any, where: str) -> str:
    choice, place = next(records.objects(records.as_object(response, where), "choices", where), ({}, where))
    message = records.as_object(choice.get("message"), f"{place}: message")
    # A model that said nothing, or only thought, has content null.
    said = {"role": "assistant", **message, "content": message.get("content") or ""}
    return role_and_text(said, f"{place}: message")[1]


def _completion_tokens(response: Any, where: str) -> int | None:
    usage = records.as_object(records.as_object(response, where).get("usage") or {}, f"{where}: usage")
    if usage.get("completion_tokens") is None:
        return None
    return records.integer(usage, "completion_tokens", f"{where}: usage")


def _said(event: dict[str, Any], where: str) -> Any:
    """What the model said, where its response is not recorded (before function calling): a thought, then what to do."""
    said = [each for name in _SAID_ARGUMENTS if isinstance(each := _argument(event, name, where), str) and each]
    return "\n".join(said) or event.get("message")


def _argument(event: dict[str, Any], name: str, where: str) -> Any:
    return records.as_object(event.get("args") or {}, f"{where}: args").get(name)


def _timestamp_s(event: dict[str, Any], where: str) -> float | None:
    value = event.get("timestamp")
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise RecordError(f"{where}: timestamp must be a date and time in ISO format, not {value!r}") from None
    # OpenHands writes no zone; taken for this machine's, a pause would depend on where and when it is read.
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
