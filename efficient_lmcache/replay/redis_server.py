"""A fresh redis-server, for one run: in memory only, and on this machine only."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from efficient_lmcache.replay.driver import ReplayOptionError

_PROGRAM = "redis-server"


def require_redis() -> None:
    """Raises ReplayOptionError where there is no redis-server."""
    if shutil.which(_PROGRAM) is None:
        raise ReplayOptionError(
            f"--telemetry redis starts a {_PROGRAM}, and there is none on PATH: install it (apt-get install "
            f"{_PROGRAM}), or take --telemetry local, with which engines know nothing of each other"
        )


def redis_command(port: int, directory: Path) -> list[str]:
    """The command line that serves on 127.0.0.1:`port`; `directory` is where it would write, and it does not."""
    return [_PROGRAM, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(directory)]


def redis_is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
