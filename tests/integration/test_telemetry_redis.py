"""The outbox and the feed on a real Redis: what arrives, how one logs in, and what Redis keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from redis_process import RedisProcess, make_certificates, wait_until

from efficient_lmcache.core.observation import HASH_RANGE, Observation
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import observation, redis_keys, report
from efficient_lmcache.telemetry.cluster import ClusterView
from efficient_lmcache.telemetry.redis_feed import RedisFeed
from efficient_lmcache.telemetry.redis_outbox import RedisOutbox
from efficient_lmcache.telemetry.redis_settings import PASSWORD_VARIABLE, RedisSettings

pytestmark = pytest.mark.integration

SECRET = "geheim-4711"
REPORT = TierReport("engine/1", 1, 256, 262_144, 90, 100, 3, 40)
SEEN = Observation("engine/1", 1, 60.0, (1, 2), HASH_RANGE, 4, 4, 400)
TIER = redis_keys.tier_key("default", "engine/1", 0)
POOL = redis_keys.pool_key("default", "engine/1")
ACL = {
    "engines": "~efficient-lmcache:default:* &efficient-lmcache:default:tier:* &efficient-lmcache:default:pool:* "
    "+@connection +get +set +del +exists +expire +sadd +srem +smembers +publish +getrange +pttl +subscribe +psubscribe",
    "watchers": "%R~efficient-lmcache:default:* &efficient-lmcache:default:tier:* &efficient-lmcache:default:pool:* "
    "+@connection +smembers +getrange +pttl +psubscribe",
}


class Ends:
    """Outboxes and feeds that are closed with their test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def outbox(self, settings: RedisSettings, deployment: str = "default") -> RedisOutbox:
        outbox = RedisOutbox(settings, deployment)
        self._stack.callback(outbox.close)
        return outbox

    def view(self, settings: RedisSettings, deployment: str = "default") -> ClusterView:
        view = ClusterView()
        feed = RedisFeed(settings, deployment, redis_keys.all_of(deployment), view.receive)
        self._stack.callback(feed.close)
        assert feed.wait(30.0), feed.error
        return view


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RedisProcess]]:
    with ExitStack() as stack:

        def started(*arguments: str, **options: bool) -> RedisProcess:
            server = RedisProcess(tmp_path, *arguments, **options)
            stack.callback(server.kill)
            return server

        yield started


@pytest.fixture
def ends(start: object) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


def publish(outbox: RedisOutbox, sequence: int = 1) -> None:
    outbox.put(TIER, report.encode(replace(REPORT, sequence=sequence)))
    outbox.put(POOL, observation.encode(replace(SEEN, sequence=sequence)))


def arrived(view: ClusterView, sequence: int = 1) -> bool:
    seen = view.tiers(60.0) + view.observations(60.0)  # type: ignore[operator]
    return [message.sequence for message in seen] == [sequence] * 2


def test_messages_reach_who_listens_and_who_comes_later(start, ends):
    server = start()
    early, outbox = ends.view(server.settings()), ends.outbox(server.settings())
    publish(outbox)
    wait_until(lambda: arrived(early))
    assert replace(early.tiers(60.0)[0], received_s=REPORT.received_s) == REPORT
    late = ends.view(server.settings())
    assert arrived(late)
    publish(outbox, 2)
    wait_until(lambda: arrived(early, 2) and arrived(late, 2))
    outbox.close()
    wait_until(lambda: not early.tiers(60.0) and not early.observations(60.0))
    assert server.cli("--scan").split() == ["efficient-lmcache:default:salt"]


def test_a_last_value_is_as_old_as_redis_says(start, ends):
    server = start()
    publish(ends.outbox(server.settings()))
    wait_until(lambda: server.cli("exists", POOL) == "1")
    server.cli("pexpire", TIER, "21000")  # as after 9 of 30 seconds
    view = ends.view(server.settings())
    assert [len(view.tiers(max_age_s)) for max_age_s in (8.9, 30.0)] == [0, 1]
    assert len(view.observations(5.0)) == 1


def test_deployments_do_not_hear_each_other(start, ends):
    server = start()
    views = [ends.view(server.settings(), deployment) for deployment in ("a", "ab")]
    key = redis_keys.tier_key("a", "engine/1", 0)
    ends.outbox(server.settings(), "a").put(key, report.encode(REPORT))
    wait_until(lambda: views[0].tiers(60.0))
    assert (views[1].tiers(60.0), views[1].bad_messages) == ([], 0)


def test_everything_expires_and_dead_engines_leave_the_index(start, ends):
    server = start()
    server.cli("sadd", "efficient-lmcache:default:index", "efficient-lmcache:default:tier:dead:0")
    outbox = ends.outbox(server.settings())
    publish(outbox)
    wait_until(lambda: server.cli("exists", POOL) == "1")
    assert set(server.cli("smembers", "efficient-lmcache:default:index").split()) == {TIER, POOL}
    for key in server.cli("--scan").split():
        assert int(server.cli("ttl", key)) > 0, key


