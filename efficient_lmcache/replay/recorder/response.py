"""Where vLLM's answers carry token ids, and the answers as they would be without them.

chat completions   the prompt's in `prompt_token_ids` of the answer or of the stream's first chunk, the output's in
                   `choices[0].token_ids`, in a stream piece by piece
completions        the same, but the prompt's in `choices[0].prompt_token_ids`
responses          as raw messages: `input_messages[0].tokens` and `output_messages[0].tokens` of the answer or of the
                   stream's last event

Without being asked, vLLM writes each of these fields as null where they would have been, so null is what a client gets
for them. In a chat stream it then also leaves out the chunks that carry nothing but ids.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from efficient_lmcache.replay.recorder.ids import RecentIds, cut_ids, parse_ids
from efficient_lmcache.replay.recorder.json_text import read_object
from efficient_lmcache.replay.recorder.request import RESPONSES
from efficient_lmcache.replay.trace import Tokens

_ERROR_NAME_LENGTH = 60
_DECODER = json.JSONDecoder()
_RAW_MESSAGES = ("input_messages", "output_messages")


@dataclass(slots=True)
class Answer:
    """What has been seen of one call's answer; feed it JSON texts (a body, or a stream's events) with `take`.

    Attributes:
        path: the request's.
        strip: `take` returns texts without ids.
        recent: the prompts of earlier answers, of all calls.
        finished: the model ended its output by itself or at the length asked for.
        error: the kind of what the server says went wrong. Its message may quote the prompt.
        obstacle: why the ids are not those of one prompt and one output.
    """

    path: str
    strip: bool
    recent: RecentIds
    finished: bool = False
    error: str | None = None
    obstacle: str | None = None
    _prompt: bytes | Tokens | None = None
    _outputs: list[bytes] = field(default_factory=list)
    _usage: dict[str, Any] | None = None

    def take(self, text: bytes) -> bytes | None:
        """Read one JSON text; returns what the client gets of it, None if that is nothing at all."""
        return self._take_response(text) if self.path == RESPONSES else self._take_choice(text)

    @property
    def shows_prompt(self) -> bool:
        """The prompt's ids have been seen, if not read yet."""
        return self._prompt is not None

    def prompt(self) -> Tokens | None:
        """uint32 [n]: the prompt's ids; None as long as, or because, they are not known."""
        if isinstance(self._prompt, bytes):
            try:
                self._prompt = self.recent.parse(self._prompt)
            except ValueError as error:
                self._prompt, self.obstacle = None, str(error)
        return self._prompt

    def output(self) -> Tokens:
        """uint32 [m]: the output's ids so far. ValueError where they cannot be ids."""
        return parse_ids(b",".join(ids for ids in self._outputs if ids.strip()))

    def missing(self, output: Tokens) -> str | None:
        """Why prompt and output are not known exactly; None if they are."""
        prompt = self.prompt()
        if self.obstacle is not None:
            return self.obstacle
        if prompt is None:
            return "the server returned no prompt ids"
        if not len(output) or not len(prompt):
            return "the server returned no output ids"
        counts = self._usage or {}
        for names, ids in (
            (("prompt_tokens", "input_tokens"), prompt),
            (("completion_tokens", "output_tokens"), output),
        ):
            counted = next((counts[name] for name in names if counts.get(name)), len(ids))
            if counted != len(ids):
                return "the server's ids are not as many as the tokens it counted"
        return None

    def _take_choice(self, text: bytes) -> bytes | None:
        light, prompt = cut_ids(text, "prompt_token_ids")
        light, output = cut_ids(light, "token_ids")
        fields = read_object(light)
        if fields is None:
            return text
        if prompt is not None:
            self._prompt = prompt
        if output is not None:
            self._outputs.append(output)
        self._note(fields)
        choices = fields.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        reason = choice.get("finish_reason")
        if reason in ("error", "abort"):
            self.error = f"finish reason {reason!r}"
        self.finished |= reason is not None
        only_ids = choice.get("delta") == {} and reason is None and choice.get("logprobs") is None
        if not self.strip:
            return text
        return None if only_ids and output is not None else light

    def _take_response(self, text: bytes) -> bytes:
        first = _last_key(text, _RAW_MESSAGES[0])
        # Only events about the response as a whole have the field, and failures.
        if first is None:
            if b'"error"' in text:
                self._note(read_object(text) or {})
            return text
        tail, lists = text[first.start() :], []
        while True:
            tail, ids = cut_ids(tail, "tokens")
            if ids is None:
                break
            lists.append(ids)
        light = text[: first.start()] + tail
        for key in _RAW_MESSAGES:
            light, messages = _cut_value(light, key)
            if messages and not _is_one_generation(messages):
                self.obstacle = "a response of several generations or without raw tokens"
        fields = read_object(light) or {}
        response = fields["response"] if isinstance(fields.get("response"), dict) else fields
        self._note(response)
        status = response.get("status")
        self.finished |= status in ("completed", "incomplete")
        if status in ("failed", "cancelled"):
            self.error = f"status {status!r}"
        if len(lists) == len(_RAW_MESSAGES) and self.obstacle is None:
            self._prompt, self._outputs = lists[0], [lists[1]]
        return light if self.strip else text

    def _note(self, fields: dict[str, Any]) -> None:
        error = fields.get("error")
        if error:
            kinds = (error.get("type"), error.get("code")) if isinstance(error, dict) else ()
            self.error = f"the server reports {next(filter(None, kinds), 'an error')}"[:_ERROR_NAME_LENGTH]
        usage = fields.get("usage")
        if isinstance(usage, dict):
            self._usage = usage


def _is_one_generation(messages: Any) -> bool:
    one = messages[0] if isinstance(messages, list) and len(messages) == 1 else None
    return isinstance(one, dict) and one.get("type") == "raw_message_tokens"


def _cut_value(text: bytes, key: str) -> tuple[bytes, Any]:
    """`text` with the last value under `key` replaced by null, and that value (None if there is none)."""
    match = _last_key(text, key)
    if match is None:
        return text, None
    try:
        rest = text[match.end() :].decode()
        value, end = _DECODER.raw_decode(rest)
    except ValueError:
        return text, None
    return text[: match.end()] + b"null" + rest[end:].encode(), value


def _last_key(text: bytes, key: str) -> re.Match[bytes] | None:
    """Up to where the value begins: without the colon it would be a text that the model said."""
    matches = re.finditer(rb'"%s"\s*:\s*' % key.encode(), text)
    return next(iter(deque(matches, maxlen=1)), None)
