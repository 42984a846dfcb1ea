"""What becomes of decisions, logs and threads when Redis or a part of telemetry fails (docs/telemetry.md)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from network_namespace import network_namespace
from redis_process import RedisProcess, wait_until
from telemetry_engine import TelemetryEngine, files_run_by_a_lookup, telemetry_threads

from efficient_lmcache.connector.options import parse_options
from efficient_lmcache.connector.telemetry import worker_sink
from efficient_lmcache.telemetry import redis_keys
from efficient_lmcache.telemetry.local import LocalSource

pytestmark = pytest.mark.integration

SECRET = "geheim-4711"
# What decides, and what only hands over attributes. No socket, no lock, no file, no thread, no Redis client.
DECIDING = {
    "admission.py",
    "vllm_adapter.py",
    "workingset.py",
    "tier.py",
    "copy.py",
    "copyreg.py",
    "enum.py",
    "telemetry_engine.py",
    "test_telemetry_faults.py",
    "<string>",
    "<lambda>",
}
EXPECTED_THREADS = Counter({"reports": 2, "feed": 2, "outbox": 4, "pool": 2, "telemetry": 2})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    yield server
    server.go_on()
    server.kill()


@pytest.fixture
def engines(server: RedisProcess) -> Iterator[tuple[TelemetryEngine, TelemetryEngine]]:
    """Two engines that know each other: one served tasks 1 and 2, the other 2 and 3."""
    pair = TelemetryEngine("engine/a", server.url), TelemetryEngine("engine/b", server.url)
    serve(pair)
    wait_until(lambda: all(engine.pool == (3, 15_000, 2) for engine in pair), "the pool")
    yield pair
    server.go_on()
    for engine in pair:
        engine.close()
    assert telemetry_threads() == []


def serve(pair: Sequence[TelemetryEngine]) -> None:
    for engine, tasks, prompt_tokens in zip(pair, ("12", "23"), (10_000, 20_000), strict=True):
        for task in tasks:
            engine.decide(task, prompt_tokens)


def threads() -> Counter[str]:
    return Counter(name.removeprefix("efficient-lmcache-") for name in telemetry_threads())


def assert_decisions_go_on(engine: TelemetryEngine, fresh: bool = True) -> None:
    """The tier is full and evicting, and the working set is above it as soon as enough tasks are active."""
    assert files_run_by_a_lookup(engine) <= DECIDING
    decision = engine.decide("1")
    assert (decision.report_fresh, decision.full_and_evicting) == (fresh, True if fresh else None)
    assert decision.estimate.active_pool >= 2


def lines(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if all(word in record.getMessage() for word in words)]


def assert_said_once(caplog: pytest.LogCaptureFixture, both_ways: bool) -> None:
    """Four outboxes (each engine has a worker and a scheduler) and two feeds: a line each, and one when it works."""
    assert (len(lines(caplog, "Publishing", "failed")), len(lines(caplog, "Hearing", "failed"))) == (4, 2)
    assert len(lines(caplog, "works again")) == (6 if both_ways else 0)


def test_redis_killed_and_back(server, engines, caplog):
    server.kill()
    wait_until(lambda: all(engine.pool[2] == 1 for engine in engines), "local knowledge")
    assert [engine.pool[0] for engine in engines] == [2, 2]
    for engine in engines:
        assert_decisions_go_on(engine)
        assert engine.stats.gauges["telemetry_redis_up"] == 0
    wait_until(lambda: len(caplog.records) >= 6)
    assert threads() == EXPECTED_THREADS
    assert_said_once(caplog, both_ways=False)
    server.restart()
    serve(engines)
    wait_until(lambda: all(engine.pool[2] == 2 for engine in engines), "the pool")
    wait_until(lambda: len(caplog.records) >= 12)
    assert_said_once(caplog, both_ways=True)
    assert threads() == EXPECTED_THREADS


def test_redis_hanging(server, engines, caplog):
    server.hang()
    wait_until(lambda: all(engine.pool[2] == 1 for engine in engines), "local knowledge")
    for engine in engines:
        assert_decisions_go_on(engine)
    wait_until(lambda: len(caplog.records) >= 6)
    assert threads() == EXPECTED_THREADS
    for engine in engines:
        assert_decisions_go_on(engine)
    server.go_on()
    wait_until(lambda: all(engine.pool[2] == 2 for engine in engines), "the pool")
    wait_until(lambda: len(caplog.records) >= 12)
    assert_said_once(caplog, both_ways=True)


def test_the_network_cut(tmp_path, caplog):
    """Nothing answers, and nothing says that it will not."""
    with network_namespace() as elsewhere:
        server = RedisProcess(tmp_path, host=elsewhere.address, prefix=elsewhere.prefix)
        pair: list[TelemetryEngine] = []
        try:
            pair.extend(TelemetryEngine(name, server.url) for name in ("engine/a", "engine/b"))
            serve(pair)
            wait_until(lambda: all(engine.pool == (3, 15_000, 2) for engine in pair), "the pool")
            elsewhere.cut_the_cable()
            wait_until(lambda: all(engine.pool[2] == 1 for engine in pair), "local knowledge")
            for engine in pair:
                assert_decisions_go_on(engine)
            wait_until(lambda: len(caplog.records) >= 6)
            assert threads() == EXPECTED_THREADS
            elsewhere.mend_the_cable()
            wait_until(lambda: all(engine.pool[2] == 2 for engine in pair), "the pool")
            wait_until(lambda: len(caplog.records) >= 12)
            assert_said_once(caplog, both_ways=True)
        finally:
            for engine in pair:
                engine.close()
            server.kill()


def test_redis_flushed(server, engines, caplog):
    server.cli("flushall")
    wait_until(lambda: len(server.cli("--scan").split()) == 6, "the keys")
    wait_until(lambda: all(engine.pool[0] == 3 for engine in engines), "one salt")
    for engine in engines:
        assert_decisions_go_on(engine)
    assert caplog.records == []


def test_the_password_changed(server, tmp_path, caplog):
    file = tmp_path / "password"
    file.write_text(SECRET)
    server.cli("config", "set", "requirepass", SECRET)
    login = ("--no-auth-warning", "-a", SECRET + "-2")
    pair = [TelemetryEngine(name, server.url, **{"telemetry.redis_password_file": str(file)}) for name in ("a", "b")]
    try:
        serve(pair)
        wait_until(lambda: all(engine.pool[0] == 3 for engine in pair), "the pool")
        server.cli("config", "set", "requirepass", SECRET + "-2", login=("--no-auth-warning", "-a", SECRET))
        for kind in ("normal", "pubsub"):
            server.cli("client", "kill", "type", kind, login=login)
        wait_until(lambda: len(lines(caplog, "WRONGPASS")) + len(lines(caplog, "invalid username-password")) >= 6)
        wait_until(lambda: all(engine.pool[2] == 1 for engine in pair), "local knowledge")
        for engine in pair:
            assert_decisions_go_on(engine)
        file.write_text(SECRET + "-2")
        wait_until(lambda: all(engine.pool[2] == 2 for engine in pair), "the pool")
        wait_until(lambda: len(lines(caplog, "works again")) == 6)
    finally:
        for engine in pair:
            engine.close()
    # Being thrown out and being refused are two kinds of failure.
    assert len(caplog.records) <= 6 * 3
    assert SECRET not in caplog.text


def test_a_password_file_that_goes_missing_costs_a_worker_its_redis_only(server, tmp_path, caplog):
    options = {
        "efficient.telemetry.transport": "redis",
        "efficient.telemetry.redis_url": server.url,
        "efficient.telemetry.redis_password_file": str(tmp_path / "missing"),
    }
    sink = worker_sink(parse_options(options), "engine/a")
    assert sink is not None
    sink.publish(b"report")
    assert LocalSource("engine/a").latest() == b"report"
    wait_until(lambda: len(lines(caplog, "FileNotFoundError", "missing")) == 1)
    (tmp_path / "missing").write_text("")
    wait_until(lambda: lines(caplog, "works again"))
    sink.close()


def test_garbage_and_oversized_messages(server, engines, caplog):
    forged = redis_keys.pool_key("default", "forged")
    own_tier = redis_keys.tier_key("default", "engine/a", 0)
    for _ in range(5):
        server.cli("publish", forged, "garbage")
        server.cli("publish", own_tier, "\x01")
        server.cli("eval", "return redis.call('publish', KEYS[1], string.rep('x', 3000000))", "1", forged)
    server.cli("eval", "return redis.call('set', KEYS[1], string.rep('x', 3000000))", "1", forged)
    no_string = redis_keys.pool_key("default", "no-string")
    server.cli("hset", no_string, "field", "value")
    server.cli("sadd", "efficient-lmcache:default:index", forged, no_string, "efficient-lmcache:default:pool:", "else")
    heard = [engine.stats.counts for engine in engines]
    wait_until(lambda: [counts.get("telemetry_bad_messages", 0) for counts in heard] == [15, 10])
    wait_until(lambda: all(engine.pool == (3, 15_000, 2) for engine in engines), "the pool")
    for engine in engines:
        assert_decisions_go_on(engine)
    assert len(caplog.records) == 2
    late = TelemetryEngine("engine/c", server.url)
    try:  # what lies in Redis is cut off before it travels
        wait_until(lambda: late.stats.counts.get("telemetry_bad_messages") == 1 and late.pool[2] == 3)
    finally:
        late.close()


def test_clocks_an_hour_apart(server, engines, caplog):
    """A third engine in a process whose every clock is an hour ahead."""
    code = """