def test_engines_agree_on_a_salt_and_after_a_flush_on_another(start, ends):
    server = start()
    outboxes = [ends.outbox(server.settings()) for _ in range(3)]
    wait_until(lambda: all(outbox.salt for outbox in outboxes))
    first = {outbox.salt for outbox in outboxes}
    assert len(first) == 1
    server.cli("flushall")
    for outbox in outboxes:
        publish(outbox)
    wait_until(lambda: first.isdisjoint(outbox.salt for outbox in outboxes))
    assert len({outbox.salt for outbox in outboxes}) == 1


def test_a_redis_without_memory_left_still_tells_who_listens(start, ends, caplog):
    server = start()
    view, outbox = ends.view(server.settings()), ends.outbox(server.settings())
    wait_until(lambda: outbox.salt)
    server.cli("config", "set", "maxmemory", "1")
    publish(outbox)
    wait_until(lambda: arrived(view))
    assert [("maxmemory" in record.getMessage()) for record in caplog.records] == [True]
    server.cli("config", "set", "maxmemory", "0")
    publish(outbox, 2)
    wait_until(lambda: arrived(view, 2) and len(caplog.records) == 2)
    assert "works again" in caplog.records[-1].getMessage()


def test_a_master_that_becomes_a_replica_is_left_for_whoever_has_its_address_next(start, ends, caplog):
    server = start()
    view, outbox = ends.view(server.settings()), ends.outbox(server.settings())
    wait_until(lambda: outbox.salt)
    server.cli("replicaof", "127.0.0.1", "1")
    client = outbox._client
    publish(outbox)
    wait_until(lambda: arrived(view))
    wait_until(lambda: caplog.records)
    assert "read only replica" in caplog.records[0].getMessage()
    server.cli("replicaof", "no", "one")
    publish(outbox, 2)
    wait_until(lambda: server.cli("exists", TIER) == "1" and len(caplog.records) == 2)
    assert outbox._client is not client


def test_the_documented_permissions_suffice_and_watchers_cannot_write(start, ends, tmp_path):
    server = start()
    (tmp_path / "password").write_text(SECRET + "\n")
    for user, rules in ACL.items():
        assert server.cli("acl", "setuser", user, "on", f">{SECRET}", *rules.split()) == "OK"
    documentation = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    assert all(rules in documentation for rules in ACL.values())
    server.cli("acl", "setuser", "default", "off")

    def settings(user: str) -> RedisSettings:
        return RedisSettings(f"redis://{user}@127.0.0.1:{server.port}", str(tmp_path / "password"))

    outbox = ends.outbox(settings("engines"))
    views = [ends.view(settings(user)) for user in ACL]
    publish(outbox)
    wait_until(lambda: all(arrived(view) for view in views))
    late = [ends.view(settings(user)) for user in ACL]
    assert all(arrived(view) for view in late)
    outbox.close()
    wait_until(lambda: not views[0].tiers(60.0))
    login = ("--no-auth-warning", "--user", "watchers", "--pass", SECRET)
    assert "NOPERM" in server.cli("set", TIER, "forged", login=login)
    assert "NOPERM" in server.cli("publish", TIER, "forged", login=login)


def test_tls_is_verified(start, ends, tmp_path, caplog):
    authority, certificate, key = make_certificates(tmp_path)
    files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authority]
    server = start(*map(str, files), "--tls-auth-clients", "no", tls=True)
    trusted = RedisSettings(f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={authority}")
    view, outbox = ends.view(trusted), ends.outbox(trusted)
    publish(outbox)
    wait_until(lambda: arrived(view))
    assert caplog.records == []
    for url in (f"rediss://127.0.0.1:{server.port}", f"rediss://localhost:{server.port}?ssl_ca_certs={authority}"):
        feed = RedisFeed(RedisSettings(url), "default", ["x*"], view.receive)
        assert not feed.wait(30.0)
        assert feed.error is not None
        assert "certificate verify failed" in feed.error
        feed.close()


def test_a_unix_socket_and_another_database(start, ends):
    server = start()
    settings = RedisSettings(f"unix://{server.socket}?db=3")
    view, outbox = ends.view(settings), ends.outbox(settings)
    publish(outbox)
    wait_until(lambda: arrived(view))
    assert server.cli("-n", "3", "exists", TIER) == "1"


def test_a_wrong_password_is_said_once_and_never_repeated(start, ends, monkeypatch, caplog):
    server = start("--requirepass", SECRET)
    monkeypatch.setenv(PASSWORD_VARIABLE, "wrong-" + SECRET)
    outbox = ends.outbox(server.settings())
    feed = RedisFeed(server.settings(), "default", ["x*"], lambda *_: None)
    assert not feed.wait(30.0)
    wait_until(lambda: len(caplog.records) == 2)
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    wait_until(lambda: outbox.salt and feed.connected)
    wait_until(lambda: len(caplog.records) == 4)
    feed.close()
    text = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "invalid username-password pair" in text
    assert SECRET not in text
    assert SECRET not in repr(server.settings()) + repr(vars(outbox)) + repr(vars(feed))
