"""Hears messages from Redis on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from efficient_lmcache.telemetry import redis_keys
from efficient_lmcache.telemetry.backoff import Backoff
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.observation import MAX_OBSERVATION_BYTES
from efficient_lmcache.telemetry.redis_outbox import LAST_VALUE_TTL_S
from efficient_lmcache.telemetry.redis_settings import TIMEOUT_S, RedisFailure, RedisSettings, redis_errors

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import PubSub

#: Messages are taken in batches: waking up for each costs more than the message.
_PAUSE_S = 0.25
_IDLE_S = 1.0
_SILENCE_S = 5.0
_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)

#: Takes a key, a payload and its age in seconds.
Receiver = Callable[[str, bytes, float], None]


class RedisFeed:
    """Brings every message under the given keys to `receive`, until `close()`: the last values, then what comes.

    Subscribes before it reads the last values, so that none is lost in between; a receiver may see one twice. While
    Redis is away it is tried again with growing waits.

    Args:
        keys: a key, or what keys begin with and a `*`.
        receive: called on the feed's thread.

    Attributes:
        connected: subscribed, and Redis has answered lately.
        error: why not, in words; None while connected, and before the first attempt has ended.
    """

    def __init__(self, settings: RedisSettings, deployment: str, keys: Sequence[str], receive: Receiver) -> None:
        self.connected = False
        self.error: str | None = None
        self._settings = settings
        self._index = redis_keys.prefix(deployment) + "index"
        self._channels = [key for key in keys if not key.endswith("*")]
        self._patterns = [key for key in keys if key.endswith("*")]
        self._receive = receive
        self._attempted = threading.Event()
        self._stopping = threading.Event()
        self._failures = FailureLog(_logger, f"Hearing telemetry from {settings.name}")
        self._thread = threading.Thread(target=self._run, name="efficient-lmcache-feed", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end of the first attempt to connect, at most `timeout_s`; whether it succeeded."""
        self._attempted.wait(timeout_s)
        return self.connected

    def close(self) -> None:
        """Stops. Safe to call twice."""
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                with redis_errors():
                    self._listen(backoff)
            except Exception as error:
                self.connected = False
                self.error = f"{error}"
                self._attempted.set()
                self._failures.failed(error)
                self._stopping.wait(backoff.next_s())

    def _listen(self, backoff: Backoff) -> None:
        client = self._settings.connect()
        pubsub: PubSub = client.pubsub()  # type: ignore[no-untyped-call]
        try:
            self._subscribe(pubsub)
            self._receive_last_values(client)
            self.connected, self.error = True, None
            self._attempted.set()
            self._failures.succeeded()
            backoff.reset()
            self._receive_messages(pubsub)
        finally:
            self.connected = False
            with suppress(Exception):  # what it fails with has been said already
                pubsub.close()
                client.close()

    def _subscribe(self, pubsub: PubSub) -> None:
        if self._channels:
            pubsub.subscribe(*self._channels)
        if self._patterns:
            pubsub.psubscribe(*self._patterns)
        confirmed = 0
        give_up_s = time.monotonic() + TIMEOUT_S
        while confirmed < len(self._channels) + len(self._patterns):
            message: Any = pubsub.get_message(timeout=TIMEOUT_S)
            if message is None or time.monotonic() > give_up_s:
                raise RedisFailure(f"no answer to the subscription within {TIMEOUT_S:g} s")
            confirmed += message["type"] in ("subscribe", "psubscribe")
            self._take(message)

    def _receive_last_values(self, client: Redis) -> None:
        members: Any = client.smembers(self._index)
        keys = [key for key in members if self._is_wanted(key.decode(errors="replace"))]
        if not keys:
            return
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            # One byte more than allowed, so that the decoder notices what is too long.
            pipeline.getrange(key, 0, MAX_OBSERVATION_BYTES)
            pipeline.pttl(key)
        answers = pipeline.execute(raise_on_error=False)
        for key, payload, left_ms in zip(keys, answers[::2], answers[1::2], strict=True):
            if isinstance(payload, bytes) and payload:  # gone meanwhile, or something that is no string
                age_s = LAST_VALUE_TTL_S - left_ms / 1000 if left_ms >= 0 else LAST_VALUE_TTL_S
                self._receive(key.decode(errors="replace"), payload, max(age_s, 0.0))

    def _receive_messages(self, pubsub: PubSub) -> None:
        connection: Any = pubsub.connection
        heard_s = time.monotonic()
        while not self._stopping.is_set():
            # The timeout is also that of every further part of a large message.
            message: Any = pubsub.get_message(timeout=_IDLE_S)
            if message is not None:
                heard_s = time.monotonic()
                self._take(message)
                if not connection.can_read(timeout=0):
                    self._stopping.wait(_PAUSE_S)
            elif time.monotonic() - heard_s > _SILENCE_S:
                raise RedisFailure(f"no answer for {_SILENCE_S:g} s")
            else:
                pubsub.ping()

    def _is_wanted(self, key: str) -> bool:
        return key in self._channels or key.startswith(tuple(pattern[:-1] for pattern in self._patterns))

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] in ("message", "pmessage"):
            self._receive(message["channel"].decode(errors="replace"), message["data"], 0.0)
