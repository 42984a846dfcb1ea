"""What happens inside a real engine; `test_connector.py` runs each in a fresh process and judges the result."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine import CHUNK_TOKENS, Engine, metric, random_prompts


def restore_and_extend(model: str) -> dict[str, Any]:
    """20 unlabelled prompts: computed, restored, then extended."""
    engine = Engine(model, host_mib=64, gpu_blocks=120, options={"admission": "none"}, compile_model=True)
    prompts = random_prompts(20, 5 * CHUNK_TOKENS + 100)
    computed = engine.generate(prompts, max_tokens=16)
    stored = engine.metrics()
    engine.forget_gpu()
    restored = engine.generate(prompts, max_tokens=16)
    after_restore = engine.metrics()
    turns = zip(prompts, computed, random_prompts(20, 300, seed=1), strict=True)
    extended = [prompt + output + observation for prompt, output, observation in turns]
    engine.forget_gpu()
    engine.generate(extended)
    end = engine.metrics()
    return {
        "computed": computed,
        "restored": restored,
        "stored_tokens": stored["efficient_lmcache:stored_tokens_total"],
        "restored_tokens": after_restore["efficient_lmcache:restored_tokens_total"],
        "restored_tokens_after_extension": end["efficient_lmcache:restored_tokens_total"],
        "active_pool": end["efficient_lmcache:active_pool_tasks"],
        "state": engine.state_left(),
    }


def deduplicate(model: str) -> dict[str, Any]:
    """Chunks 0 and 3 of 6 go missing; the lookup then finds nothing, and a store would copy all six."""
    engine = Engine(model, options={"admission": "fixed", "write_threshold_chunks": 1000})
    prompt = random_prompts(1, 6 * CHUNK_TOKENS + 10)
    first = engine.generate(prompt)
    keys = [key for _, _, key in engine.lmcache.token_database.process_tokens(prompt[0][: 6 * CHUNK_TOKENS])]
    before = engine.metrics()
    for index in (0, 3):
        assert engine.tier.remove(keys[index])
    held = {str(key): chunk.data_ptr for key, chunk in engine.tier.hot_cache.items()}
    engine.forget_gpu()
    recomputed = engine.generate(prompt)
    after = engine.metrics()
    engine.forget_gpu()
    restored = engine.generate(prompt)
    end = engine.metrics()

    def gained(name: str, later: dict[str, float], earlier: dict[str, float]) -> float:
        return later[f"efficient_lmcache:{name}_total"] - earlier[f"efficient_lmcache:{name}_total"]

    return {
        "outputs": [first, recomputed, restored],
        "stored_tokens": gained("stored_tokens", after, before),
        "deduplicated_chunks": gained("deduplicated_chunks", after, before),
        "restored_tokens": gained("restored_tokens", end, after),
        "held_chunks_untouched": all(
            engine.tier.hot_cache[key].data_ptr == held[str(key)] for key in keys if str(key) in held
        ),
        "chunks": len(engine.tier.hot_cache),
    }


def preempt_abort_and_many(model: str, decision_log: str, requests: int) -> dict[str, Any]:
    """Every request is a refill and declined: whatever is stored shows a forgotten decision."""
    engine = Engine(
        model,
        options={"admission": "fixed", "write_threshold_chunks": 0, "decision_log": decision_log},
        gpu_blocks=60,
        max_model_len=2048,
        max_num_seqs=64,
    )
    engine.generate(random_prompts(12, 600), max_tokens=400)
    preempted = engine.metrics()
    state_after_preemption = engine.state_left()
    decisions_after_preemption = Path(decision_log).read_text().count("\n")
    aborted = _abort_running_and_waiting(engine)
    state_after_abort = engine.state_left()
    for start in range(0, requests, 2500):
        engine.generate(random_prompts(min(2500, requests - start), 24, seed=start), max_tokens=1)
    return {
        "preemptions": preempted["vllm:num_preemptions_total"],
        "decisions": decisions_after_preemption,
        "stored_tokens": preempted["efficient_lmcache:stored_tokens_total"],
        "declined": preempted["efficient_lmcache:decisions_total[refill]"],
        "state_after_preemption": state_after_preemption,
        "aborted": aborted,
        "state_after_abort": state_after_abort,
        "state_after_many": engine.state_left(),
        "remembered_prompts": len(engine.scheduler_connector._admission._tasks),
    }


def _abort_running_and_waiting(engine: Engine) -> dict[str, int]:
    """Abort requests in every stage, among them waiting ones whose lookup is resolved and has pinned chunks."""
    from vllm import SamplingParams

    engine.scheduler_connector._admission._policy.parameters = _with_threshold(engine, 1000)
    stored = random_prompts(8, 3 * CHUNK_TOKENS, seed=7)
    engine.generate(stored)
    engine.forget_gpu()
    llm_engine = engine.llm.llm_engine
    params = SamplingParams(max_tokens=200, temperature=0, detokenize=False, ignore_eos=True)
    for index, prompt in enumerate(stored + random_prompts(12, 500, seed=8)):
        llm_engine.add_request(f"abort-{index}", {"prompt_token_ids": prompt}, params)
    pinned = 0
    for _ in range(6):
        llm_engine.step()
        pinned = max(pinned, engine.state_left()["lookup_pins"])
    running, waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
    known = len(engine.scheduler_connector._admission)
    llm_engine.abort_request([f"abort-{index}" for index in range(20)])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    # A worker hears of ended requests with the next step that the engine takes.
    engine.generate(random_prompts(1, 20, seed=9), max_tokens=1)
    return {"running": running, "waiting": waiting, "decisions_remembered": known, "lookup_pins_seen": pinned}


def _with_threshold(engine: Engine, chunks: int) -> Any:
    from dataclasses import replace

    return replace(engine.scheduler_connector._admission._policy.parameters, write_threshold_chunks=chunks)


def sequence_of_stores_and_hits(model: str, connector: str) -> list[dict[str, Any]]:
    """Agents that take turns in a tier too small for them: after each call, what the tier holds, in which order."""
    options = {"admission": "none"} if connector == "EfficientLMCacheConnector" else None
    engine = Engine(model, connector=connector, options=options, host_mib=3.5, gpu_blocks=40)
    histories = random_prompts(4, 3 * CHUNK_TOKENS + 50)
    rows = []
    for turn in range(4):
        for agent, history in enumerate(histories):
            output = engine.generate([history], max_tokens=6)[0]
            histories[agent] = history + output + random_prompts(1, 180, seed=10 * turn + agent)[0]
            if agent % 2:
                engine.forget_gpu()
            tier = engine.tier.hot_cache
            rows.append(
                {
                    "output": output,
                    "keys": [key.to_string() for key in tier],
                    "bytes": [hashlib.sha256(bytes(chunk.byte_array)).hexdigest() for chunk in tier.values()],
                    "external_hits": metric("vllm:external_prefix_cache_hits_total"),
                }
            )
    return rows


def through_redis(model: str, redis_url: str, kill_pid: int | None = None) -> dict[str, Any]:
    """One engine beside a Redis; with `kill_pid`, Redis is killed after the first answers."""
    engine = Engine(model, host_mib=32, options={"admission": "none"}, remote_url=redis_url)
    prompts = random_prompts(4, 4 * CHUNK_TOKENS + 30)
    outputs = engine.generate(prompts)
    time.sleep(2.0)  # LMCache sends to the remote tier in the background
    after_kill: list[Any] = []
    if kill_pid is not None:
        os.kill(kill_pid, signal.SIGKILL)
        engine.forget_gpu()
        after_kill = engine.generate(prompts + random_prompts(4, 4 * CHUNK_TOKENS + 30, seed=1))
    restored = engine.metrics()["efficient_lmcache:restored_tokens_total"]
    return {"outputs": outputs, "after_kill": after_kill, "restored_tokens": restored}


def faults(model: str, decision_log: str) -> dict[str, Any]:
    """Telemetry, then admission, then deduplication break under a running engine."""
    import logging

    from efficient_lmcache.telemetry.local import runtime_directory

    options = {"admission": "conditioned", "report_interval_s": 0.1, "report_read_interval_s": 0.05}
    engine = Engine(model, options={**options, "report_max_age_s": 1.0, "decision_log": decision_log})
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("efficient_lmcache").addHandler(handler)
    served = Counter[str]()

    def serve(stage: str, seed: int) -> None:
        outputs = engine.generate(random_prompts(3, 3 * CHUNK_TOKENS + 5, seed=seed))
        served[stage] += sum(len(output) == 4 for output in outputs)

    time.sleep(0.5)
    serve("healthy", 1)
    shutil.rmtree(runtime_directory())
    time.sleep(0.6)
    serve("directory removed", 2)
    engine.worker_connector._offload._publisher.close()
    time.sleep(1.5)
    serve("publisher dead", 3)

    def broken(*_: Any, **__: Any) -> Any:
        # A fake: nothing that a user can do makes the real ones raise.
        raise RuntimeError("broken on purpose")

    engine.worker_connector._offload._lmcache.contains = broken
    serve("deduplication broken", 4)
    engine.scheduler_connector._admission._policy.decide = broken
    serve("admission broken", 5)
    return {"served": served, "messages": messages, "state": engine.state_left()}


def telemetry_over_redis(model: str, redis_url: str, kill_pid: int) -> dict[str, Any]:
    """Two tasks of a pool that another engine shares; then Redis is killed."""
    options = {"telemetry.transport": "redis", "telemetry.redis_url": redis_url}
    engine = Engine(model, options={**options, "report_interval_s": 0.1, "report_max_age_s": 1.0})
    prompts, tasks = random_prompts(2, 3 * CHUNK_TOKENS), ["1", "2"]
    outputs = engine.generate(prompts, task_ids=tasks)

    def metrics_later() -> dict[str, float]:
        time.sleep(5.0)
        engine.forget_gpu()
        # Statistics leave the engine with its steps.
        outputs.extend(engine.generate(prompts, task_ids=tasks))
        return engine.metrics()

    shared = metrics_later()
    os.kill(kill_pid, signal.SIGKILL)
    return {"shared": shared, "alone": metrics_later(), "outputs": outputs, "state": engine.state_left()}


def start_with_bad_option(model: str) -> str:
    try:
        Engine(model, options={"admission": "sometimes"})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "started"
