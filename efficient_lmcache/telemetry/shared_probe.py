"""One tier, many engines: whoever is first probes it and publishes what it says, and all others listen."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.backoff import Backoff
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.report import encode

#: Names of shared tiers begin with it; no engine's does.
SHARED_TIER_PREFIX = "lmcache-server/"
_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class SharedTier(Protocol):
    """What is probed. Every failure is an OSError."""

    def identify(self) -> str:
        """The tier's name, on which its engines agree; another one after a restart of what keeps the tier.

        Begins with `SHARED_TIER_PREFIX`.
        """
        ...

    def resume(self, report: TierReport | None) -> None:
        """The following probes continue the counts of `report`."""
        ...

    def probe(self) -> TierReport: ...


class SharedChannel(Protocol):
    """Where the reports of one named tier go and come from. Every failure is an OSError."""

    def claim(self) -> bool:
        """Whether this engine is the one that probes now; asked before every probe."""
        ...

    def publish(self, payload: bytes) -> None:
        """Takes a report of this engine, which has just claimed."""
        ...

    def latest(self, now_s: float) -> TierReport | None:
        """The newest report, whoever published it, received at `now_s` or before."""
        ...

    def close(self) -> None:
        """Frees the claim for another engine."""
        ...


class SharedProbe:
    """Every `interval_s`, on a thread of its own: probe and publish, or take what another engine published.

    When the engine that probes is gone, its claim is free and another one's next attempt takes it. A tier that cannot
    be asked is tried again with growing waits; from `max_age_s` on it is asked for its name first, as it may have been
    restarted, and another engine may try.

    Args:
        tier: is probed.
        open_channel: makes the channel of a name. Owned, and closed, by this.
        max_age_s: of a report.

    Attributes:
        report: the newest report, stamped with `time.monotonic()` at its receipt; None before the first one.
        probing: this engine is the one that probes.
    """

    def __init__(
        self,
        tier: SharedTier,
        open_channel: Callable[[str], SharedChannel],
        *,
        interval_s: float,
        max_age_s: float,
    ) -> None:
        self.report: TierReport | None = None
        self.probing = False
        self._tier = tier
        self._open_channel = open_channel
        self._interval_s = interval_s
        self._max_age_s = max_age_s
        self._name = ""
        self._channel: SharedChannel | None = None
        self._sequence = -1
        self._failures = FailureLog(_logger, "Probing the LMCache server's tier")
        self._publish_failures = FailureLog(_logger, "Publishing the LMCache server's tier")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="efficient-lmcache-telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops. Safe to call twice."""
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                self._look()
            except Exception as error:
                if not self._has_fresh_report():  # a busy tier that misses one probe stays whose it was
                    self._failures.failed(error)
                    self._leave()
                self._stopping.wait(backoff.next_s())
            else:
                self._failures.succeeded()
                backoff.reset()
                self._stopping.wait(self._interval_s)
        self._leave()

    def _look(self) -> None:
        if self._channel is None:
            self._enter(self._tier.identify())
        channel = self._channel
        assert channel is not None
        now_s = time.monotonic()
        heard = channel.latest(now_s)
        if heard is not None and heard.sequence > self._sequence:
            self._sequence, self.report = heard.sequence, heard
        if channel.claim():
            self._probe(channel, heard)
            return
        self.probing = False
        if self.report is not None and not self._has_fresh_report():
            # Restarted under another name, or numbered anew by an engine that had heard of no report.
            self._leave()
            self._sequence = -1

    def _probe(self, channel: SharedChannel, heard: TierReport | None) -> None:
        if not self.probing:
            self._tier.resume(heard)
            self.probing = True
        report = replace(self._tier.probe(), engine_id=self._name, sequence=self._sequence + 1)
        self._sequence += 1
        self.report = replace(report, received_s=time.monotonic())
        try:
            channel.publish(encode(report))
        except OSError as error:
            self._publish_failures.failed(error)
        else:
            self._publish_failures.succeeded()

    def _has_fresh_report(self) -> bool:
        return self.report is not None and self.report.age_s(time.monotonic()) <= self._max_age_s

    def _enter(self, name: str) -> None:
        if name != self._name:
            self._name, self._sequence = name, -1
        self._channel = self._open_channel(name)

    def _leave(self) -> None:
        channel, self._channel, self.probing = self._channel, None, False
        if channel is None:
            return
        try:
            channel.close()
        except OSError as error:
            _logger.warning("Closing the telemetry channel failed: %s: %s", type(error).__name__, error)
