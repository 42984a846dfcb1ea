"""The server's command line and environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.server import ServerOptions, environment, serve_command


def options(**changed: Any) -> ServerOptions:
    fields: dict[str, Any] = {
        "model": Path("models/tiny"),
        "vocab_size": 16384,
        "connector": "efficient",
        "admission": "fixed",
        "host_gib": 0.25,
        "chunk_tokens": 256,
        "max_model_len_tokens": 1024,
        "bytes_per_token": 1024,
        "decision_log": Path("run/decisions.jsonl"),
        "metrics_dir": Path("metrics"),
        "block_tokens": 128,
        "gpu_kv_tokens": 4096,
        **changed,
    }
    return ServerOptions(**fields)


def value_of(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_our_connector_gets_its_admission_and_its_decision_log() -> None:
    command = serve_command(options(), 8123)
    assert command[1:5] == ["-m", "efficient_lmcache.cli", "serve", "models/tiny"]
    assert value_of(command, "--port") == "8123"
    assert json.loads(value_of(command, "--kv-transfer-config")) == {
        "kv_connector": "EfficientLMCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "efficient.admission": "fixed",
            "efficient.decision_log": "run/decisions.jsonl",
        },
    }


def test_lmcaches_own_connector_gets_no_option_of_ours() -> None:
    config = json.loads(value_of(serve_command(options(connector="lmcache"), 1), "--kv-transfer-config"))
    assert config == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def test_recomputing_has_no_connector_and_no_tier() -> None:
    assert value_of(serve_command(options(connector="none"), 1), "--kv-transfer-config") == "null"
    assert not {name for name in environment(options(connector="none"), {}) if name.startswith("LMCACHE_MAX")}


def test_the_gpu_cache_is_given_in_blocks_and_room_is_made_for_it() -> None:
    assert value_of(serve_command(options(gpu_kv_tokens=4224), 1), "--num-gpu-blocks-override") == "33"
    assert environment(options(gpu_kv_tokens=3 << 20), {})["VLLM_CPU_KVCACHE_SPACE"] == "3"
    left_to_vllm = options(gpu_kv_tokens=None)
    assert "--num-gpu-blocks-override" not in serve_command(left_to_vllm, 1)
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(left_to_vllm, {})


def test_limits_per_step_are_vllms_unless_given() -> None:
    assert "--max-num-batched-tokens" not in serve_command(options(), 1)
    command = serve_command(options(max_num_batched_tokens=512, max_num_seqs=3), 1)
    assert (value_of(command, "--max-num-batched-tokens"), value_of(command, "--max-num-seqs")) == ("512", "3")


def test_the_rules_thresholds_reach_the_connector() -> None:
    command = serve_command(options(admission="conditioned", write_threshold_chunks=4, occupancy_threshold=0.9), 1)
    extra = json.loads(value_of(command, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert (extra["efficient.write_threshold_chunks"], extra["efficient.occupancy_threshold"]) == (4, 0.9)


def test_a_deployment_of_several_gpus_is_served_as_such() -> None:
    assert "--tensor-parallel-size" not in serve_command(options(), 1)
    command = serve_command(options(tensor_parallel=8, gpu_memory_utilization=0.65, prefix_caching=False), 1)
    assert value_of(command, "--tensor-parallel-size") == "8"
    assert value_of(command, "--gpu-memory-utilization") == "0.65"
    assert "--no-enable-prefix-caching" in command
    assert "--enable-prefix-caching" not in command


def test_the_environment_fixes_what_would_make_runs_differ() -> None:
    variables = environment(
        options(), {"PATH": "bin", "LMCACHE_CHUNK_SIZE": "1", "LMCACHE_REMOTE_URL": "redis://other"}
    )
    assert variables["PATH"] == "bin"
    assert "LMCACHE_REMOTE_URL" not in variables
    assert variables["LMCACHE_CHUNK_SIZE"] == "256"
    assert variables["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "0.25"
    assert variables["EFFICIENT_LMCACHE_VOCAB_SIZE"] == "16384"
    assert variables["PYTHONHASHSEED"] == "0"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] != "auto"


def test_on_cpus_each_rank_has_its_share() -> None:
    """vLLM ends at start-up where the shares are not as many as the ranks."""

    def bound(ranks: int) -> str:
        return environment(options(tensor_parallel=ranks, cpus=(6, 0, 2)), {})["VLLM_CPU_OMP_THREADS_BIND"]

    assert [bound(ranks) for ranks in (1, 2, 4)] == ["0,2,6", "0,6|2", "0|2|6|0"]


def test_the_model_is_compiled_only_where_that_pays() -> None:
    assert "--enforce-eager" not in serve_command(options(), 1)
    assert "--enforce-eager" in serve_command(options(compile_model=False), 1)
