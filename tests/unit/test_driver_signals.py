"""Signals that end a run; that they end one in order is tested with whole runs (`test_driver_run`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from efficient_lmcache.replay.signals import interrupt, on_ending_signal


@pytest.fixture
def hangups_are_ignored() -> Iterator[None]:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, previous)


def test_handlers_are_put_back_when_the_block_ends() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyboardInterrupt), on_ending_signal(interrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.usefixtures("hangups_are_ignored")
def test_a_closed_terminal_does_not_end_what_nohup_started() -> None:
    with on_ending_signal(interrupt):
        os.kill(os.getpid(), signal.SIGHUP)
