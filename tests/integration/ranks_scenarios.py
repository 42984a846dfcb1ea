"""What happens inside an engine of two ranks; `test_ranks.py` judges the result."""

from __future__ import annotations

import glob
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import CHUNK_TOKENS, Engine, random_prompts

RANKS = 2


class RanksEngine(Engine):
    """vLLM's scheduler with its connector in this process, and every rank in one of its own."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(
            model,
            host_mib=4,
            options=options,
            gpu_blocks=40,
            max_num_seqs=12,
            max_model_len=2048,
            transfer_config={"kv_load_failure_policy": "recompute"},
            ranks=RANKS,
        )

    def _find_worker(self) -> None:
        pass

    def refills_are_declined(self, declined: bool) -> None:
        policy = self.scheduler_connector._admission._policy
        policy.parameters = replace(policy.parameters, write_threshold_chunks=0 if declined else 1000)

    def ranks(self) -> list[dict[str, Any]]:
        rows = self.llm.collective_rpc(_state_of_rank)
        return sorted(rows, key=lambda row: row["rank"])

    def lose(self, rank: int, chunks: list[str]) -> None:
        """One rank's tier, and no other's, loses these chunks."""
        assert sum(self.llm.collective_rpc(_lose, args=(rank, chunks))) == len(chunks)


def _state_of_rank(worker: Any) -> dict[str, Any]:
    """Runs in a rank's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    engine, offload = connector._lmcache_engine.lmcache_engine, connector._offload
    tier = engine.storage_manager.local_cpu_backend.hot_cache
    return {
        "rank": worker.rank,
        "chunks": [f"{key.chunk_hash:x}" for key in tier],
        "key": next((key.to_string() for key in tier), ""),
        "pins": sum(chunk.is_pinned for chunk in tier.values()) + len(engine.lookup_pins),
        "chunk_bytes": offload._lmcache.chunk_bytes,
        "capacity_chunks": offload._lmcache.capacity_chunks(),
        "evicted": offload._evictions.grand_total,
        "publishes": offload._publisher is not None,
    }


def _lose(worker: Any, rank: int, chunks: list[str]) -> int:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank != rank:
        return 0
    tier = get_kv_transfer_group()._lmcache_engine.lmcache_engine.storage_manager.local_cpu_backend
    lost = [key for key in tier.hot_cache if f"{key.chunk_hash:x}" in chunks]
    return sum(bool(tier.remove(key)) for key in lost)


def _shared_memory_of_vllm(worker: Any) -> str:
    return os.environ["VLLM_DIST_IDENT"]


def two_ranks(model: str) -> dict[str, Any]:
    """Restored on both, lost on one, declined, preempted and evicted on both; then the engine ends."""
    engine = RanksEngine(model, admission="fixed", write_threshold_chunks=1000, report_interval_s=0.2)
    prompts = random_prompts(4, 4 * CHUNK_TOKENS + 30)

    def answers() -> list[Any]:
        engine.forget_gpu()
        # One at a time: in another batch, sums come out otherwise.
        return [engine.generate([prompt], max_tokens=12) for prompt in prompts]

    result: dict[str, Any] = {"computed": answers(), "stored": engine.ranks()}
    result["restored"] = answers()
    result["metrics"] = engine.metrics()
    first = result["stored"][0]["chunks"]
    # Of the first prompt all but the first chunk can be restored, of the second one the first alone.
    engine.lose(1, [first[0], first[5]])
    engine.lose(0, [first[10]])
    result["partly_restored"] = answers()
    result["made_up_for"] = engine.ranks()
    result["metrics_made_up_for"] = engine.metrics()

    result["lost_on_its_way"] = _lost_on_its_way(engine, prompts[0][: 4 * CHUNK_TOKENS], first[1])

    engine.refills_are_declined(True)
    engine.generate(random_prompts(12, 300, seed=1), max_tokens=200)
    result["declined"] = engine.ranks()
    result["preemptions"] = engine.metrics()["vllm:num_preemptions_total"]

    engine.refills_are_declined(False)
    engine.generate(random_prompts(8, 5 * CHUNK_TOKENS, seed=2), max_tokens=1)
    result["evicted"] = engine.ranks()
    parameters = engine.scheduler_connector._admission._policy.parameters
    result["bytes_per_token"] = parameters.bytes_per_token
    result["report"] = _report_at_rest(engine)
    result["evicted_counted"] = engine.metrics()["efficient_lmcache:evicted_chunks_total"]
    result["answers_after_evictions"] = answers()

    shared_memory = engine.llm.collective_rpc(_shared_memory_of_vllm)[0]
    engine.llm.llm_engine.engine_core.shutdown()
    result["processes_left"] = [process.name for process in multiprocessing.active_children()]
    # vLLM's CPU backend leaves it behind, with any connector.
    for left in Path("/dev/shm").glob(f"{glob.escape(shared_memory)}-*"):
        left.unlink()
    return result


def _lost_on_its_way(engine: RanksEngine, resident: list[int], its_second_chunk: str) -> dict[str, Any]:
    """A prompt goes on where a resident one ends, and one rank loses a chunk of that between lookup and restore."""
    prompt = [*resident, *random_prompts(1, 3 * CHUNK_TOKENS + 30, seed=3)[0]]
    before = engine.ranks()[0]["chunks"]
    answers = [engine.generate([prompt], max_tokens=12)]
    new = [chunk for chunk in engine.ranks()[0]["chunks"] if chunk not in before]
    for rank in range(RANKS):
        engine.lose(rank, new)
    build = engine.scheduler_connector.build_connector_meta

    def build_and_lose(scheduled: Any) -> Any:
        engine.scheduler_connector.build_connector_meta = build
        metadata = build(scheduled)
        engine.lose(1, [its_second_chunk])
        return metadata

    for build_step in (build_and_lose, build):
        engine.scheduler_connector.build_connector_meta = build_step
        engine.forget_gpu()
        answers.append(engine.generate([prompt], max_tokens=12))
    return {"answers": answers, "new": new, "chunks": [row["chunks"] for row in engine.ranks()]}


def _report_at_rest(engine: RanksEngine) -> dict[str, Any]:
    evicted = engine.ranks()[0]["evicted"]
    for _ in range(100):
        report = engine.scheduler_connector._telemetry.reports.report
        if report is not None and report.evicted_chunks_total == evicted:
            break
        time.sleep(0.1)
    return {
        "registered_chunks": report.registered_chunks,
        "capacity_chunks": report.capacity_chunks,
        "chunk_bytes": report.chunk_bytes,
        "evicted_chunks": report.evicted_chunks,
    }
