"""A real engine with a CPU tier of 16 chunks and a remote tier; `test_remote_tier.py` judges what happens."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import CHUNK_TOKENS, Engine, random_prompts

PROMPT_CHUNKS = 6
#: A restore that Redis evicted in the meantime is computed; vLLM's default fails the request.
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


class Agents:
    """Tasks with one prompt each, on an engine that forgets its GPU cache between any two of them."""

    def __init__(self, model: str, remote_url: str | None, decision_log: str) -> None:
        self.engine = Engine(
            model,
            host_mib=4,
            options={
                "admission": "conditioned",
                "write_threshold_chunks": 2,
                # A Redis of 8 MiB makes room for its connections' buffers too: they leave it a quarter below its limit.
                "occupancy_threshold": 0.6,
                "report_interval_s": 0.1,
                "report_read_interval_s": 0.05,
                "remote_staging_gib": 8 / 4096,  # of 8 chunks
                "decision_log": decision_log,
            },
            remote_url=remote_url,
            transfer_config=RECOMPUTE,
        )
        self.prompts = random_prompts(11, PROMPT_CHUNKS * CHUNK_TOKENS + 20)
        self._log = Path(decision_log)

    def serve(self, *tasks: int) -> list[dict[str, Any]]:
        """One after the other: each one's answer, its decisions, and whether the CPU tier's residents changed."""
        rows = []
        for task in tasks:
            self.engine.forget_gpu()
            before = set(self.engine.tier.hot_cache)
            restored = self.restored_tokens
            output = self.engine.generate([self.prompts[task]], task_ids=[f"task-{task}"])[0]
            self._settle()
            decision = json.loads(self._log.read_text().splitlines()[-1])
            rows.append(
                {
                    "task": task,
                    "output": output,
                    "cpu": decision["outcome"],
                    "cpu_match_tokens": decision["host_match_tokens"],
                    "remote": decision["remote"]["outcome"],
                    "remote_match_tokens": decision["remote"]["host_match_tokens"],
                    "remote_capacity_bytes": decision["remote"]["capacity_bytes"],
                    "restored_tokens": self.restored_tokens - restored,
                    "residents_changed": set(self.engine.tier.hot_cache) != before,
                }
            )
        return rows

    @property
    def restored_tokens(self) -> float:
        return self.engine.metrics()["efficient_lmcache:restored_tokens_total"]

    def _settle(self) -> None:
        """LMCache sends to the remote tier in the background, and reports come ten times a second."""
        backends = self.engine.lmcache.storage_manager.storage_backends
        writer = backends["RemoteBackend"] if "RemoteBackend" in backends else backends["LocalDiskBackend"].disk_worker
        wait_until(lambda: not writer.put_tasks)
        time.sleep(0.4)


def wait_until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def redis_tier(model: str, redis_url: str, kill_pid: int, decision_log: str) -> dict[str, Any]:
    """Redis has no limit, then one that the pool exceeds, and then it is dead."""
    import redis

    client = redis.Redis.from_url(redis_url)
    agents = Agents(model, redis_url, decision_log)
    filling = agents.serve(0, 1, 2, 3)
    keys = client.dbsize()
    declined = agents.serve(4, 5)
    declined_keys = client.dbsize() - keys
    again = agents.serve(4, 5, 2)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", "8mb")
    time.sleep(0.5)
    thrashing = agents.serve(6, 7, 8)
    client.config_set("maxmemory", "64mb")
    time.sleep(0.5)
    ample = agents.serve(9)
    os.kill(kill_pid, signal.SIGKILL)
    dead = agents.serve(4, 10)
    return {
        "filling": filling,
        "declined": declined,
        "declined_keys": declined_keys,
        "again": again,
        "thrashing": thrashing,
        "ample": ample,
        "dead": dead,
        "metrics": agents.engine.metrics(),
        "state": agents.engine.state_left(),
    }


def local_disk(model: str, directory: str, decision_log: str) -> dict[str, Any]:
    """A disk behind the CPU tier, which reports nothing."""
    os.environ.update(LMCACHE_LOCAL_DISK=f"file://{directory}", LMCACHE_MAX_LOCAL_DISK_SIZE="1")
    agents = Agents(model, None, decision_log)
    rows = agents.serve(0, 1, 2, 3, 4, 5, 4)
    return {"rows": rows, "metrics": agents.engine.metrics(), "files": len(list(Path(directory).glob("*.pt")))}
