"""Says that something fails once, not once a second."""

from __future__ import annotations

import logging


class FailureLog:
    """Logs the first failure of each kind (exception type) and the recovery, then starts afresh. For one thread.

    Attributes:
        failures: since it last succeeded.
    """

    def __init__(self, logger: logging.Logger, subject: str) -> None:
        self._logger = logger
        self._subject = subject
        self._kinds: set[type[Exception]] = set()
        self.failures = 0

    def failed(self, error: Exception) -> None:
        self.failures += 1
        if type(error) not in self._kinds:
            self._kinds.add(type(error))
            self._logger.warning(
                "%s failed: %s: %s. Serving goes on without it", self._subject, type(error).__name__, error
            )

    def succeeded(self) -> None:
        if self.failures:
            # As loud as the failure: whoever read that it broke must be able to read that it works again.
            self._logger.warning("%s works again, after %d failures", self._subject, self.failures)
            self._kinds.clear()
            self.failures = 0
