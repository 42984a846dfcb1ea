"""What is known of a deployment's engines: the newest tier report and the newest observation of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from efficient_lmcache.core.observation import Observation
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import observation, redis_keys, report
from efficient_lmcache.telemetry.wire import ReportError

#: So long after its last message an engine is as if it had never been.
FORGET_AFTER_S = 60.0
_MAX_MESSAGES = 8192
_logger = logging.getLogger(__name__)


class ClusterView:
    """For any thread: messages come in on a feed's, and are looked up on others.

    Age counts from receipt on this process's own monotonic clock, less what Redis says the message has waited; no
    sender's clock plays a part. Within one engine, a sequence that is not above the last one seen is no news.

    Args:
        clock: this process's monotonic clock, in seconds.
        on_bad_message: called for each message that was none.

    Attributes:
        bad_messages: how many. The first one is logged.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_bad_message: Callable[[], None] = lambda: None
    ) -> None:
        self.bad_messages = 0
        self._clock = clock
        self._on_bad_message = on_bad_message
        self._messages: dict[redis_keys.Channel, TierReport | Observation] = {}
        self._forget_next_s = clock() + FORGET_AFTER_S
        self._lock = threading.Lock()

    def receive(self, key: str, payload: bytes, age_s: float = 0.0) -> None:
        """Takes a message in; an empty one says that its engine has stopped. Whatever it holds, nothing is raised."""
        try:
            channel = redis_keys.parse(key)
            if channel is None:
                raise ReportError("the key is none of a message")
            if payload:
                self._put(channel, _decoded(channel, payload, self._clock() - age_s))
            else:
                with self._lock:
                    self._messages.pop(channel, None)
        except ReportError as error:
            self.bad_messages += 1
            if self.bad_messages == 1:
                # Once: whoever sends garbage goes on, and a good message in between says nothing of it.
                _logger.warning("A telemetry message under %.200r is ignored, like all such: %s", key, error)
            self._on_bad_message()

    def tier(self, engine_id: str, rank: int = 0) -> TierReport | None:
        """The newest report, however old."""
        seen = self._messages.get(redis_keys.Channel("tier", engine_id, rank))
        return seen if isinstance(seen, TierReport) else None

    def tiers(self, max_age_s: float) -> list[TierReport]:
        """The newest report of every engine and rank, in their order, unless older than `max_age_s`."""
        reports = [seen for seen in self._younger(max_age_s) if isinstance(seen, TierReport)]
        return sorted(reports, key=lambda seen: (seen.engine_id, seen.rank))

    def observations(self, max_age_s: float) -> list[Observation]:
        """The newest observation of every engine, in their order, unless older than `max_age_s`."""
        observations = [seen for seen in self._younger(max_age_s) if isinstance(seen, Observation)]
        return sorted(observations, key=lambda seen: seen.engine_id)

    def _younger(self, max_age_s: float) -> list[TierReport | Observation]:
        now_s = self._clock()
        with self._lock:
            return [seen for seen in self._messages.values() if seen.age_s(now_s) <= max_age_s]

    def _put(self, channel: redis_keys.Channel, seen: TierReport | Observation) -> None:
        with self._lock:
            self._forget_old()
            known = self._messages.get(channel)
            if known is None and len(self._messages) >= _MAX_MESSAGES:
                raise ReportError(f"more than {_MAX_MESSAGES} publishers")
            if known is None or seen.sequence > known.sequence:
                self._messages[channel] = seen

    def _forget_old(self) -> None:
        now_s = self._clock()
        if now_s < self._forget_next_s:
            return
        self._forget_next_s = now_s + FORGET_AFTER_S / 4
        for channel in [name for name, seen in self._messages.items() if seen.age_s(now_s) > FORGET_AFTER_S]:
            del self._messages[channel]


def _decoded(channel: redis_keys.Channel, payload: bytes, received_s: float) -> TierReport | Observation:
    """Raises ReportError."""
    seen: TierReport | Observation
    if channel.kind == "tier":
        seen = report.decode(payload, received_s)
        rank = seen.rank
    else:
        seen = observation.decode(payload, received_s)
        rank = 0
    if (seen.engine_id, rank) != (channel.engine_id, channel.rank):
        raise ReportError("engine_id and rank are not those of the key")
    return seen


class OwnReports:
    """An engine's own reports as the cluster view has them: a reader for `poller.ReportPoller`.

    They reach the scheduler this way where its worker runs on another host. The view is someone else's to close.
    """

    def __init__(self, view: ClusterView, engine_id: str) -> None:
        self._view = view
        self._engine_id = engine_id

    def latest(self, now_s: float) -> TierReport | None:
        return self._view.tier(self._engine_id)

    def close(self) -> None:
        pass
