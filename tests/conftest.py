"""Fixtures of all tests, and an environment in which vLLM and LMCache are quiet, offline and agree on hashes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]

# Before anything imports vLLM or LMCache, and inherited by the servers that tests start.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

# No test asserts a time: on a busy machine an example of milliseconds takes longer than hypothesis' default deadline.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real traces and paper tables: EFFICIENT_LMCACHE_DATA, else `../shared`."""
    path = Path(os.environ.get("EFFICIENT_LMCACHE_DATA", ROOT / ".." / "shared")).resolve()
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set EFFICIENT_LMCACHE_DATA")
    return path


@dataclass(frozen=True)
class RedisServer:
    url: str
    process: subprocess.Popen[bytes]


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real, empty redis-server on a free port; tests may kill its process."""
    if shutil.which("redis-server") is None:
        # CI must not pass by skipping.
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("no redis-server on PATH: apt-get install redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with (tmp_path / "redis.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_for_port(process, port, tmp_path / "redis.log")
            yield RedisServer(f"redis://127.0.0.1:{port}", process)
        finally:
            process.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"redis-server did not listen on port {port}:\n{log.read_text()}")
