"""Publishes a tier's report at a fixed interval, from a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.report import encode
from efficient_lmcache.telemetry.transport import ReportSink

_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class ReportPublisher:
    """Probes and publishes every `interval_s` from construction until `close()`; the first time at once.

    Owns `sink` and closes it. Counts the reports itself: the `sequence` that `probe` returns is overwritten. No failure
    of `probe` or `sink` gets out; each kind is logged once, and publishing goes on at the same interval.

    Args:
        probe: called on the publisher's thread, beside the threads that use the tier.
    """

    def __init__(self, probe: Callable[[], TierReport], sink: ReportSink, interval_s: float = 1.0) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s is {interval_s}; it must be positive")
        self._probe = probe
        self._sink = sink
        self._interval_s = interval_s
        self._probe_failures = FailureLog(_logger, "Probing the cache tier")
        self._sink_failures = FailureLog(_logger, "Publishing the cache tier's report")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="efficient-lmcache-telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops, and waits for a report that is under way. Safe to call twice."""
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _logger.warning("The telemetry publisher did not stop within %g s; it is left behind", _CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        sequence = 0
        while not self._stopping.is_set():
            self._publish_once(sequence)
            sequence += 1
            self._stopping.wait(self._interval_s)
        try:
            self._sink.close()  # here and not in close(), so that only this thread ever uses the sink
        except Exception as error:
            _logger.warning("Closing the telemetry channel failed: %s: %s", type(error).__name__, error)

    def _publish_once(self, sequence: int) -> None:
        try:
            payload = encode(replace(self._probe(), sequence=sequence))
        except Exception as error:
            self._probe_failures.failed(error)
            return
        self._probe_failures.succeeded()
        try:
            self._sink.publish(payload)
        except Exception as error:
            self._sink_failures.failed(error)
            return
        self._sink_failures.succeeded()
