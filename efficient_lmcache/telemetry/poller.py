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
    """Of several readers of one engine: the report with the highest sequence, as first received."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self._report: TierReport | None = None

    def latest(self, now_s: float) -> TierReport | None:
        for reader in self._readers:
            report = reader.latest(now_s)
            if report is not None and (self._report is None or report.sequence > self._report.sequence):
                self._report = report
        return self._report

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
