"""Messages as recorded in the shape of OpenAI's chat completions: all that a model sees of one, as text."""

from __future__ import annotations

import json
from typing import Any

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.records import RecordError

_ASSISTANT = "assistant"
_HIDDEN_PARTS = ("thinking", "redacted_thinking", "reasoning")


def role_and_text(row: dict[str, Any], where: str) -> tuple[str, str]:
    """A message's role and text; RecordError names the field that is malformed, as all functions here."""
    return records.text(row, "role", where), message_text(row, where)


def message_text(row: dict[str, Any], where: str) -> str:
    """Content, then tool calls: all that the model sees of a message, or all that it said."""
    content = row.get("content")
    tool_calls = optional(row, "tool_calls", list, where) or []
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if content is None and (tool_calls or row.get("role") == _ASSISTANT):
        content = ""  # a model that only called tools, or only thought
    if not isinstance(content, str):
        raise RecordError(f"{where}.content must be text or a list of text parts, not {type(content).__name__}")
    for number, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError(f"{where}.tool_calls[{number}].function must be an object with a name")
        shown = json.dumps({"name": function["name"], "arguments": function.get("arguments")}, ensure_ascii=False)
        content += f"\n<tool_call>\n{shown}\n</tool_call>"
    records.check_unicode(content, f"{where}: its text")
    return content


def _part(part: Any, where: str) -> str:
    """A part's text: what a model answered, or declined to; hidden reasoning is left out."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in _HIDDEN_PARTS:
        return ""
    said = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if not isinstance(said, str):
        raise RecordError(f"{where} is of type {kind!r}; only text parts are supported")
    return said


def optional(row: dict[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """The value of `key`, None where absent or null; RecordError where it is of another type or a negative number."""
    value = row.get(key)
    names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RecordError(f"{where}.{key} must be {names}, not {type(value).__name__}")
    if isinstance(value, (int, float)) and not 0 <= value <= records.LARGEST_TIME:
        raise RecordError(f"{where}.{key} is {value}; it must be a number from 0 to {records.LARGEST_TIME:g}")
    return value
