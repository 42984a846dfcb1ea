"""`telemetry watch` and `telemetry export` beside engines on a real Redis."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis_process import RedisProcess, wait_until
from rich.cells import cell_len
from telemetry_engine import TelemetryEngine

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "efficient_lmcache.cli", "telemetry"]
SECRET = "geheim-4711"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def engines(server: RedisProcess) -> Iterator[list[TelemetryEngine]]:
    engines = [TelemetryEngine(f"engine/{name}", server.url) for name in "ab"]
    for engine, tasks in zip(engines, ("12", "23"), strict=True):
        for task in tasks:
            engine.decide(task)
    wait_until(lambda: all(engine.pool == (3, 10_000, 2) for engine in engines), "the pool")
    yield engines
    for engine in engines:
        engine.close()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80", **environment},
    )


def test_watch_prints_the_table_or_json_once(server, engines):
    result = run("watch", "--redis", server.url, "--once")
    assert (result.returncode, result.stderr) == (0, "")
    assert max(map(cell_len, result.stdout.splitlines())) <= 80
    rows = [line.split() for line in result.stdout.splitlines() if line.split()]
    assert [row[:7] for row in rows if row[0].startswith("engine/")] == [
        ["engine/a", "0", "100%", "7", "no", "2", "10,000"],
        ["engine/b", "0", "100%", "7", "no", "2", "10,000"],
    ]
    assert ["pool", "of", "2", "100%", "14", "0", "of", "2", "3", "10,000"] in rows
    record = json.loads(run("watch", "--redis", server.url, "--json").stdout)
    assert (record["schema"], record["pool"]["active_tasks"]) == ("efficient-lmcache-cluster/1", 3)
    assert [row["engine"] for row in record["engines"]] == ["engine/a", "engine/b"]
    nobody = json.loads(run("watch", "--redis", server.url, "--json", "--deployment", "other").stdout)
    assert nobody["engines"] == []


def test_watch_follows_in_a_terminal_until_ctrl_c(server, engines):
    pid, terminal = pty.fork()
    if pid == 0:
        # Where the tests run in the background of a shell it is ignored, and would stay so.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [*COMMAND, "watch", "--redis", server.url])
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        while select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 65536)
        return text in shown

    wait_until(lambda: shows(b"engine/b"), "the table")
    shown = b""
    server.kill()
    wait_until(lambda: shows(b"trying again"), "the lost connection")
    server.restart()
    shown = b""
    wait_until(lambda: shows(b"pool of 2"), "the engines")
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_export_serves_who_is_alive_and_stops_when_told(server, engines, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Which hears IPv4, too.
    arguments = ["export", "--redis", server.url, "--port", str(port), "--address", "::", "--max-age", "2"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert f"http://[::]:{port}/metrics" in process.stderr.readline()

            def scrape() -> dict[str, list[tuple[dict[str, str], float]]]:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
                    text = response.read().decode()
                prefix = "efficient_lmcache:cluster_"
                return {
                    family.name.removeprefix(prefix): [(sample.labels, sample.value) for sample in family.samples]
                    for family in text_string_to_metric_families(text)
                }

            def alive() -> list[str]:
                return [labels["engine"] for labels, _ in scrape()["tier_occupancy_ratio"]]

            wait_until(lambda: alive() == ["engine/a", "engine/b"])
            metrics = scrape()
            assert metrics["pool_active_tasks"] == [({"deployment": "default"}, 3.0)]
            assert metrics["redis_up"][0][1] == 1.0
            taken = run("export", "--redis", server.url, "--port", str(port), "--address", "127.0.0.1")
            assert (taken.returncode, taken.stderr.splitlines()[-1]) == (
                2,
                f"error: cannot listen on 127.0.0.1:{port} (Address already in use)",
            )
            engines[0].close()
            wait_until(lambda: alive() == ["engine/b"])
            server.hang()  # nobody withdraws: the rest fades
            wait_until(lambda: alive() == [] and scrape()["pool_engines"][0][1] == 0.0)
            server.go_on()
            wait_until(lambda: alive() == ["engine/b"])
            server.kill()
            wait_until(lambda: scrape()["redis_up"][0][1] == 0.0)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_an_engine_is_not_asked_for_after_it_is_forgotten(server):
    result = run("watch", "--redis", server.url, "--once", "--max-age", "61")
    assert result.returncode == 2
    assert "--max-age" in result.stderr


def test_what_a_user_can_do_wrong_is_one_line(server, tmp_path):
    server.cli("config", "set", "requirepass", SECRET)
    nowhere = "redis://127.0.0.1:1"
    for arguments, environment, reason in (
        (["watch", "--redis", nowhere, "--once"], {}, f"{nowhere}: Error 111 connecting to 127.0.0.1:1"),
        (["watch", "--redis", "http://x", "--once"], {}, "scheme is none of redis, rediss, unix"),
        (["watch", "--redis", f"redis://:{SECRET}@x", "--once"], {}, "holds a password"),
        (["watch", "--redis", nowhere, "--deployment", "a*"], {}, "deployment is 'a*'"),
        (["watch", "--redis", nowhere, "--redis-password-file", str(tmp_path / "none")], {}, "No such file"),
        (["watch", "--redis", server.url, "--once"], {}, "uthentication required"),
        (
            ["watch", "--redis", server.url, "--once"],
            {"EFFICIENT_LMCACHE_REDIS_PASSWORD": "x" + SECRET},
            "invalid username-password pair",
        ),
    ):
        start_s = time.monotonic()
        result = run(*arguments, **environment)
        assert (result.returncode, result.stdout) == (2, ""), result
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert reason in result.stderr, time.monotonic() - start_s
        assert SECRET not in result.stderr
