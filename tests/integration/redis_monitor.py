"""Everything that clients say to a Redis, byte for byte."""

from __future__ import annotations

import codecs
import re
import socket
import threading
from types import TracebackType

from redis_process import RedisProcess

_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class RedisMonitor:
    """Listens from `with` to its end.

    Attributes:
        commands: each as its words, in order of arrival.
    """

    def __init__(self, server: RedisProcess) -> None:
        self.commands: list[list[bytes]] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(server.socket))
        self._lines = self._socket.makefile("rb")
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> RedisMonitor:
        self._socket.sendall(b"MONITOR\r\n")
        assert self._lines.readline() == b"+OK\r\n"
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        for line in self._lines:
            self.commands.append([codecs.escape_decode(word)[0] for word in _WORD.findall(line)])  # type: ignore[misc]
