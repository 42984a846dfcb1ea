"""OpenHands' recordings: ``output.jsonl`` with an instance's events a line, or a folder of ``llm_completions``.

    output.jsonl        {"instance_id", "history": [event, ...]}
    llm_completions/    <instance>/*.json, one a call: {"messages": [...], "response": {"choices": [...]}, "timestamp"}

Completions hold the messages of every call exactly. A history is replayed: every response is a call, sent with all
messages before it. After a condensation its prompts cannot be told from a history, which is then malformed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache.replay.importers.mini_swe_agent import trajectory_calls
from efficient_lmcache.replay.importers.rendering import Renderer
from efficient_lmcache.replay.importers.trajectory_files import Message, Trajectory, message_text
from efficient_lmcache.replay.tokenizers import Tokenizer
from efficient_lmcache.replay.trace import Call, TraceError
from efficient_lmcache.sizing.readers import records
from efficient_lmcache.sizing.readers.records import RecordError, RecordingError
from efficient_lmcache.sizing.readers.trajectories import TextRecording

_RENDERED = "messages are rendered as ChatML; an output is the response's text, tool calls and the end-of-turn marker"
_ABSENT = "hidden reasoning and tool schemas are not rendered"
_UNSENT_OBSERVATIONS = ("agent_state_changed", "null")
_SOURCES = ("agent", "user", "environment")

_Messages = list[tuple[str, str]]


class OpenHandsHistories(TextRecording):
    """``output.jsonl``: one instance is one lane and one session."""

    notes: tuple[str, ...] = (
        _RENDERED,
        _ABSENT,
        "a call's prompt is all messages before its response, in the history's order",
        "interval_s is from a response's event to the last event before the next; dispatches are not recorded",
    )

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        tokenizer = self.load_tokenizer()
        for trajectory in self._parsed(records.lines(self.path, self._progress), _history):
            calls = trajectory_calls(trajectory, tokenizer, tokenizer.vocab_size, 0.0, needs_intervals=False)
            yield trajectory.task_id, calls

    def _texts(self) -> Iterator[str]:
        for where, line in records.lines(self.path):
            try:
                trajectory = _history(line, where)
            except RecordError:
                continue  # counted or raised in the pass that yields calls
            yield from (message.text for message in trajectory.messages)


class OpenHandsCompletions(TextRecording):
    """``llm_completions``: one folder of calls is one lane and one session; calls by timestamp."""

    notes: tuple[str, ...] = (
        _RENDERED,
        _ABSENT,
        "a call's file has the time of its response only, so interval_s and start_s are not known",
    )

    def tasks(self) -> Iterator[tuple[str, Iterable[Call]]]:
        tokenizer = self.load_tokenizer()
        folders = completion_folders(self.path)
        for number, folder in enumerate(folders):
            yield folder.resolve().name, self._folder_calls(folder, tokenizer)
            if self._progress is not None:
                self._progress(number + 1, len(folders))

    def _folder_calls(self, folder: Path, tokenizer: Tokenizer) -> Iterator[Call]:
        renderer = Renderer(tokenizer)
        for messages, response in self._completions(folder):
            renderer.learn([*messages, ("assistant", response)])
            parts = [
                part
                for role, text in messages
                for part in (renderer.before(role), renderer.said(text), renderer.after())
            ]
            prompt = np.concatenate([*parts, renderer.before("assistant")])
            yield Call(prompt, renderer.said(response), math.nan)

    def _completions(self, folder: Path) -> list[tuple[_Messages, str]]:
        """A folder's calls, by time: messages and response."""
        calls: list[tuple[float, _Messages, str]] = []
        for file in sorted(folder.glob("*.json")):
            try:
                calls.append(_completion(file))
            except RecordError as error:
                self._skip_or_raise(error)
        return [(messages, response) for _, messages, response in sorted(calls, key=lambda call: call[0])]

    def _texts(self) -> Iterator[str]:
        for folder in completion_folders(self.path):
            seen: dict[str, None] = {}
            for file in sorted(folder.glob("*.json")):
                try:
                    _, messages, response = _completion(file)
                except RecordError:
                    continue  # counted or raised in the pass that yields calls
                seen.update(dict.fromkeys([*(text for _, text in messages), response]))
            yield from seen


def completion_folders(path: Path) -> list[Path]:
    """`path` itself, or else the folders in it, that hold ``*.json``; none where this is no recording."""
    return [folder for folder in (path, *sorted(path.iterdir())) if folder.is_dir() and any(folder.glob("*.json"))]


def _completion(file: Path) -> tuple[float, _Messages, str]:
    where = str(file)
    try:
        record = records.parse_object(file.read_bytes(), where)
    except OSError as error:
        raise RecordingError(f"{where}: cannot be read: {error.strerror}") from error
    messages = [_message(row, place) for row, place in records.objects(record, "messages", where)]
    if not messages:
        raise RecordError(f"{where}: messages is empty; a call needs a prompt")
    timestamp_s = records.seconds(record, "timestamp", where, required=True)
    return timestamp_s, messages, _response_text(record.get("response"), f"{where}: response")


def _message(row: dict[str, Any], where: str) -> tuple[str, str]:
    try:
        return records.text(row, "role", where), message_text(row, where)
    except TraceError as error:
        raise RecordError(str(error)) from error


def _response_text(response: Any, where: str) -> str:
    choice, place = next(records.objects(records.as_object(response, where), "choices", where), ({}, where))
    message = records.as_object(choice.get("message"), f"{place}: message")
    return _message({"role": "assistant", **message}, f"{place}: message")[1]


def _history(line: bytes, where: str) -> Trajectory:
    record = records.parse_object(line, where)
    messages: list[Message] = []
    latest_response: Any = None
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
    return Trajectory(records.text(record, "instance_id", where), tuple(messages), where)


def _event_message(event: dict[str, Any], response: Any, is_tool: bool, where: str) -> Message | None:
    """What the model saw or said in an event, None for bookkeeping."""
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
    else:
        role = "assistant"
        content = (
            _response_text(response, f"{where}: model_response")
            if response
            else _argument(event, "content", where) or event.get("message")
        )
    if not content:
        return None
    _, text = _message({"role": role, "content": content}, where)
    return Message(role, text, _timestamp_s(event, where), created_s=None, completion_tokens=None)


def _argument(event: dict[str, Any], name: str, where: str) -> Any:
    return records.as_object(event.get("args") or {}, f"{where}: args").get(name)


def _timestamp_s(event: dict[str, Any], where: str) -> float | None:
    value = event.get("timestamp")
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        raise RecordError(f"{where}: timestamp must be a date and time in ISO format, not {value!r}") from None
