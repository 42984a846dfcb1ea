"""A sweep's directory as `replay sweep` leaves it, from a made-up trace and a tier of a few lines in place of vLLM.

The decisions are those of the real policies; what is simulated is which chunks are where.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from efficient_lmcache.core.admission import ADMISSIONS, AdmissionParameters, RequestFacts
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.replay.rundir import DecisionCounts, RunRecord, WorkingSet
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import TraceReader

BYTES_PER_TOKEN = 1024
CHUNK_TOKENS = 128
GIB = 2**30
_MORNING = datetime(2026, 11, 29, 8, 0, tzinfo=timezone.utc)


@dataclass(frozen=True)
class SweepRun:
    """One entry of the sweep; `gamma_h` sizes the tier, `kappa` is its write threshold, `status` is sweep.json's."""

    admission: str
    active_pool: int = 8
    gamma_h: float | None = None
    repeat: int = 1
    status: str = "complete"
    error: str | None = None
    name: str | None = None
    connector: str = "efficient"
    kappa: int | None = None

    @property
    def title(self) -> str:
        tier = f"-{self.gamma_h:g}" if self.gamma_h else ""
        more = [f"-k{self.kappa}"] * (self.kappa is not None) + ["-lmcache"] * (self.connector == "lmcache")
        more += [f"-r{self.repeat}"] * (self.repeat > 1)
        return self.name or f"a{self.active_pool}-{self.admission}{tier}{''.join(more)}"


MATRIX = (
    SweepRun("recompute"),
    SweepRun("recompute", repeat=2),
    SweepRun("recompute", active_pool=4),
    *(SweepRun("none", gamma_h=gamma) for gamma in (2.3, 1.5, 1.1, 0.8, 0.55, 0.3)),
    SweepRun("none", gamma_h=0.55, repeat=2),
    SweepRun("none", active_pool=4, gamma_h=1.8),
    SweepRun("none", active_pool=4, gamma_h=0.8),
    *(SweepRun("fixed", gamma_h=gamma) for gamma in (2.3, 0.55)),
    *(SweepRun("conditioned", gamma_h=gamma) for gamma in (2.3, 1.1, 0.55)),
)


def write_sweep(directory: Path, runs: tuple[SweepRun, ...] = MATRIX, *, tasks: int = 12) -> Path:
    """Write trace, run directories and sweep.json under `directory`; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    trace = directory / "agents.trace"
    workload = Workload(tasks=tasks, calls_per_task=10, system_tokens=512, observation_tokens=300, output_tokens=60)
    synthesize(trace, workload)
    entries, predictions = [], []
    for index, run in enumerate(runs):
        path = directory / "runs" / run.title
        record = _replay(trace, run, path, _MORNING + timedelta(minutes=10 * index)) if _ran(run) else None
        predicted = (run.admission == "none" or run.kappa is not None) and record is not None and run.repeat == 1
        if predicted:
            predictions.append(_prediction(run, record))
        entries.append(
            {
                "name": run.title,
                "directory": f"runs/{run.title}",
                "repeat": run.repeat,
                "options": record["options"] if record else {"admission": run.admission, "active_pool": 8},
                "status": run.status,
                "error": run.error,
                "prediction": len(predictions) - 1 if predicted else None,
                "started_at": record["started_at"] if record else None,
                "finished_at": None,
                "attempts": int(record is not None),
            }
        )
    sweep = {
        "schema": "efficient-lmcache-sweep/1",
        "name": "miniature",
        "plan": {"name": "miniature", "trace": "agents.trace"},
        "trace": {"name": trace.name, "sha256": _facts(trace)["sha256"]},
        "runs": entries,
        "predictions": predictions,
    }
    (directory / "sweep.json").write_text(json.dumps(sweep, indent=1))
    return directory


def _ran(run: SweepRun) -> bool:
    return run.status != "pending"


def _prediction(run: SweepRun, record: dict[str, Any]) -> dict[str, Any]:
    """Right for tiers outside the transition, a third too low inside it."""
    off = 0.75 if 0.7 < (run.gamma_h or 0) < 1.2 else 1.0

    def span(tokens: int) -> dict[str, int]:
        return {"expected": int(tokens * off), "low": int(tokens * off * 0.95), "high": int(tokens * off * 1.04)}

    return {
        "created_at": (_MORNING - timedelta(minutes=5)).isoformat(),
        "active_pool": run.active_pool,
        "admission": run.admission,
        "host_gib": record["host_gib_per_rank"],
        "capacity_chunks": int(record["host_gib_per_rank"] * GIB) // (CHUNK_TOKENS * BYTES_PER_TOKEN),
        "computed_prefill_tokens": span(record["computed_prefill_tokens"]),
        "restored_tokens_per_rank": span(record["restored_tokens_per_rank"]),
        **({} if run.kappa is None else {"write_threshold_chunks": run.kappa}),
    }


class _Lru:
    """Chunks in order of recency; a chunk is named by its task and its place in the prompt."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.chunks, self.evicted = capacity, OrderedDict[tuple[str, int], None](), 0

    def match(self, task: str, chunks: int) -> int:
        found = next((i for i in range(chunks) if (task, i) not in self.chunks), chunks)
        for i in reversed(range(found)):
            self.chunks.move_to_end((task, i))
        return found

    def insert(self, task: str, chunks: int) -> int:
        new = [i for i in range(chunks) if (task, i) not in self.chunks]
        for i in new:
            if self.capacity and len(self.chunks) >= self.capacity:
                self.chunks.popitem(last=False)
                self.evicted += 1
            if self.capacity:
                self.chunks[task, i] = None
        return len(new) if self.capacity else 0


