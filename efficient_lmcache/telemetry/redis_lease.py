"""Who of several engines does something for all: the one that holds a key of Redis, and holds it anew in time."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from efficient_lmcache.telemetry.redis_settings import RedisSettings, redis_errors

if TYPE_CHECKING:
    from redis import Redis


class RedisLease:
    """For one thread, which waits for Redis.

    Args:
        ttl_s: so long after its holder has gone, another one may have it.
    """

    def __init__(self, settings: RedisSettings, key: str, ttl_s: float) -> None:
        self._settings = settings
        self._key = key
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._token = secrets.token_bytes(16)
        self._client: Redis | None = None

    def hold(self) -> bool:
        """Whether the lease is ours, from now on if it was nobody's.

        Raises:
            RedisFailure: Redis cannot say.
        """
        try:
            with redis_errors():
                if self._client is None:
                    self._client = self._settings.connect()
                if self._client.set(self._key, self._token, nx=True, px=self._ttl_ms):
                    return True
                if self._client.get(self._key) != self._token:
                    return False
                return bool(self._client.set(self._key, self._token, px=self._ttl_ms))
        except OSError:
            self._disconnect()
            raise

    def close(self) -> None:
        """Gives the lease up. Never raises."""
        if self._client is not None:
            with suppress(Exception), redis_errors():  # it ends by itself
                if self._client.get(self._key) == self._token:
                    self._client.delete(self._key)
        self._disconnect()

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                client.close()
