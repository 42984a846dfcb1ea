"""Keeps the newest tier report at hand, so that nobody who decides on one has to wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from efficient_lmcache.core.tier import TierReport

_CLOSE_TIMEOUT_S = 5.0


class Reader(Protocol):
    """Has an engine's newest report; never raises for what it finds, or does not."""

    def latest(self, now_s: float) -> TierReport | None: ...

    def close(self) -> None: ...


class NewestOf:
    """Of several readers of one engine: the report with the highest sequence, as first received.

    One that is older than `max_age_s` comes last, whatever its sequence: a channel that went silent, or that was fed a
    forgery, must not outrank one that goes on.
    """

    def __init__(self, readers: Sequence[Reader], max_age_s: float) -> None:
        self._readers = readers
        self._max_age_s = max_age_s

    def latest(self, now_s: float) -> TierReport | None:
        reports = [report for reader in self._readers if (report := reader.latest(now_s)) is not None]
        return max(reports, key=lambda report: self._rank(report, now_s), default=None)

    def _rank(self, report: TierReport, now_s: float) -> tuple[bool, int, float]:
        return report.age_s(now_s) <= self._max_age_s, report.sequence, -report.received_s

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class ReportPoller:
    """Asks a reader every `interval_s` from a thread of its own, until `close()`. Owns the reader and closes it.

    vLLM's scheduling loop takes `report` as it is: a file system or a network that hangs makes reports old, and an old
    report is not trusted, but it never delays a request.

    Attributes:
        report: the newest report, stamped with `time.monotonic()` at its receipt; None before the first one.
    """

    def __init__(self, reader: Reader, interval_s: float = 0.5) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s is {interval_s}; it must be positive")
        self.report: TierReport | None = None
        self._reader = reader
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="efficient-lmcache-reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops. Safe to call twice."""
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.report = self._reader.latest(time.monotonic())
            self._stopping.wait(self._interval_s)
        self._reader.close()