def _facts(trace: Path) -> dict[str, Any]:
    with TraceReader(trace) as reader:
        return {"name": trace.name, "sha256": reader.sha256, **asdict(reader.totals)}


def _calls(trace: Path, pool: int) -> Iterator[tuple[str, int, int, int]]:
    """(task, call, prompt, output) in turns: each of the pool's tasks sends one, a new task follows one that ended."""
    with TraceReader(trace) as reader:
        waiting = [
            (reader.tasks[i].task_id, [(len(call.prompt_tokens), len(call.output_tokens)) for call in reader.calls(i)])
            for i in range(len(reader.tasks))
        ]
    active = [(*task, 0) for task in waiting[:pool]]
    del waiting[:pool]
    while active:
        task, calls, done = active.pop(0)
        yield task, done, *calls[done]
        if done + 1 < len(calls):
            active.append((task, calls, done + 1))
        elif waiting:
            active.append((*waiting.pop(0), 0))


def _replay(trace: Path, run: SweepRun, path: Path, started: datetime) -> dict[str, Any]:
    facts = _facts(trace)
    mean = facts["prompt_tokens"] / facts["calls"]
    working_set = (run.active_pool - 1) * mean * BYTES_PER_TOKEN
    host_bytes = int(working_set / run.gamma_h) if run.gamma_h else 0
    gpu_tokens = int(8 * mean / 1.5)
    chunk_bytes = CHUNK_TOKENS * BYTES_PER_TOKEN
    gpu, tier = _Lru(gpu_tokens // CHUNK_TOKENS), _Lru(host_bytes // chunk_bytes)
    policy = None
    if run.admission != "recompute":
        parameters = AdmissionParameters(CHUNK_TOKENS, BYTES_PER_TOKEN, host_bytes)
        if run.kappa is not None:
            parameters = replace(parameters, write_threshold_chunks=run.kappa)
        policy = ADMISSIONS[run.admission](parameters)
    rows, decisions = [], []
    computed = restored = stored = 0
    now, ended = 0.0, dict[str, float]()
    for sequence, (task, call, prompt, output) in enumerate(_calls(trace, run.active_pool)):
        chunks = prompt // CHUNK_TOKENS
        resident, held = gpu.match(task, chunks), tier.match(task, chunks)
        save = policy is not None
        if policy is not None:
            report = TierReport("e", sequence, CHUNK_TOKENS, chunk_bytes, len(tier.chunks), tier.capacity, tier.evicted,
                                tier.evicted, now)  # fmt: skip
            decision = policy.decide(RequestFacts(task, prompt, held * CHUNK_TOKENS), report, now)
            decisions.append(
                {"request_id": f"r{sequence}", "now_s": now, "admission": run.admission, **decision.record()}
            )
            save = decision.save
        gpu.insert(task, chunks)
        copied = max(held - resident, 0) * CHUNK_TOKENS
        new = prompt - max(held, resident) * CHUNK_TOKENS
        stored += tier.insert(task, chunks) * CHUNK_TOKENS if save else 0
        computed, restored = computed + new, restored + copied
        taken = 0.02 + new / 20_000
        sent = (2 * ended.get(task, 0.0) + now) / 3  # a third of the gap is the agent's own time
        ended[task] = now + taken
        rows.append(
            {
                "task": task, "call": call, "prompt_tokens": prompt, "output_tokens": output, "status": "answered",
                "exact": True, "first_mismatch": None, "cached_tokens": prompt - new, "http_status": 200, "error": None,
                "eligible_s": sent, "dispatched_s": sent, "finished_s": now + taken,
            }
        )  # fmt: skip
        now += taken
    logged = decisions if run.connector == "efficient" else []  # LMCache's own has no log
    record = RunRecord(
        status=run.status,
        admission=run.admission,
        connector="none" if run.admission == "recompute" else run.connector,
        host_gib_per_rank=host_bytes / GIB,
        active_pool=run.active_pool,
        calls=facts["calls"],
        working_set=WorkingSet(
            run.active_pool, mean, working_set, working_set / host_bytes if host_bytes else None,
            run.active_pool * mean / gpu_tokens,
        ),
        options={
            "trace": "agents.trace", "model": "model", "admission": run.admission, "host_gib": host_bytes / GIB,
            "active_pool": run.active_pool, "out": run.title, "time_scale": 0.1, "gpu_kv_tokens": gpu_tokens,
            "chunk_tokens": CHUNK_TOKENS, "block_tokens": 128, "connector": run.connector, "max_num_seqs": 16,
            "write_threshold_chunks": run.kappa, "occupancy_threshold": None, "tensor_parallel": 1, "label_tasks": True,
        },
        command=["efficient-lmcache", "replay", "run"],
        trace=facts,
        versions={"python": "3.11.7", "efficient_lmcache": "0.1.0", "vllm": "0.32.0", "lmcache": "0.5.6"},
        started_at=started.isoformat(),
        error=run.error,
        answered=len(rows),
        outputs_exact=len(rows),
        prompt_tokens=facts["prompt_tokens"],
        output_tokens=facts["output_tokens"],
        makespan_s=now,
        computed_prefill_tokens=computed,
        restored_tokens_per_rank=restored,
        stored_tokens_per_rank=stored,
        dedup_chunks_per_rank=0,
        evicted_chunks_per_rank=tier.evicted,
        preemptions=0,
        gpu_kv_tokens=gpu_tokens,
        decisions=DecisionCounts.of(logged),
    )  # fmt: skip
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(record.to_json()))
    (path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if logged:
        (path / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    return record.to_json()
