"""Agents that ask a real LMCache server for their prompts and store what it lacks, as vLLM's connector does.

The two classes are the ones that LMCacheMPConnector itself wraps; only the model is missing, so the KV is zeros.
"""

from __future__ import annotations

import random
import time

BLOCK_TOKENS = 128
LAYERS, KV_HEADS, HEAD_SIZE = 2, 1, 32
BLOCKS = 80  # one prompt's
MODEL = "test-model"


def send_lookups(url: str, agents: int, turns: int, seed: int = 0) -> dict[str, int]:
    """Agents take random turns; each turn extends (or, now and then, rewrites) the agent's prompt.

    Returns how many lookups were sent, and how many chunks the server found.
    """
    import torch
    import zmq
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPSchedulerAdapter,
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
        ParallelStrategy,
    )
    from lmcache.v1.multiprocess.group_view import EngineGroupInfo

    one_worker = ParallelStrategy(
        mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
    )
    context = zmq.Context()
    scheduler = LMCacheMPSchedulerAdapter([url], context, MODEL, BLOCK_TOKENS, one_worker)
    worker = LMCacheMPWorkerAdapter(url, context, MODEL, BLOCK_TOKENS, one_worker)
    shape = (BLOCKS, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
    worker.register_kv_caches(
        {f"layer.{layer}": torch.zeros(shape, dtype=torch.bfloat16) for layer in range(LAYERS)},
        [EngineGroupInfo(0, tuple(range(LAYERS)), BLOCK_TOKENS)],
        {"kv_layout": "HND"},
    )
    chunk_tokens = scheduler.lmcache_tokens_per_chunk
    found_chunks = 0
    prompts = list(_prompts(agents, turns, seed))
    for number, tokens in enumerate(prompts):
        request_id = f"request-{number}"
        full = len(tokens) // chunk_tokens * chunk_tokens
        scheduler.maybe_submit_lookup_request(request_id, tokens)
        while (found := scheduler.check_lookup_result(request_id)) is None:
            time.sleep(0.001)
        found_chunks += found // chunk_tokens
        scheduler.free_lookup_locks(tokens, 0, found, request_id)
        if found < full:
            blocks = list(range(found // BLOCK_TOKENS, full // BLOCK_TOKENS))
            worker.submit_store_request(request_id, LoadStoreOp(tokens, [blocks], found, full), None)
            while not worker.store_futures[request_id].query():
                time.sleep(0.001)
        worker.get_finished({request_id})
        scheduler.end_session(request_id)
    return {"lookups": len(prompts), "found_chunks": found_chunks}


def _prompts(agents: int, turns: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)

    def words(count: int) -> list[int]:
        return [generator.randrange(1000) for _ in range(count)]

    system = words(600)
    histories = [system + words(generator.randrange(100, 900)) for _ in range(agents)]
    prompts = []
    for _ in range(turns):
        agent = generator.randrange(agents)
        history = histories[agent]
        if generator.random() < 0.1:
            history = history[: generator.randrange(len(history))]
        histories[agent] = (history + words(generator.randrange(20, 700)))[: BLOCKS * BLOCK_TOKENS]
        prompts.append(histories[agent])
    return prompts
