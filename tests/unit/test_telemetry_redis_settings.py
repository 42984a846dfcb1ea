"""Where Redis is and how to log in: what is accepted, and what is never repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.telemetry.backoff import Backoff
from efficient_lmcache.telemetry.redis_settings import PASSWORD_VARIABLE, RedisSettings, RedisUrlError, check_url

SECRET = "geheim"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://host", "redis://host"),
        ("redis://user@host:6380/3", "redis://host:6380/3"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        ("rediss://us%40er@host/?ssl_ca_certs=/etc/ca.pem&ssl_certfile=/c&ssl_keyfile=/k", "rediss://host/"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
        ("unix://user@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_urls_and_how_logs_name_them(url: str, name: str) -> None:
    assert RedisSettings(url).name == name


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"redis://user:{SECRET}@host", "holds a password"),
        (f"redis://:{SECRET}@host", "holds a password"),
        ("redis://user:@host", "holds a password"),
        (f"redis://host?password={SECRET}", "holds a password"),
        (f"redis://host:{SECRET}", "cannot be parsed"),
        (f"redis://[{SECRET}", "cannot be parsed"),
        (f"http://{SECRET}", "scheme is none of redis, rediss, unix"),
        (f"{SECRET}", "scheme is none of"),
        ("", "scheme is none of"),
        ("redis://", "names no host"),
        ("redis://host:0", "names no host or port"),
        ("unix://", "names no socket"),
        (f"redis://host/{SECRET}", "database is not a number"),
        ("unix:///x?db=a", "database is not a number"),
        ("redis://host?ssl_ca_certs=/x", "allowed: none"),
        ("rediss://host?ssl_cert_reqs=none", "'ssl_cert_reqs' is unknown; allowed: ssl_ca_certs, "),
    ],
)
def test_a_bad_url_says_why_and_repeats_no_secret(url: str, reason: str) -> None:
    with pytest.raises(RedisUrlError, match=reason) as error:
        check_url(url)
    assert SECRET not in str(error.value)


@given(st.text(max_size=40))
def test_any_text_is_a_url_or_a_url_error(text: str) -> None:
    for url in (text, f"redis://{text}", f"unix://{text}"):
        try:
            settings = RedisSettings(url)
        except RedisUrlError:
            continue
        assert settings.name


def test_the_password_file_is_read_anew_and_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    monkeypatch.setenv(PASSWORD_VARIABLE, "from-environment")
    assert RedisSettings("redis://host").password() == "from-environment"
    settings = RedisSettings("redis://host", str(file))
    for text, password in (("one\n", "one"), ("two\r\n", "two"), (" spaces ", " spaces ")):
        file.write_text(text)
        assert settings.password() == password
    file.unlink()
    with pytest.raises(FileNotFoundError, match="password"):
        settings.password()
    file.write_bytes(b"\xff")
    with pytest.raises(OSError, match="no UTF-8"):
        settings.password()


def test_without_either_there_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert RedisSettings("redis://host").password() is None


def test_waits_grow_to_a_bound_differ_and_start_over() -> None:
    backoff = Backoff(first_s=0.5, most_s=10.0)
    waits_s = [backoff.next_s() for _ in range(12)]
    assert all(0.25 <= wait_s <= 10.0 for wait_s in waits_s)
    assert all(wait_s >= 5.0 for wait_s in waits_s[6:])
    assert len(set(waits_s)) == 12
    backoff.reset()
    assert backoff.next_s() <= 0.5
