"""Messages as tokens, each on its own, so that a message always becomes the same ones.

ChatML: ``<|im_start|>role⏎ … <|im_end|>⏎``. A prompt extends the previous prompt and output exactly, whenever the
recorded messages do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from efficient_lmcache.replay.importers.tasks import TextCall
from efficient_lmcache.replay.tokenizers import TURN_MARKERS, Tokenizer
from efficient_lmcache.replay.trace import Call, Tokens

RENDERED = "messages are rendered as ChatML; an output is the response's text, tool calls and the end-of-turn marker"
_START, _END = TURN_MARKERS
_NEWLINE = "\n"
_ASSISTANT = "assistant"


def rendered_calls(
    calls: Sequence[TextCall], tokenizer: Tokenizer, vocab_size: int | None = None, began_s: float = 0.0
) -> Iterator[Call]:
    """A task's calls as tokens, start_s counted from `began_s`; an interval that is not known stays nan.

    Ids are folded into `vocab_size` (id modulo vocab_size), which changes none where the tokenizer has no more.
    """
    renderer = _Renderer(tokenizer, vocab_size)
    renderer.learn(
        message for call, kept in _with_kept(calls) for message in (*call.messages[kept:], (_ASSISTANT, call.response))
    )
    nothing: Tokens = np.empty(0, np.uint32)
    body = nothing
    for call, kept in _with_kept(calls):
        new = (renderer.turn(role, text) for role, text in call.messages[kept:])
        body = np.concatenate((body if kept else nothing, *new))
        start_s = None if call.start_s is None else call.start_s - began_s
        yield Call(renderer.opened(body), renderer.said(call.response), call.interval_s, start_s)


def _with_kept(calls: Sequence[TextCall]) -> Iterator[tuple[TextCall, int]]:
    """Every call, and how many messages it has of the one before: all of them, ahead of its own, or none.

    Agents resend their conversation, which would otherwise be put together anew for every call.
    """
    before: Sequence[tuple[str, str]] = []
    for call in calls:
        yield call, len(before) if call.messages[: len(before)] == before else 0
        before = call.messages


class _Renderer:
    """The parts of one task's messages; each text is tokenised once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = np.uint32(min(vocab_size or tokenizer.vocab_size, 2**32 - 1))
        self._known: dict[str, Tokens] = {}

    def learn(self, messages: Iterable[tuple[str, str]]) -> None:
        """Tokenise what is new in these messages (role, text) together, which is faster than one by one."""
        segments = dict.fromkeys((_END, _NEWLINE, _header(_ASSISTANT)))
        for role, text in messages:
            segments[_header(role)] = segments[text] = None
        new = [text for text in segments if text not in self._known]
        encoded = self._tokenizer.encode_batch(new)
        self._known.update((text, ids % self._vocab_size) for text, ids in zip(new, encoded, strict=True))

    def turn(self, role: str, text: str) -> Tokens:
        """A message of a prompt."""
        return np.concatenate((self._known[_header(role)], self.said(text), self._known[_NEWLINE]))

    def opened(self, body: Tokens) -> Tokens:
        """A prompt's messages, and what opens the assistant's next."""
        return np.concatenate((body, self._known[_header(_ASSISTANT)]))

    def said(self, text: str) -> Tokens:
        """A message's text and the end-of-turn marker: for the assistant's, the output."""
        return np.concatenate((self._known[text], self._known[_END]))


def _header(role: str) -> str:
    return f"{_START}{role}\n"
