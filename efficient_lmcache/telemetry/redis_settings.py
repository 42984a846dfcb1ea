"""Which Redis, and how to log in to it. The URL holds no password, because vLLM logs its configuration."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis import Redis

PASSWORD_VARIABLE = "EFFICIENT_LMCACHE_REDIS_PASSWORD"
#: Of a connection attempt, and of every answer.
TIMEOUT_S = 2.0
_SCHEMES = ("redis", "rediss", "unix")
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class RedisUrlError(ValueError):
    """A URL that is none of ours. The message says what is wrong and allowed, and repeats nothing secret."""


class RedisFailure(OSError):
    """Redis cannot be reached, or does not answer."""


class RedisRefusal(RedisFailure):
    """Redis answered: no (a wrong password, a missing permission, no memory left)."""


def check_url(url: str) -> None:
    """Raises RedisUrlError."""
    shape = "it must be redis://[user@]host[:port][/db], rediss://… (TLS) or unix://[user@]/path[?db=n]"
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_valid = parts.port != 0
    except ValueError:
        raise RedisUrlError(f"the URL cannot be parsed; {shape}") from None
    if parts.scheme not in _SCHEMES:
        raise RedisUrlError(f"the URL's scheme is none of {', '.join(_SCHEMES)}; {shape}")
    query = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
    if parts.password is not None or "password" in query:
        raise RedisUrlError(
            f"the URL holds a password, which vLLM would log; give it in a file or in {PASSWORD_VARIABLE}"
        )
    if not port_is_valid or not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise RedisUrlError(f"the URL names no {'socket' if parts.scheme == 'unix' else 'host or port'}; {shape}")
    allowed = {"redis": (), "rediss": _TLS_FILES, "unix": ("db",)}[parts.scheme]
    unknown = sorted(set(query) - set(allowed))
    if unknown:
        raise RedisUrlError(
            f"the URL's parameter {unknown[0]!r:.40} is unknown; allowed: {', '.join(allowed) or 'none'}"
        )
    database = parts.path.strip("/") if parts.scheme != "unix" else query.get("db", [""])[0]
    if database and not (database.isascii() and database.isdigit()):
        raise RedisUrlError(f"the URL's database is not a number; {shape}")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """A checked URL and where the password is.

    Args:
        url: see `check_url`, which raises RedisUrlError.
        password_file: holds the password alone and is read at every connection, so that a rotated secret takes effect;
            without it, the environment's EFFICIENT_LMCACHE_REDIS_PASSWORD does, if set.
    """

    url: str
    password_file: str | None = None

    def __post_init__(self) -> None:
        check_url(self.url)

    @property
    def name(self) -> str:
        """The URL for logs: no user, no parameters."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def password(self) -> str | None:
        """Raises OSError for a file that cannot be read."""
        if self.password_file is None:
            return os.environ.get(PASSWORD_VARIABLE)
        with open(self.password_file, "rb") as file:
            try:
                return file.read(4096).decode().rstrip("\r\n")
            except UnicodeDecodeError:
                raise OSError(f"{self.password_file} holds no UTF-8 text") from None

    def connect(self) -> Redis:
        """A client that connects with its first command, and that neither retries nor waits longer than `TIMEOUT_S`."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        tls = {"ssl_check_hostname": True} if self.url.startswith("rediss:") else {}
        return redis.Redis.from_url(
            self.url,
            password=self.password(),
            protocol=2,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            **tls,
        )


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turns what Redis and its library raise into RedisFailure, whose text is theirs, shortened, and never a secret."""
    import redis

    try:
        yield
    except (redis.AuthenticationError, redis.ResponseError) as error:
        raise RedisRefusal(f"{error!s:.200}".rstrip(".")) from None
    except redis.RedisError as error:
        raise RedisFailure(f"{error!s:.200}".rstrip(".")) from None
