"""What ends a run early: Ctrl-C, a request to terminate, a closed terminal."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_ending_signal(action: Callable[[], object]) -> Iterator[None]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP call `action`; a SIGHUP ignored so far (nohup) stays ignored."""

    def handle(number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        action()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interrupt() -> None:
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Writing to a closed terminal fails, and must not fail the run's record with it."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(null, descriptor)
    os.close(null)
