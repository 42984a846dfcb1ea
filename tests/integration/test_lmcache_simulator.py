"""Our curve on a real LMCache server's lookup-hash log is what LMCache's own simulator computes, at every capacity."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fresh_process import run

from efficient_lmcache.core.references import References
from efficient_lmcache.replay.server import free_port
from efficient_lmcache.sizing.streams import open_stream

pytest.importorskip("lmcache")
pytest.importorskip("numba", reason="needs the extra sizing")
pytestmark = pytest.mark.integration

CHUNK_TOKENS = 256
LOOKUPS = 200
# Of a model with 320 KiB per token: then LMCache's default sweep, 0.5 to 500 GiB, is from 6 to 6,400 chunks.
BYTES_PER_CHUNK = CHUNK_TOKENS * 320 * 1024
DEFAULT_SWEEP = (0.5, 500.0, 30)  # GiB, GiB, points
START_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server logged of agents' lookups, and their client's own count."""
    directory = tmp_path_factory.mktemp("lookups")
    port, options = free_port(), {"--host": "localhost", "--supported-transfer-mode": "auto"}
    options |= {"--port": str(port), "--http-port": str(free_port()), "--prometheus-port": str(free_port())}
    options |= {"--l1-size-gb": "0.25", "--eviction-policy": "LRU", "--chunk-size": str(CHUNK_TOKENS)}
    options |= {"--lookup-hash-log-dir": str(directory / "log")}
    arguments = [argument for option in options.items() for argument in option]
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server", *arguments]
    with (directory / "server.log").open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONHASHSEED": "0"})
        try:
            _wait_for_port(server, port, directory / "server.log")
            sent = run("lookup_client:send_lookups", url=f"tcp://localhost:{port}", agents=6, turns=LOOKUPS)
        finally:
            server.terminate()  # which flushes the log
            server.wait(60)
    assert sent["lookups"] == LOOKUPS
    assert sent["found_chunks"] > LOOKUPS, "the client is to store, and the server to find again"
    return directory / "log"


def test_the_log_is_read_as_the_client_sent_it(log: Path) -> None:
    stream = open_stream(log)
    references = References.concatenate(stream)
    assert stream.chunk_tokens == CHUNK_TOKENS
    assert len(references) == LOOKUPS
    assert (references.lookup_chunks == references.prompt_tokens // CHUNK_TOKENS).all()
    assert (references.start_s[1:] >= references.start_s[:-1]).all()


def test_token_hit_rates_equal_those_of_lmcaches_simulator(log: Path) -> None:
    from lmcache.tools.cache_simulator.plot_hit_rate import capacity_range_bytes
    from lmcache.tools.cache_simulator.simulator import load_lookup_events, simulate

    from efficient_lmcache.core.coverage import capacity_curve
    from efficient_lmcache.core.stackdistance import PromotionOrder

    curve = capacity_curve(open_stream(log), order=PromotionOrder.HEAD_FIRST)
    events = load_lookup_events([log])
    assert len(events) == LOOKUPS
    capacities_bytes = capacity_range_bytes(*DEFAULT_SWEEP)
    theirs = [simulate(events, capacity, BYTES_PER_CHUNK, fast=True)["token_hit_rate"] for capacity in capacities_bytes]
    ours = [curve.at(max(1, capacity // BYTES_PER_CHUNK))[0] / curve.prompt_tokens for capacity in capacities_bytes]
    assert ours == theirs
    assert len(set(theirs)) > 10, "the sweep must cross the transition"


def _wait_for_port(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and server.poll() is None:
        try:
            socket.create_connection(("localhost", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the LMCache server did not listen on port {port}:\n{log.read_text()[-3000:]}")
