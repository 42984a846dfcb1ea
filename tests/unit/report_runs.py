"""Small run directories for the report's tests: real traces, real policies, and an LRU tier that is a dictionary."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache.core.admission import ADMISSIONS, AdmissionParameters, RequestFacts
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.replay.driver import CallRow
from efficient_lmcache.replay.rundir import DecisionCounts, RunRecord, WorkingSet
from efficient_lmcache.replay.trace import Call, Manifest, TraceReader, TraceWriter

CHUNK_TOKENS = 4
BYTES_PER_TOKEN = 1024
CHUNK_GIB = CHUNK_TOKENS * BYTES_PER_TOKEN / (1 << 30)
SERVER_CLOCK_S = 5000.0
OWN_S = 0.5
WAITING_S = 2.0
SERVICE_S = 1.0
VOCAB_SIZE = 1000


def write_trace(path: Path, lengths: Sequence[Sequence[int]], *, history: tuple[dict[str, Any], ...] = ()) -> Path:
    """A trace of one task per entry, whose calls append so many tokens to the prompt and get outputs of two."""
    random = np.random.default_rng(sum(map(sum, lengths)))
    manifest = Manifest(VOCAB_SIZE, "synthetic", "a test", history=history)
    with TraceWriter(path, manifest) as writer:
        for number, added in enumerate(lengths):
            calls, known = [], np.arange(CHUNK_TOKENS, dtype=np.uint32)  # a first chunk that all tasks share
            for tokens in added:
                prompt = np.concatenate((known, random.integers(VOCAB_SIZE, size=tokens, dtype=np.uint32)))
                output = random.integers(VOCAB_SIZE, size=2, dtype=np.uint32)
                calls.append(Call(prompt, output, OWN_S))
                known = np.concatenate((prompt, output))
            writer.write_task(f"task-{number}", calls)
    return path


@dataclass
class LruTier:
    """Chunks by the prompt up to their end, the most recent last; a request's are promoted tail first."""

    capacity_chunks: int
    chunks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    evicted: int = 0

    def match(self, keys: list[bytes]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self.chunks), len(keys))

    def promote(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self.chunks.pop(key, None)
            self.chunks[key] = None
        while len(self.chunks) > self.capacity_chunks:
            self.chunks.popitem(last=False)
            self.evicted += 1

    def report(self, sequence: int, received_s: float) -> TierReport:
        size = CHUNK_TOKENS * BYTES_PER_TOKEN
        registered = len(self.chunks)
        return TierReport(
            "e", sequence, CHUNK_TOKENS, size, registered, self.capacity_chunks, self.evicted, self.evicted, received_s
        )


@dataclass(frozen=True)
class Written:
    """A run directory and what its making knows.

    Attributes:
        written, evicted: chunks that calls with a next one wrote, and those gone by the next call.
    """

    path: Path
    written: int
    evicted: int


def make_run(parent: Path, name: str, trace: Path, admission: str, capacity_chunks: int, **changed: Any) -> Written:
    """All tasks at once, their calls in turn: the whole pool references its contexts between two calls of a task."""
    path = parent / name
    path.mkdir(parents=True)
    with TraceReader(trace) as reader:
        totals, sha256 = reader.totals, reader.sha256
        tasks = {info.task_id: list(reader.calls(number)) for number, info in enumerate(reader.tasks)}
    policy = ADMISSIONS.get(admission)
    parameters = AdmissionParameters(
        CHUNK_TOKENS,
        BYTES_PER_TOKEN,
        capacity_chunks * CHUNK_TOKENS * BYTES_PER_TOKEN,
        write_threshold_chunks=changed.get("options", {}).get("write_threshold_chunks") or 2,
    )
    deciding = policy(parameters) if policy else None
    tier = LruTier(capacity_chunks)
    decisions, rows, computed, written, evicted = [], [], 0, Counter[str](), 0
    pending: dict[str, list[bytes]] = {}
    now_s = 0.0
    for number in range(max(map(len, tasks.values()))):
        for task, calls in tasks.items():
            if number >= len(calls):
                continue
            call = calls[number]
            n = len(call.prompt_tokens)
            keys = [call.prompt_tokens[:end].tobytes() for end in range(CHUNK_TOKENS, n + 1, CHUNK_TOKENS)]
            match = tier.match(keys) if deciding else 0
            held = set(keys[:match])
            evicted += sum(key not in held for key in pending.pop(task, []))
            dispatched_s = now_s
            save = True
            if deciding:
                looked_up_s = SERVER_CLOCK_S + dispatched_s + (WAITING_S if rows else 0.0)
                report = tier.report(len(rows), looked_up_s - 0.25)
                decision = deciding.decide(RequestFacts(task, n, match * CHUNK_TOKENS), report, looked_up_s)
                save = decision.save
                row = {"request_id": f"r{len(rows)}", "now_s": looked_up_s, "admission": admission}
                decisions.append({**row, **decision.record()})
                tier.promote(keys[:match] if not save else keys)
                if save and number + 1 < len(calls):
                    written[task] += len(keys) - match
                    pending[task] = keys[match:]
            computed += n - match * CHUNK_TOKENS
            now_s = dispatched_s + WAITING_S + SERVICE_S
            rows.append(
                CallRow(
                    task,
                    number,
                    n,
                    len(call.output_tokens),
                    "answered",
                    exact=True,
                    cached_tokens=match * CHUNK_TOKENS,
                    http_status=200,
                    eligible_s=dispatched_s,
                    dispatched_s=dispatched_s,
                    finished_s=now_s,
                )
            )
            now_s += OWN_S
    _write_lines(path / "calls.jsonl", [asdict(row) for row in rows])
    if deciding:
        _write_lines(path / "decisions.jsonl", decisions)
    for moment, share in (("before", 0.25), ("after", 1.25)):
        (path / f"metrics-{moment}.txt").write_text(_metrics(len(rows), share))
    mean_prompt_tokens = totals.prompt_tokens / totals.calls
    working_set_bytes = (totals.tasks - 1) * mean_prompt_tokens * BYTES_PER_TOKEN
    host_gib = capacity_chunks * CHUNK_GIB if deciding else 0.0
    record = RunRecord(
        status="complete",
        admission=admission,
        connector="efficient" if deciding else "none",
        host_gib_per_rank=host_gib,
        active_pool=totals.tasks,
        calls=totals.calls,
        working_set=WorkingSet(
            totals.tasks,
            mean_prompt_tokens,
            working_set_bytes,
            working_set_bytes / (host_gib * (1 << 30)) if deciding else None,
            1.5,
        ),
        options={
            "trace": str(trace),
            "model": "model",
            "time_scale": 1.0,
            "admission": admission,
            "host_gib": host_gib,
            "active_pool": totals.tasks,
            "out": name,
            "chunk_tokens": CHUNK_TOKENS,
            "label_tasks": True,
            "write_threshold_chunks": None,
            "occupancy_threshold": None,
        },
        command=["efficient-lmcache"],
        trace={"name": trace.name, "sha256": sha256, **asdict(totals)},
        versions={},
        started_at="2026-11-29T20:00:00+00:00",
        answered=totals.calls,
        outputs_exact=totals.calls,
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        makespan_s=now_s - OWN_S,
        computed_prefill_tokens=computed,
        restored_tokens_per_rank=totals.prompt_tokens - computed,
        stored_tokens_per_rank=sum(written.values()) * CHUNK_TOKENS,
        dedup_chunks_per_rank=0,
        evicted_chunks_per_rank=tier.evicted,
        preemptions=0,
        gpu_kv_tokens=64,
        decisions=DecisionCounts.of(decisions),
    ).to_json()
    options = {**record["options"], **changed.pop("options", {})}
    (path / "run.json").write_text(json.dumps({**record, **changed, "options": options}))
    return Written(path, sum(written.values()), evicted)


def edit_record(path: Path, **changed: Any) -> None:
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, **changed}))


