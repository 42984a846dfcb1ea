"""An engine whose tier is an LMCache server: its tenants, then load while the server dies and comes back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from fault_scenarios import ENOUGH, Load
from lmcache_server_process import CHUNK_TOKENS, LMCacheServer
from server_scenarios import ServerEngine, random_prompts, wait_until

#: LMCache's own keys take neither of the two.
SALTS = ["a/salt@with\\everything", "s" * 500]


def tenants_and_a_lost_server(model: str, directory: str) -> dict[str, Any]:
    server = LMCacheServer(Path(directory), 48)
    try:
        # On the CPU, a transfer that a dying server leaves undone holds the worker up for so long; by default 300 s.
        options = {**server.transfer_options, "lmcache.mp.mq_timeout": 3.0}
        engine = ServerEngine(model, options, gpu_blocks=60, max_model_len=2048, admission="none")
        result = {"tenants": _tenants(engine), "status": server.get("/status"), **_load(engine, server)}
        result["state"] = engine.state_left()
        engine.scheduler_connector.shutdown()
        return result
    finally:
        server.kill()


def _tenants(engine: ServerEngine) -> list[dict[str, Any]]:
    """Each sends the same prompt, and then again."""
    from vllm import SamplingParams

    [prompt] = random_prompts(1, 4 * CHUNK_TOKENS + 30, seed=1)
    params = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    seen = []
    for salt in (*SALTS, None, *SALTS, None):
        objects, restored = engine.tier["objects"], _restored(engine)
        asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        output = engine.llm.generate([asked], params, use_tqdm=False)[0]  # type: ignore[list-item]
        engine.forget_gpu()
        seen.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached_tokens": output.num_cached_tokens,
                "restored_tokens": _restored(engine) - restored,
                "new_objects": engine.tier["objects"] - objects,
            }
        )
    return seen


def _load(engine: ServerEngine, server: LMCacheServer) -> dict[str, Any]:
    load = Load(engine, agents=12, name="agent")
    restored: dict[str, float] = {}
    over, errors = threading.Event(), list[BaseException]()

    def stay(stage: str) -> None:
        load.stage = stage
        wait_until(lambda: load.served[stage] >= ENOUGH, f"requests: {stage}", patience_s=240)
        restored[stage] = _restored(engine)

    def befall() -> None:
        try:
            stay("healthy")
            server.kill()
            stay("server killed")
            load.stage = "server restarted"
            server.restart()
            enough = _restored(engine) + 6 * CHUNK_TOKENS
            wait_until(lambda: _restored(engine) > enough, "restores", patience_s=240)
            stay("server back")
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    script = threading.Thread(target=befall)
    script.start()
    while not over.is_set():
        load.serve()
    script.join()
    for error in errors:
        raise error
    engine.generate(random_prompts(1, 20), max_tokens=1)
    return {"served": load.served, "wrong": load.wrong, "restored": restored}


def _restored(engine: ServerEngine) -> float:
    return engine.metrics().get("efficient_lmcache:restored_tokens_total", 0)
