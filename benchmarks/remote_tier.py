"""What a decision per tier is worth: agents that overflow the CPU tier and fit into Redis, under three policies.

    python benchmarks/remote_tier.py [--agents 12] [--turns 8] [--cpu-mib 8] [--redis-mib 256]

    none        plain LMCache: what is computed goes to both tiers, and what Redis restores stays in the CPU tier
    one         `conditioned`, one decision for both tiers: what the CPU tier declines, Redis does not get either
    per tier    `conditioned`, a decision for each tier

A real vLLM engine on whatever device is there, a real LMCache and a real redis-server, all of them fresh for every
policy. Agents whose prompts grow take turns in the same random order. Counts, not times: tokens, and chunks that the
CPU tier evicted and that were read from Redis.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 256
FIRST_CHUNKS, GROWTH_CHUNKS = 6, 1
POLICIES = ("none", "one", "per tier")
COLUMNS = ("computed", "restored", "stored", "evicted chunks", "Redis holds MiB", "Redis reads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8, help="of each agent")
    parser.add_argument("--cpu-mib", type=float, default=8.0)
    parser.add_argument("--redis-mib", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", choices=POLICIES, help=argparse.SUPPRESS)
    parser.add_argument("--redis-url", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.policy is not None:
        print("RESULT " + json.dumps(serve(arguments)), flush=True)
        os._exit(0)  # LMCache's threads would keep the interpreter from ending
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        command = [sys.executable, "-m", "efficient_lmcache.cli", "model", "create", str(model), "--vocab", "4096"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = {policy: _run(policy, str(model), arguments.redis_mib) for policy in POLICIES}
    _print(results)


def _run(policy: str, model: str, redis_mib: int) -> dict[str, float]:
    """One policy in a process of its own, as a process can start only one LMCache engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    limits = ["--maxmemory", f"{redis_mib}mb", "--maxmemory-policy", "allkeys-lru", "--save", ""]
    redis_server = subprocess.Popen(
        ["redis-server", "--bind", "127.0.0.1", "--port", str(port), *limits], stdout=subprocess.DEVNULL
    )
    try:
        inner = ["--policy", policy, "--redis-url", f"redis://127.0.0.1:{port}", "--model", model]
        process = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], *inner],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        redis_server.kill()
        redis_server.wait()
    for line in process.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line[len("RESULT ") :]))
    sys.exit(f"{policy} failed:\n{process.stdout[-4000:]}")


def serve(arguments: argparse.Namespace) -> dict[str, float]:
    """All turns under one policy; what it computed, moved and kept."""
    import redis

    llm = _engine(arguments)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if arguments.policy == "one":
        scheduler.connector._admission._remote = None
    client = redis.Redis.from_url(arguments.redis_url)
    choice = random.Random(arguments.seed)
    prompts = [_random_tokens(choice, FIRST_CHUNKS * CHUNK_TOKENS + 20) for _ in range(arguments.agents)]
    turns = [agent for agent in range(arguments.agents) for _ in range(arguments.turns)]
    choice.shuffle(turns)
    prompt_tokens = 0
    for agent in turns:
        prompt_tokens += len(prompts[agent])
        prompts[agent] += _ask(llm, agent, prompts[agent]) + _random_tokens(choice, GROWTH_CHUNKS * CHUNK_TOKENS)
        time.sleep(0.3)  # a tool runs; LMCache writes to Redis meanwhile, and reports travel
    metrics = _metrics()
    return {
        "computed": prompt_tokens - metrics["vllm:prefix_cache_hits"] - metrics["vllm:external_prefix_cache_hits"],
        "restored": metrics["efficient_lmcache:restored_tokens"],
        "stored": metrics["efficient_lmcache:stored_tokens"],
        "evicted chunks": metrics["efficient_lmcache:evicted_chunks"],
        "Redis holds MiB": client.info("memory")["used_memory"] / 2**20,
        "Redis reads": client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"] / 2,
    }


def _engine(arguments: argparse.Namespace) -> Any:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{(os.cpu_count() or 1) - 1}",
        LMCACHE_LOG_LEVEL="ERROR",
        LMCACHE_TRACK_USAGE="false",
        LMCACHE_CHUNK_SIZE=str(CHUNK_TOKENS),
        LMCACHE_LOCAL_CPU="True",
        LMCACHE_MAX_LOCAL_CPU_SIZE=str(arguments.cpu_mib / 1024),
        LMCACHE_REMOTE_URL=arguments.redis_url,
        LMCACHE_REMOTE_SERDE="naive",
    )
    from vllm import LLM

    tokens = (FIRST_CHUNKS + GROWTH_CHUNKS * arguments.turns + 2) * CHUNK_TOKENS
    return LLM(
        arguments.model,
        skip_tokenizer_init=True,
        block_size=128,
        num_gpu_blocks_override=tokens // 128 + 2,  # of one agent: the tiers below serve everybody else
        max_model_len=tokens,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "EfficientLMCacheConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "efficient.admission": "none" if arguments.policy == "none" else "conditioned",
                "efficient.write_threshold_chunks": 3,
                "efficient.report_interval_s": 0.1,
                "efficient.report_read_interval_s": 0.05,
                "efficient.activity_window_s": 600.0,
                "efficient.remote_staging_gib": 1 / 64,
            },
        },
    )


def _ask(llm: Any, agent: int, prompt: list[int]) -> list[int]:
    from vllm import SamplingParams

    task = {"kv_transfer_params": {"efficient_lmcache.task_id": f"agent-{agent}"}}
    params = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True, extra_args=task)
    outputs = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(outputs[0].outputs[0].token_ids)


def _metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    return {
        sample.name.removesuffix("_total"): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _random_tokens(choice: random.Random, count: int) -> list[int]:
    return [choice.randrange(4096) for _ in range(count)]


def _print(results: dict[str, dict[str, float]]) -> None:
    print(f"{'':<20}" + "".join(f"{column:>18}" for column in COLUMNS))
    for policy, row in results.items():
        print(f"{policy:<20}" + "".join(f"{row[column]:>18,.0f}" for column in COLUMNS))
    for other in ("none", "one"):
        ratios = (_ratio(results["per tier"][column], results[other][column]) for column in COLUMNS)
        print(f"{'per tier / ' + other:<20}" + "".join(f"{ratio:>18}" for ratio in ratios))


def _ratio(new: float, old: float) -> str:
    return f"{new / old:.2f}" if old else "–"


if __name__ == "__main__":
    main()
