"""Server-sent events, line by line as they arrive: only a line that is not whole yet waits for the next bytes."""

from __future__ import annotations

from efficient_lmcache.replay.recorder.request import RESPONSES
from efficient_lmcache.replay.recorder.response import Answer

_DATA = b"data:"
_DONE = b"[DONE]"


class EventStream:
    """Feeds an answer's events to `answer`, and gives the client what is left of them.

    Attributes:
        ended: the last event of the answer has been seen; nothing of it has been returned by `feed` before.
    """

    def __init__(self, answer: Answer) -> None:
        self.ended = False
        self._answer = answer
        self._pieces: list[bytes] = []
        self._dropped = False

    def feed(self, data: bytes) -> bytes:
        """The bytes that the client can have now; `data` is whatever has just arrived."""
        newline = data.rfind(b"\n") + 1
        if not newline:
            self._pieces.append(data)
            return b""
        lines = b"".join((*self._pieces, data[:newline])).splitlines(keepends=True)
        self._pieces = [data[newline:]] if newline < len(data) else []
        return b"".join(map(self._line, lines))

    def rest(self) -> bytes:
        """A last line without an end."""
        rest, self._pieces = b"".join(self._pieces), []
        return self._line(rest)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA):
            # The blank line that ends a dropped event goes with it.
            keep = not (self._dropped and not line.strip())
            self._dropped = False
            return line if keep else b""
        text = line[len(_DATA) :]
        if text.strip() == _DONE:
            self.ended = True
            return line
        left = self._answer.take(text)
        self.ended |= self._answer.finished and self._answer.path == RESPONSES  # which ends without a [DONE]
        self._dropped = left is None
        return b"" if left is None else _DATA + left
