"""What happens inside an engine beside a real LMCache server; `test_server_mode.py` judges the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import CHUNK_TOKENS, Engine, metric, random_prompts
from lmcache_server_process import clear, tier


class ServerEngine(Engine):
    """vLLM and its connector in this process, LMCache in another one."""

    def __init__(
        self,
        model: str,
        transfer_options: dict[str, Any],
        *,
        gpu_blocks: int = 80,
        max_model_len: int = 4096,
        max_num_seqs: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            gpu_blocks=gpu_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            transfer_config={
                # By default vLLM fails a request whose restore does not end, and itself when it ends after all.
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    **transfer_options,
                    "efficient.report_interval_s": 0.2,
                    **{f"efficient.{name}": value for name, value in options.items()},
                },
            },
        )
        self.http_url = transfer_options["efficient.server.http_url"]

    def _find_worker(self) -> None:
        pass

    @property
    def tier(self) -> dict[str, int]:
        return tier(self.http_url)

    def forget_gpu(self) -> None:
        """Only when the server has what it was to store are an ended request's blocks free."""
        for _ in range(200):
            self.llm.llm_engine.step()
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.05)
        raise AssertionError("blocks stay held")

    @property
    def report(self) -> Any:
        return self.scheduler_connector._telemetry.reports.report

    def refills_are_declined(self, declined: bool) -> None:
        """Of a `fixed` policy: with kappa at 0 every prompt of a chunk or more is a refill, at 1000 none is."""
        from dataclasses import replace

        policy = self.scheduler_connector._admission._policy
        policy.parameters = replace(policy.parameters, write_threshold_chunks=0 if declined else 1000)

    def state_left(self) -> dict[str, int]:
        connector, adapter = self.scheduler_connector, self.scheduler_connector.scheduler_adapter
        lazy = getattr(connector, "_lazy_offload_manager", None)
        return {
            "decisions": len(connector._admission),
            "trackers": len(connector.request_trackers),
            "lookups": len(adapter._pending_lookups) + len(adapter._finished_lookup_results),
            "held_back": len(lazy._policy._pending) if lazy is not None else 0,
        }

    def stored_tokens(self) -> float:
        return self.metrics()["efficient_lmcache:stored_tokens_total"]


def wait_until(holds: Callable[[], object], what: str, patience_s: float = 60.0, pause_s: float = 0.05) -> None:
    deadline_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(pause_s)


def everything(model: str, transfer_options: dict[str, Any], decision_log: str) -> dict[str, Any]:
    """Restore, decline, preempt and abort, fill the tier and clear it."""
    engine = ServerEngine(
        model,
        transfer_options,
        gpu_blocks=40,
        max_model_len=2048,
        max_num_seqs=32,
        admission="fixed",
        decision_log=decision_log,
    )
    wait_until(lambda: engine.report is not None, "a report")
    result = {"restore": _restore(engine), "decline": _decline(engine)}
    result["preempt"] = _preempt_and_abort(engine)
    result["fill"] = _fill_and_clear(engine)
    result["state_at_the_end"] = engine.state_left()
    engine.scheduler_connector.shutdown()
    return result


def _restore(engine: ServerEngine) -> dict[str, Any]:
    engine.refills_are_declined(False)
    prompts = random_prompts(4, 5 * CHUNK_TOKENS + 100)
    # One at a time: in another batch, sums come out otherwise, and a random model's choices are close.
    computed = [engine.generate([prompt], max_tokens=12) for prompt in prompts]
    wait_until(lambda: engine.tier["objects"] == 20, "20 objects")
    engine.forget_gpu()
    restored = [engine.generate([prompt], max_tokens=12) for prompt in prompts]
    metrics = engine.metrics()
    return {
        "computed": computed,
        "restored": restored,
        "stored_tokens": metrics["efficient_lmcache:stored_tokens_total"],
        "restored_tokens": metrics["efficient_lmcache:restored_tokens_total"],
        "lmcache_lookups": metric("vllm:lmcache_mp_lookup_duration_seconds_count"),
        "state": engine.state_left(),
    }


def _decline(engine: ServerEngine) -> dict[str, Any]:
    """Refills leave nothing; what extends a resident prefix by no more than kappa is stored."""
    engine.refills_are_declined(True)
    before, stored = engine.tier, engine.stored_tokens()
    engine.generate(random_prompts(4, 3 * CHUNK_TOKENS + 10, seed=1), max_tokens=4)
    time.sleep(0.5)
    after = engine.tier
    return {
        "objects": after["objects"] - before["objects"],
        "stored_tokens": engine.stored_tokens() - stored,
        "declined": engine.metrics()["efficient_lmcache:decisions_total[refill]"],
        "state": engine.state_left(),
    }


