"""The contract between a channel's two ends: the newest payload wins, whole or not at all.

Ordering. One engine has one channel, one sink and any number of sources.
1. `publish(p)` replaces what the channel held. Calls follow one another; a sink need not be thread safe.
2. Once `publish(p)` has returned, a `latest()` that starts later returns `p` or something published after it.
   A transport across nodes may deliver later, and may skip payloads, but never goes back to an older one.
3. `latest()` never returns a mixture of two payloads, nor part of one.
4. `latest()` does not consume: until the next `publish` it returns the same payload again, however old, even when the
   publisher is dead. Age is the reader's business.
5. After `ReportSink.close()` a source may return the last payload or None.

Every failure is an OSError: a transport whose library raises something else translates it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class ReportSink(ABC):
    """The writing end, called from one background thread."""

    @abstractmethod
    def publish(self, payload: bytes) -> None:
        """Makes `payload` the channel's newest.

        Connects on first use and again after a failure, so that a later call succeeds once the cause is gone.

        Raises:
            OSError: `payload` may or may not be visible; the channel still holds a whole payload or none.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the channel. Safe to call twice. Raises OSError when something could not be removed."""


class ReportSource(ABC):
    """The reading end, called from one background thread, which may wait for it."""

    @abstractmethod
    def latest(self) -> bytes | None:
        """The newest payload, or None when nothing is published. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the source holds. Safe to call twice."""