import time
for name in ("time", "monotonic", "perf_counter"):
    setattr(time, name, lambda real=getattr(time, name): real() + 3600.0)
from telemetry_engine import TelemetryEngine
engine = TelemetryEngine("engine/hour-ahead", "URL", report_max_age_s=5.0)
for task in "34":
    engine.decide(task, 30_000)
while engine.pool != (4, 20_000, 3):
    time.sleep(0.05)
print(engine.pool, flush=True)
input()  # one more decision would change what the others wait for
print(engine.decide("4").report_fresh, flush=True)
engine.close()
""".replace("URL", server.url)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        wait_until(lambda: all(engine.pool == (4, 20_000, 3) for engine in engines), "the third engine")
        assert process.stdout.readline() == "(4, 20000.0, 3)\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
    wait_until(lambda: all(engine.pool == (3, 15_000, 2) for engine in engines), "its withdrawal")
    assert process.returncode == 0
    assert caplog.records == []


def test_a_dead_publisher_leaves_the_estimate_alone(engines):
    first, other = engines
    first.publisher.close()  # the thread ends, as it would with its process
    wait_until(lambda: not first.decide("1").report_fresh, "a stale report")
    assert_decisions_go_on(first, fresh=False)
    assert_decisions_go_on(other)
    wait_until(lambda: all(engine.pool[2] == 2 for engine in engines), "the pool, which needs no tier reports")


def test_a_dead_observer_lets_its_engine_fade_from_the_pool(engines):
    first, other = engines
    first.telemetry._pool.close()
    wait_until(lambda: other.pool == (2, 20_000, 1))
    assert_decisions_go_on(first)
    waiting = first.telemetry.lookups
    assert waiting.maxlen is not None
    assert len(waiting) == 2


def test_an_engine_that_is_killed_leaves_no_thread_waiting(server, engines):
    """Redis hangs while everything stops: nobody waits for it longer than its time-outs."""
    server.hang()
    closing = [threading.Thread(target=engine.close) for engine in engines]
    for thread in closing:
        thread.start()
    wait_until(lambda: telemetry_threads() == [] and not any(thread.is_alive() for thread in closing), "the threads")