def _preempt_and_abort(engine: ServerEngine) -> dict[str, Any]:
    before, stored = engine.tier, engine.stored_tokens()
    engine.generate(random_prompts(10, 500, seed=2), max_tokens=150)
    preempted = {
        "preemptions": engine.metrics()["vllm:num_preemptions_total"],
        "objects": engine.tier["objects"] - before["objects"],
        "stored_tokens": engine.stored_tokens() - stored,
        "state": engine.state_left(),
    }
    from vllm import SamplingParams

    engine.refills_are_declined(False)
    llm_engine = engine.llm.llm_engine
    params = SamplingParams(max_tokens=200, temperature=0, detokenize=False, ignore_eos=True)
    resident = random_prompts(4, 5 * CHUNK_TOKENS + 100)
    engine.forget_gpu()
    for index, prompt in enumerate(resident + random_prompts(36, 500, seed=8)):
        llm_engine.add_request(f"abort-{index}", {"prompt_token_ids": prompt}, params)

    def some_run() -> bool:
        llm_engine.step()
        return len(engine.scheduler.running) > 1

    wait_until(some_run, "running requests", pause_s=0)
    running, known = len(engine.scheduler.running), len(engine.scheduler_connector._admission)
    llm_engine.abort_request([f"abort-{index}" for index in range(40)])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    engine.generate(random_prompts(1, 20, seed=9), max_tokens=1)
    return {**preempted, "running": running, "known": known, "state_after_abort": engine.state_left()}


def _fill_and_clear(engine: ServerEngine) -> dict[str, Any]:
    engine.refills_are_declined(False)
    clear(engine.http_url)
    wait_until(lambda: engine.tier["objects"] == 0, "an empty tier")
    removed_before = engine.tier["removed"]
    time.sleep(0.5)
    cleared = engine.report
    for round_ in range(4):
        engine.generate(random_prompts(6, 6 * CHUNK_TOKENS, seed=100 + round_), max_tokens=1)
        time.sleep(1.2)
    wait_until(lambda: engine.report.evicted_chunks > 0, "an eviction")
    # The server evicts once a second, and nothing is stored meanwhile.
    wait_until(lambda: _rests(engine), "a report of a tier at rest")
    filled, at_rest = engine.report, engine.tier
    clear(engine.http_url)
    wait_until(lambda: engine.report.registered_chunks == 0, "a report of an empty tier")
    engine.generate(random_prompts(1, 20, seed=11), max_tokens=1)
    return {
        "evicted_after_first_clear": cleared.evicted_chunks,
        "registered": filled.registered_chunks,
        "objects": at_rest["objects"],
        "capacity_bytes": filled.capacity_bytes,
        "total_bytes": at_rest["total_bytes"],
        "evicted": filled.evicted_chunks,
        "evicted_total": filled.evicted_chunks_total,
        "evicted_counted": engine.metrics()["efficient_lmcache:evicted_chunks_total"],
        "removed": at_rest["removed"] - removed_before,
        "evicted_after_second_clear": engine.report.evicted_chunks_total,
    }


def _rests(engine: ServerEngine) -> bool:
    before, report = engine.tier, engine.report
    time.sleep(1.5)
    return before == engine.tier and report.evicted_chunks_total == engine.report.evicted_chunks_total


def lazily(model: str, transfer_options: dict[str, Any], decision_log: str) -> dict[str, Any]:
    """What vLLM evicts is stored, unless it was declined."""
    engine = ServerEngine(
        model,
        {**transfer_options, "lmcache.mp.lazy_offload": True},
        gpu_blocks=24,
        max_model_len=2048,
        admission="fixed",
        decision_log=decision_log,
    )
    # Ten contexts of 8 blocks where 24 blocks are: most of them are evicted. What is evicted is stored in a later step.
    prompts = {declined: random_prompts(10, 4 * CHUNK_TOKENS, seed=int(declined)) for declined in (True, False)}
    stages = {}
    for name, declined in (("declined", True), ("admitted", False)):
        engine.refills_are_declined(declined)
        before = engine.tier["objects"]
        for _ in range(3 if declined else 20):
            engine.generate(prompts[declined], max_tokens=1)
            time.sleep(0.5)
            if engine.tier["objects"] > before:
                break
        stages[name] = {"objects": engine.tier["objects"] - before, **engine.state_left()}
    restored = engine.metrics()["efficient_lmcache:restored_tokens_total"]
    answers = []
    for _ in range(10):
        answers.append(engine.generate(prompts[False], max_tokens=1))
        engine.forget_gpu()
        if engine.metrics()["efficient_lmcache:restored_tokens_total"] > restored:
            break
    return {
        **stages,
        "answers": answers,
        "restored_tokens": engine.metrics()["efficient_lmcache:restored_tokens_total"] - restored,
        "decisions": len(Path(decision_log).read_text().splitlines()),
    }
