"""Lists of token ids inside JSON text, found, cut out and decoded without parsing the JSON around them.

A prompt's ids are hundreds of kilobytes of JSON that a client did not ask for; a parser would take longer over them
than a proxy may add. A key followed by a colon cannot be part of a JSON string, where its quotes would be escaped.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from efficient_lmcache.replay.trace import MAX_VOCAB_SIZE, Tokens

_NESTED = (b'"', b"[", b"{")
_ID_LIST_BYTES = b"0123456789, \t\r\n"


def cut_ids(text: bytes, key: str, replacement: bytes = b"null") -> tuple[bytes, bytes | None]:
    """`text` with the first list under `key` replaced, and the inside of that list.

    The text as it is, and None, where there is no such list or it holds strings, lists or objects. What is in it is
    left to `parse_ids`, for most lists are long and most of them known already.
    """
    match = _key_pattern(key).search(text)
    if match is None:
        return text, None
    end = text.find(b"]", match.end())
    inside = text[match.end() + 1 : end]
    if end < 0 or any(opening in inside for opening in _NESTED):
        return text, None
    return text[: match.end()] + replacement + text[end + 1 :], inside


def parse_ids(inside: bytes) -> Tokens:
    """uint32 [n], n >= 0: the ids of what `cut_ids` cut out. ValueError for what no trace can hold."""
    if inside.translate(None, _ID_LIST_BYTES):
        raise ValueError("the server's token ids are not all integers")
    if not inside.strip():
        return np.empty(0, np.uint32)
    ids = np.fromstring(inside, np.int64, sep=",")
    if ids.max() >= MAX_VOCAB_SIZE:
        raise ValueError(f"token id {ids.max()} is not below {MAX_VOCAB_SIZE}")
    return ids.astype(np.uint32)


class RecentIds:
    """Parses prompts of agents that resend their conversation: of a list that goes on from a recent one, only the rest.

    Memory: the latest `max_lists` lists as text and as ids, about 10 bytes per token.
    """

    def __init__(self, max_lists: int = 64) -> None:
        self._max_lists = max_lists
        self._recent: list[tuple[bytes, Tokens]] = []

    def parse(self, inside: bytes) -> Tokens:
        """As `parse_ids`."""
        ids = None
        for place in range(len(self._recent) - 1, -1, -1):
            text, known = self._recent[place]
            if inside.startswith(text) and inside[len(text) : len(text) + 1] in (b",", b""):
                del self._recent[place]
                ids = np.concatenate((known, parse_ids(inside[len(text) + 1 :])))
                break
        if ids is None:
            ids = parse_ids(inside)
        self._recent.append((inside, ids))
        del self._recent[: -self._max_lists]
        return ids


@lru_cache
def _key_pattern(key: str) -> re.Pattern[bytes]:
    """Matches up to the opening bracket of the list under `key`."""
    return re.compile(rb'"' + re.escape(key.encode()) + rb'"\s*:\s*(?=\[)')
