"""The JSON of one task's completion requests, each made from the one before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from efficient_lmcache.replay.protocol import FORCED_TOKENS_KEY, TASK_ID_KEY
from efficient_lmcache.replay.trace import Call, Tokens

_NOTHING: Tokens = np.empty(0, np.uint32)


class TaskRequests:
    """Encodes a task's calls in their order, labelled with the task if `task_id` is given.

    Agents resend their conversation: of a prompt that goes on from the last one, only what it adds is encoded. Memory:
    the last prompt and its text, 4 and about 6 bytes a token.
    """

    def __init__(self, task_id: str | None) -> None:
        self._label = {} if task_id is None else {"kv_transfer_params": {TASK_ID_KEY: task_id}}
        self._prompt = _NOTHING
        self._text = b""

    def encode(self, call: Call) -> tuple[bytes, bytes]:
        """One call's request, in two pieces: joined, the large one would be copied once more."""
        prompt, known = call.prompt_tokens, len(self._prompt)
        if not known or not np.array_equal(prompt[:known], self._prompt):
            self._text = b'{"prompt":[' + _listed(prompt)
        elif len(prompt) > known:
            self._text = b",".join((self._text, _listed(prompt[known:])))
        self._prompt = prompt
        rest = {
            "max_tokens": len(call.output_tokens),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {FORCED_TOKENS_KEY: call.output_tokens},
            **self._label,
        }
        return self._text, b"]," + _json(rest)[1:]


def _listed(tokens: Tokens) -> bytes:
    return _json(tokens)[1:-1]


def _json(value: Any) -> bytes:
    # A twentieth of json's time; a mean prompt of the paper would hold up all other agents for milliseconds.
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
