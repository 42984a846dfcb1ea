"""A whole run on two real engines that share a real LMCache server and a real Redis."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPLAY_VOCAB_SIZE
from rich.console import Console

from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.rundir import RunDirectory, RunRecord
from efficient_lmcache.replay.trace import Call, Manifest, TraceWriter

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 128
PROMPT_TOKENS = 1000
PAUSE_S = 8.0  # engines tell each other every three seconds what they saw


def write_trace(path: Path) -> None:
    """A task of one call; one of two, of which the second extends the first; after a pause, another of one call."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> Any:
        return rng.integers(REPLAY_VOCAB_SIZE, size=count)

    first = Call(tokens(PROMPT_TOKENS), tokens(8), 0.0)
    second = Call(np.concatenate((first.prompt_tokens, first.output_tokens, tokens(60))), tokens(8), 0.0)
    with TraceWriter(path, Manifest(REPLAY_VOCAB_SIZE, "synthetic", "test")) as writer:
        writer.write_task("alone", [Call(tokens(PROMPT_TOKENS), tokens(8), 0.0)])
        writer.write_task("crossing", [first, second])
        writer.write_task("late", [Call(tokens(PROMPT_TOKENS), tokens(8), PAUSE_S)])


@pytest.fixture(scope="module")
def run(replay_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunRecord]:
    if shutil.which("redis-server") is None:
        # CI must not pass by skipping.
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("no redis-server on PATH: apt-get install redis-server")
    directory = tmp_path_factory.mktemp("cluster")
    write_trace(directory / "trace")
    options = RunOptions(
        trace=directory / "trace",
        model=replay_model,
        admission="conditioned",
        host_gib=16 / 1024,
        active_pool=1,  # one call at a time, so that equally idle engines take turns
        out=directory / "run",
        gpu_kv_tokens=24 * 128,
        chunk_tokens=CHUNK_TOKENS,
        mode="server",
        engines=2,
    )
    return RunDirectory(options.out), run_replay(options, Console(quiet=True))


def test_outputs_are_exact_and_calls_take_turns(run: tuple[RunDirectory, RunRecord]) -> None:
    directory, record = run
    assert (record.status, record.error) == ("complete", None)
    assert record.outputs_exact == record.calls == 4
    rows = [json.loads(line) for line in directory.calls.read_text().splitlines()]
    assert [row["engine"] for row in rows] == [0, 1, 0, 1]


def test_an_engine_restores_what_another_one_stored(run: tuple[RunDirectory, RunRecord]) -> None:
    directory, record = run
    rows = [json.loads(line) for line in directory.calls.read_text().splitlines()]
    stored_tokens = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    assert [row["cached_tokens"] for row in rows] == [0, 0, stored_tokens, 0]
    assert [engine.restored_tokens_per_rank for engine in record.engines] == [stored_tokens, 0]
    assert record.restored_tokens_per_rank == stored_tokens


def test_the_servers_own_counters_are_the_records(run: tuple[RunDirectory, RunRecord]) -> None:
    """A chunk that several calls have is stored once."""
    _, record = run
    chunks = 3 * (PROMPT_TOKENS // CHUNK_TOKENS) + 1
    assert record.stored_tokens_per_rank == chunks * CHUNK_TOKENS
    assert (record.evicted_chunks_per_rank, record.dropped_chunks_per_rank) == (0, 0)


def test_a_decision_knows_of_tasks_that_only_the_other_engine_has_seen(run: tuple[RunDirectory, RunRecord]) -> None:
    directory, record = run
    rows = list(directory.decision_rows())
    assert record.decisions.total == len(rows) == 4
    assert [(row["task"], row["engine"]) for row in rows] == [
        ("alone", 0),
        ("crossing", 1),
        ("crossing", 0),
        ("late", 1),
    ]
    assert rows[-1]["estimate"]["active_pool"] == 3
