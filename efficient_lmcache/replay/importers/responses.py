"""OpenAI's Responses API, as mini-swe-agent records it, in the shape of chat completions.

{"object": "response", "created_at", "usage": {"output_tokens"}, "output": [item, ...]}    what a model answered
    {"type": "message", "content": [{"type": "output_text", "text"}]}
    {"type": "function_call", "name", "arguments"}
    {"type": "reasoning", ...}                                                             hidden: left out
{"type": "function_call_output", "output"}                                                 what a tool did
"""

from __future__ import annotations

from typing import Any

from efficient_lmcache.replay.importers import records


def as_chat_message(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A message or object of either API as a message of chat completions; RecordError names what is malformed."""
    if row.get("object") == "response":
        return _answer(row, where)
    if row.get("type") == "function_call_output":
        return {**row, "role": "tool", "content": row.get("output")}
    return row


def _answer(row: dict[str, Any], where: str) -> dict[str, Any]:
    content: list[Any] = []
    tool_calls: list[dict[str, Any]] = []
    for item, place in records.objects(row, "output", where):
        if item.get("type") == "message":
            content += [part for part, _ in records.objects(item, "content", place)]
        elif item.get("type") == "function_call":
            tool_calls.append({"function": {name: item.get(name) for name in ("name", "arguments")}})
    usage = records.as_object(row.get("usage") or {}, f"{where}: usage")
    response = {"created": row.get("created_at"), "usage": {"completion_tokens": usage.get("output_tokens")}}
    extra = records.as_object(row.get("extra") or {}, f"{where}: extra")
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": tool_calls,
        "extra": {**extra, "response": response},
    }