def write_sweep(path: Path, runs: list[dict[str, Any]], predictions: list[dict[str, Any]], trace: str = "t") -> Path:
    """sweep.json; entries get what they do not say."""
    defaults = {"repeat": 1, "options": {}, "status": "complete", "error": None, "prediction": None, "attempts": 1}
    times = {"started_at": "2026-11-29T20:00:00+00:00", "finished_at": None}
    path.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": "efficient-lmcache-sweep/1",
        "name": "small",
        "plan": {},
        "trace": {"name": trace},
        "runs": [{**defaults, **times, **run} for run in runs],
        "predictions": predictions,
    }
    (path / "sweep.json").write_text(json.dumps(record))
    return path


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _metrics(requests: int, share: float) -> str:
    """Sums that grow by `requests` times the seconds below, and hits that are three of four queries."""
    seconds = {
        "request_queue_time_seconds": WAITING_S,
        "time_to_first_token_seconds": WAITING_S + 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 0.25,
        "e2e_request_latency_seconds": WAITING_S + SERVICE_S,
    }
    lines = []
    for name, mean_s in seconds.items():
        lines += [
            f"# TYPE vllm:{name} histogram",
            f'vllm:{name}_bucket{{le="+Inf"}} {requests * share}',
            f"vllm:{name}_sum {requests * share * mean_s}",
            f"vllm:{name}_count {requests * share}",
        ]
    for name, tokens in (("queries", 400), ("hits", 300)):
        full = f"vllm:prefix_cache_{name}_total"
        lines += [f"# TYPE {full} counter", f"{full} {tokens * share}"]
    return "\n".join(lines) + "\n"
