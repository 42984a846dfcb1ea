"""Fixtures that start real vLLM: one server serves a whole module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_server_process import LMCacheServer

from efficient_lmcache.replay.server import Server, ServerOptions, environment, free_port, serve_command

REPLAY_VOCAB_SIZE = 2048


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with the vocabulary of `engine.VOCABULARY`, for scenarios in fresh processes."""
    pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")
    directory = tmp_path_factory.mktemp("scenarios") / "model"
    command = [sys.executable, "-m", "efficient_lmcache.cli", "model", "create", str(directory), "--vocab", "4096"]
    subprocess.run(command, check=True)
    return str(directory)


@pytest.fixture
def lmcache_server(tmp_path: Path) -> Iterator[LMCacheServer]:
    """One whose L1 a few prompts fill."""
    server = LMCacheServer(tmp_path, l1_mib=24)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def replay_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, or a skip where vLLM is not installed."""
    pytest.importorskip("vllm")
    from efficient_lmcache.replay.model import create_model

    return create_model(tmp_path_factory.mktemp("replay") / "model", vocab_size=REPLAY_VOCAB_SIZE)


@pytest.fixture(scope="module")
def recompute_server(replay_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM without a connector, with so little KV (11 blocks) and so few tokens per step that prompts are prefilled in
    chunks and growing outputs preempt one another."""
    directory = tmp_path_factory.mktemp("server")
    metrics_dir = directory / "metrics"
    metrics_dir.mkdir()
    options = ServerOptions(
        model=replay_model,
        vocab_size=REPLAY_VOCAB_SIZE,
        connector="none",
        admission="recompute",
        host_gib=0.0,
        chunk_tokens=256,
        max_model_len_tokens=1152,
        bytes_per_token=1024,
        decision_log=directory / "decisions.jsonl",
        metrics_dir=metrics_dir,
        block_tokens=128,
        gpu_kv_tokens=12 * 128,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    port = free_port()
    variables = environment(options, os.environ)
    with Server(serve_command(options, port), variables, port, directory / "server.log") as server:
        server.wait_until_ready(600.0)
        yield server
