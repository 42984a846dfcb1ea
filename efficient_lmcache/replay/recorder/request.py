"""What a request says of its call: its task, whether it can be recorded, and how its ids are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.replay.protocol import TASK_ID_KEY
from efficient_lmcache.replay.recorder.ids import cut_ids
from efficient_lmcache.replay.recorder.json_text import read_object

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
# What makes vLLM return token ids; absent means no.
_ID_OPTIONS = {CHAT: "return_token_ids", COMPLETIONS: "return_token_ids", RESPONSES: "enable_response_messages"}
RECORDED_PATHS = tuple(_ID_OPTIONS)
# They generate too, in forms that this recorder does not read.
UNREAD_PATHS = (
    "/v1/messages",
    "/v1/chat/completions/batch",
    "/cohere/v2/chat",
    "/generate",
    "/inference/v1/generate",
    "/invocations",
)
TASK_HEADER = "X-Task-Id"
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning", "reasoning_text")


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One request to a recorded path.

    Attributes:
        path: one of `RECORDED_PATHS`.
        body: what goes upstream.
        added: the client did not ask for ids, so the response must lose them again.
        task: the client's own name for the task, or None.
        salt: vLLM's cache salt: tenants do not share prefixes.
        obstacle: why the call cannot be recorded; its body is the client's own.
    """

    path: str
    body: bytes
    added: bool = False
    task: str | None = None
    salt: str | None = None
    obstacle: str | None = None


def read_request(path: str, body: bytes, headers: Mapping[str, str]) -> CallRequest:
    """Never fails: what cannot be understood is forwarded as it is, with the obstacle said."""
    # Prompts given as ids are the bulk of a body, and of no interest here.
    light, _ = cut_ids(body, "prompt", b"[]") if path == COMPLETIONS else (body, None)
    fields = read_object(light)
    if not fields:
        return CallRequest(path, body, task=_task({}, headers), obstacle="the request is not a JSON object")
    task, salt = _task(fields, headers), fields.get("cache_salt")
    salt = salt if isinstance(salt, str) else None
    obstacle = _obstacle(path, fields)
    if obstacle is not None:
        return CallRequest(path, body, task=task, salt=salt, obstacle=obstacle)
    option = _ID_OPTIONS[path]
    added = not fields.get(option)
    # Of a key that occurs twice, JSON readers take the last.
    asking = body.rstrip()[:-1] + b',"%s":true}' % option.encode() if added else body
    return CallRequest(path, asking, added, task, salt)


def _task(fields: dict[str, Any], headers: Mapping[str, str]) -> str | None:
    named = (
        headers.get(TASK_HEADER),
        _entry(fields.get("kv_transfer_params"), TASK_ID_KEY),
        _entry(fields.get("metadata"), "task_id"),
    )
    name = next((str(name) for name in named if isinstance(name, (str, int)) and str(name)), None)
    # Neither a header nor a JSON escape need be Unicode.
    return None if name is None else name.encode(errors="backslashreplace").decode()


def _entry(mapping: Any, key: str) -> Any:
    return mapping.get(key) if isinstance(mapping, dict) else None


def _obstacle(path: str, fields: dict[str, Any]) -> str | None:
    """Why a request is not one prompt of tokens with one output."""
    for name in ("n", "best_of"):
        if fields.get(name) not in (None, 1):
            return f"{name} is not 1"
    if fields.get("use_beam_search"):
        return "beam search"
    if fields.get("echo"):
        return "echo"
    if path == RESPONSES:
        return "background response" if fields.get("background") else _media(fields.get("input"))
    if path == CHAT:
        return _media(fields.get("messages"))
    if fields.get("prompt_embeds") is not None:
        return "prompt given as embeddings"
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return "several prompts in one request" if several else None


def _media(messages: Any) -> str | None:
    """Placeholder ids say nothing of the image that they stand for."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS:
                return "a prompt that is not text alone"
    return None
