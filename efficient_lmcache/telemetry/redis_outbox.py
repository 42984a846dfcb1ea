"""Brings messages to Redis from a thread of its own, so that nobody who has one to send waits for a network."""

from __future__ import annotations

import logging
import secrets
import threading
from typing import TYPE_CHECKING, Any

from efficient_lmcache.telemetry import redis_keys
from efficient_lmcache.telemetry.backoff import Backoff
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.redis_settings import RedisRefusal, RedisSettings, redis_errors
from efficient_lmcache.telemetry.transport import ReportSink

if TYPE_CHECKING:
    from redis import Redis

#: A last value is gone so long after its publisher fell silent. Readers tell its age by what is left of this.
LAST_VALUE_TTL_S = 30.0
_DEPLOYMENT_TTL_S = 86_400
_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class RedisOutbox:
    """Publishes the newest payload of every key, until `close()`, which withdraws them all.

    While Redis is away, messages are dropped, as their successors will say more; it is tried again with growing waits.

    Attributes:
        salt: of the deployment's task hashes, on which engines agree through Redis; None before the first connection.
    """

    def __init__(self, settings: RedisSettings, deployment: str) -> None:
        self.salt: bytes | None = None
        self._settings = settings
        self._prefix = redis_keys.prefix(deployment)
        self._waiting: dict[str, bytes] = {}
        self._keys: set[str] = set()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._client: Redis | None = None
        self._failures = FailureLog(_logger, f"Publishing telemetry to {settings.name}")
        self._thread = threading.Thread(target=self._run, name="efficient-lmcache-outbox", daemon=True)
        self._thread.start()

    def put(self, key: str, payload: bytes) -> None:
        """Takes the place of what waits under the same key. Never waits, never fails."""
        with self._lock:
            self._waiting[key] = payload
        self._work.set()

    def close(self) -> None:
        """Stops. Safe to call twice."""
        self._stopping.set()
        self._work.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            self._work.clear()
            with self._lock:
                batch, self._waiting = self._waiting, {}
            try:
                self._send(batch)
            except Exception as error:
                self._failures.failed(error)
                self._disconnect()
                self._stopping.wait(backoff.next_s())
            else:
                backoff.reset()
                self._work.wait()
        self._withdraw()

    def _send(self, batch: dict[str, bytes]) -> None:
        import redis

        answers: list[Any]
        with redis_errors():
            client = self._client or self._connect()
            pipeline = client.pipeline(transaction=False)
            for key, payload in batch.items():
                pipeline.publish(key, payload)
                pipeline.set(key, payload, px=int(LAST_VALUE_TTL_S * 1000))
            if batch:
                self._keys.update(batch)
                pipeline.sadd(self._prefix + "index", *batch)
                pipeline.expire(self._prefix + "index", _DEPLOYMENT_TTL_S)
            # Each time anew: after a flush, the engines must agree on another salt.
            pipeline.set(self._prefix + "salt", secrets.token_bytes(16), nx=True)
            pipeline.expire(self._prefix + "salt", _DEPLOYMENT_TTL_S)
            pipeline.get(self._prefix + "salt")
            answers = pipeline.execute(raise_on_error=False)
            refusals = [answer for answer in answers if isinstance(answer, Exception)]
            if any(isinstance(refusal, redis.exceptions.ReadOnlyError) for refusal in refusals):
                self._disconnect()  # the master became a replica: the same address may have another master by now
            if isinstance(answers[0], Exception):
                raise answers[0]
        if isinstance(answers[-1], bytes):
            self.salt = answers[-1][:64]
        if refusals:
            # A Redis without memory left takes no values, and still tells those who listen.
            self._failures.failed(RedisRefusal(f"{refusals[0]!s:.200}".rstrip(".")))
        else:
            self._failures.succeeded()

    def _connect(self) -> Redis:
        client = self._client = self._settings.connect()
        self._forget_dead_keys(client)
        return client

    def _forget_dead_keys(self, client: Redis) -> None:
        """Every start of an engine adds keys to the index, and no dead engine takes its own away."""
        keys: list[Any] = list(client.smembers(self._prefix + "index"))
        if not keys:
            return
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        dead = [key for key, exists in zip(keys, pipeline.execute(), strict=True) if not exists]
        if dead:
            client.srem(self._prefix + "index", *dead)

    def _withdraw(self) -> None:
        """Readers need not wait for an engine that stopped in order. An empty message says so."""
        if self._client is None or not self._keys:
            return
        try:
            pipeline = self._client.pipeline(transaction=False)
            pipeline.delete(*self._keys)
            pipeline.srem(self._prefix + "index", *self._keys)
            for key in self._keys:
                pipeline.publish(key, b"")
            pipeline.execute()
        except Exception as error:  # its time to live does the same
            _logger.debug("Withdrawing telemetry failed: %s", type(error).__name__)
        self._disconnect()

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


class RedisSink(ReportSink):
    """Publishes under one key of an outbox. Returns at once and never fails; the outbox says what went wrong."""

    def __init__(self, outbox: RedisOutbox, key: str) -> None:
        self._outbox = outbox
        self._key = key

    def publish(self, payload: bytes) -> None:
        self._outbox.put(self._key, payload)

    def close(self) -> None:
        self._outbox.close()


class BothSinks(ReportSink):
    """Publishes to the engine's own host and to everybody else; the former's failures are the caller's to hear."""

    def __init__(self, local: ReportSink, remote: RedisSink) -> None:
        self._local = local
        self._remote = remote

    def publish(self, payload: bytes) -> None:
        self._remote.publish(payload)
        self._local.publish(payload)

    def close(self) -> None:
        try:
            self._local.close()
        finally:
            self._remote.close()
