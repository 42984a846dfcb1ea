"""Whole runs on real vLLM + LMCache on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import REPLAY_VOCAB_SIZE
from rich.console import Console

from efficient_lmcache.replay.compare import compare
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.rundir import RunRecord
from efficient_lmcache.replay.trace import Call, Manifest, TraceWriter

pytestmark = pytest.mark.integration

PROMPTS = 6
PROMPT_TOKENS = 1000
CHUNK_TOKENS = 128


@pytest.fixture(scope="module")
def runs(replay_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, RunRecord]]:
    """Six prompts, then the same six again, one after the other; the GPU holds one of them, the host tier all."""
    directory = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    calls = [Call(*(rng.integers(REPLAY_VOCAB_SIZE, size=n) for n in (PROMPT_TOKENS, 8)), 0.0) for _ in range(PROMPTS)]
    with TraceWriter(directory / "trace", Manifest(REPLAY_VOCAB_SIZE, "synthetic", "test")) as writer:
        for number, call in enumerate([*calls, *calls]):
            writer.write_task(f"task-{number}", [call])
    records = {}
    for connector in ("efficient", "lmcache"):
        options = RunOptions(
            trace=directory / "trace",
            model=replay_model,
            admission="none",
            host_gib=16 / 1024,
            active_pool=1,
            out=directory / connector,
            gpu_kv_tokens=12 * 128,
            chunk_tokens=CHUNK_TOKENS,
            connector=connector,
        )
        records[connector] = (options.out, run_replay(options, Console(quiet=True)))
    return records


def test_a_run_with_our_connector_is_exact_and_counts_what_moved(runs: dict[str, tuple[Path, RunRecord]]) -> None:
    _, record = runs["efficient"]
    assert (record.status, record.error) == ("complete", None)
    assert record.outputs_exact == record.calls == 2 * PROMPTS
    full_chunks = PROMPT_TOKENS // CHUNK_TOKENS
    assert record.stored_tokens_per_rank == PROMPTS * full_chunks * CHUNK_TOKENS
    assert record.restored_tokens_per_rank == PROMPTS * full_chunks * CHUNK_TOKENS
    assert record.computed_prefill_tokens == 2 * PROMPTS * PROMPT_TOKENS - PROMPTS * full_chunks * CHUNK_TOKENS
    assert record.decisions.total == 2 * PROMPTS
    assert record.decisions.declined == record.evicted_chunks_per_rank == 0
    assert record.gpu_kv_tokens == 12 * 128


def test_plain_offload_through_our_connector_equals_unmodified_lmcache(
    runs: dict[str, tuple[Path, RunRecord]],
) -> None:
    ours, theirs = runs["efficient"][1], runs["lmcache"][1]
    assert (theirs.status, theirs.error) == ("complete", None)
    for name in ("outputs_exact", "computed_prefill_tokens", "restored_tokens_per_rank", "stored_tokens_per_rank"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_the_runs_compare(runs: dict[str, tuple[Path, RunRecord]]) -> None:
    rows = compare([path for path, _ in runs.values()])
    assert [row["computed_prefill_tokens_to_offload"] for row in rows] == [1.0, 1.0]
