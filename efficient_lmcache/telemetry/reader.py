"""Gives the scheduler the newest report of its own engine, stamped with the time of receipt."""

from __future__ import annotations

import logging
from dataclasses import replace

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.report import ReportError, decode
from efficient_lmcache.telemetry.transport import ReportSource

_logger = logging.getLogger(__name__)


class ReportReader:
    """Reads `source` when asked. For one thread: `poller.ReportPoller`'s, in an engine.

    Owns `source` and closes it. Never raises for what the source does or holds. A report is returned until a newer one
    replaces it; whether it is still fresh follows from `report.age_s(now_s)`, and is the caller's rule.

    Attributes:
        bad_reports: payloads that were no valid report.
    """

    def __init__(self, source: ReportSource, engine_id: str) -> None:
        self._source = source
        self._engine_id = engine_id
        self._payload: bytes | None = None
        self._report: TierReport | None = None
        self._source_failures = FailureLog(_logger, "Reading the cache tier's report")
        self._payload_failures = FailureLog(_logger, "Decoding the cache tier's report")
        self.bad_reports = 0

    def latest(self, now_s: float) -> TierReport | None:
        """The newest report. `received_s` is the `now_s` of the call that first saw its sequence number.

        Args:
            now_s: this process's monotonic clock.
        """
        self._read(now_s)
        return self._report

    def close(self) -> None:
        self._source.close()

    def _read(self, now_s: float) -> None:
        try:
            payload = self._source.latest()
        except Exception as error:  # not even a transport's bug may end telemetry for good
            self._source_failures.failed(error)
            return
        self._source_failures.succeeded()
        if payload is None or payload == self._payload:
            return
        self._payload = payload
        try:
            report = decode(payload)
        except ReportError as error:
            self.bad_reports += 1
            self._payload_failures.failed(error)
            return
        self._payload_failures.succeeded()
        if self._is_news(report):
            self._report = replace(report, received_s=now_s)

    def _is_news(self, report: TierReport) -> bool:
        """An engine id belongs to one start of one publisher, so within it a lower sequence is always an older report.

        A transport should not return one (see `transport`); a replicated store that fails over may.
        """
        if report.engine_id != self._engine_id:
            return False
        return self._report is None or report.sequence > self._report.sequence
