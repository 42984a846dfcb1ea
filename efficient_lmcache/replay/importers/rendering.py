"""Messages as tokens, each on its own, so that a message always becomes the same ones.

ChatML: ``<|im_start|>role⏎ … <|im_end|>⏎``. A prompt extends the previous prompt and output exactly, whenever the
recorded messages do.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from efficient_lmcache.replay.tokenizers import TURN_MARKERS, Tokenizer
from efficient_lmcache.replay.trace import Tokens

_START, _END = TURN_MARKERS
_NEWLINE = "\n"


class Renderer:
    """The parts of one task's messages; each text is tokenised once.

    Ids are folded into `vocab_size` (id modulo vocab_size), which changes none where the tokenizer has no more.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = np.uint32(min(vocab_size or tokenizer.vocab_size, 2**32 - 1))
        self._known: dict[str, Tokens] = {}

    def learn(self, messages: Iterable[tuple[str, str]]) -> None:
        """Tokenise these messages (role, text) together, which is faster than one by one."""
        segments = [_END, _NEWLINE]
        for role, text in messages:
            segments += [_header(role), text]
        new = [text for text in dict.fromkeys(segments) if text not in self._known]
        encoded = self._tokenizer.encode_batch(new)
        self._known.update((text, ids % self._vocab_size) for text, ids in zip(new, encoded, strict=True))

    def before(self, role: str) -> Tokens:
        """What opens a message: for the assistant's, the end of the prompt."""
        return self._known[_header(role)]

    def said(self, text: str) -> Tokens:
        """A message's text and the end-of-turn marker: for the assistant's, the output."""
        return np.concatenate((self._known[text], self._known[_END]))

    def after(self) -> Tokens:
        """What separates a message from the next."""
        return self._known[_NEWLINE]


def _header(role: str) -> str:
    return f"{_START}{role}\n"
