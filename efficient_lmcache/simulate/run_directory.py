"""A simulated configuration as the run directory that a replay would have left: `compare` and `report` read it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache import __version__
from efficient_lmcache.replay.driver import CallRow
from efficient_lmcache.replay.rundir import (
    SIMULATED,
    DecisionCounts,
    RunDirectory,
    RunDirectoryError,
    RunRecord,
    WorkingSet,
)
from efficient_lmcache.replay.trace import TraceError, TraceReader
from efficient_lmcache.simulate.deployment import RECOMPUTE, Configuration, Simulated, gamma_h
from efficient_lmcache.simulate.options import Inputs, SimulateOptions
from efficient_lmcache.simulate.tiers import LMCacheTier
from efficient_lmcache.sizing.workload import Workload


def check_directories(out: Path | None, configurations: Sequence[Configuration]) -> None:
    """Raise RunDirectoryError, before anything is computed, where a run would overwrite something."""
    if out is None:
        return
    directories = [_directory(out, configuration) for configuration in configurations]
    for number, directory in enumerate(directories):
        RunDirectory.require_new(directory)
        if directory in directories[:number]:
            raise RunDirectoryError(f"{directory}: two configurations are called so; give each size and admission once")


def write_run(out: Path, made: Simulated, inputs: Inputs, options: SimulateOptions) -> Path:
    """Write run.json, calls.jsonl and, of a tier with an admission, decisions.jsonl. Returns the directory."""
    directory = RunDirectory.create(_directory(out, made.configuration))
    calls = list(_calls(made, inputs))
    decisions = list(_decisions(made, inputs))
    _write_lines(directory.calls, [asdict(row) for row in calls])
    if decisions:
        _write_lines(directory.decisions, decisions)
    directory.write_record(_record(made, inputs, options, calls, decisions))
    return directory.path


def _directory(out: Path, configuration: Configuration) -> Path:
    name, gib, link_gb_s = configuration.name, configuration.host_gib, configuration.link_gb_s
    tiers = f"-{gib:g}gib" if name != RECOMPUTE else ""
    return out / f"{name}{tiers}{f'-{link_gb_s:g}gbs' if link_gb_s else ''}"


def _calls(made: Simulated, inputs: Inputs) -> list[CallRow]:
    """In the order in which calls ended."""
    outcome, lanes = made.outcome, inputs.workload.chunks.lane
    numbers = np.zeros(len(lanes), np.int64)
    for lane in np.unique(lanes):
        mine = np.flatnonzero(lanes == lane)
        numbers[mine] = np.arange(len(mine))
    calls = outcome.calls
    return [
        CallRow(
            task=_task(inputs, call),
            call=int(numbers[call]),
            prompt_tokens=int(calls.prompt_tokens[call]),
            output_tokens=int(calls.output_tokens[call]),
            status="answered",
            exact=True,
            cached_tokens=int(calls.gpu_tokens[call] + calls.restored_tokens[call]),
            eligible_s=float(outcome.arrived_s[call]),
            dispatched_s=float(outcome.arrived_s[call]),
            finished_s=float(calls.finished_s[call]),
            engine=int(outcome.engine[call]),
        )
        for call in np.argsort(calls.finished_s, kind="stable").tolist()
    ]


def _decisions(made: Simulated, inputs: Inputs) -> list[dict[str, Any]]:
    looked_up_s = made.outcome.looked_up_s
    rows = [
        {
            "request_id": str(call),
            "now_s": float(looked_up_s[call]),
            "admission": made.configuration.name,
            **decision.record(),
            "task": _task(inputs, call),
        }
        for tier in made.tiers
        if isinstance(tier, LMCacheTier)
        for call, decision in tier.decisions.items()
    ]
    return sorted(rows, key=lambda row: float(row["now_s"]))


def _task(inputs: Inputs, call: int) -> str:
    lane, names = int(inputs.workload.chunks.lane[call]), inputs.workload.lanes
    return names[lane] if names else str(lane)


def _record(
    made: Simulated, inputs: Inputs, options: SimulateOptions, calls: list[CallRow], decisions: list[dict[str, Any]]
) -> RunRecord:
    workload, deployment, gib = inputs.workload, inputs.deployment, made.configuration.host_gib
    pool = min(deployment.pool.active_pool, workload.sessions)
    kv_tokens = deployment.engine.gpu_kv_tokens * deployment.engines
    return RunRecord(
        status="complete",
        admission=made.configuration.name,
        connector=SIMULATED,
        host_gib_per_rank=gib,
        active_pool=deployment.pool.active_pool,
        calls=made.calls,
        working_set=WorkingSet(
            pool=pool,
            mean_prompt_tokens=workload.mean_prompt_tokens,
            bytes=(pool - 1) * workload.mean_prompt_tokens * deployment.bytes_per_token,
            gamma_h=gamma_h(workload, deployment, gib),
            gamma_g=pool * workload.mean_prompt_tokens / kv_tokens,
        ),
        # This run's, of those that were asked for, and under a replay's names: `compare` and `--compare` read them.
        options={
            **options.to_json(),
            "host_gib": gib,
            "admission": made.configuration.name,
            "link_gb_s": made.configuration.link_gb_s,
            "block_tokens": workload.blocks.chunk_tokens,
            "tensor_parallel": options.ranks,
        },
        command=sys.argv,
        trace={
            "name": workload.name,
            "sha256": _identity(options, workload),
            "tasks": workload.sessions,
            "calls": made.calls,
            "prompt_tokens": made.prompt_tokens,
        },
        versions={"efficient_lmcache": __version__},
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        answered=made.calls,
        outputs_exact=made.calls,
        prompt_tokens=made.prompt_tokens,
        output_tokens=sum(row.output_tokens for row in calls),
        makespan_s=made.makespan_s,
        computed_prefill_tokens=made.computed_prefill_tokens,
        restored_tokens_per_rank=made.restored_tokens_per_rank,
        stored_tokens_per_rank=made.stored_tokens_per_rank,
        evicted_chunks_per_rank=made.evicted_chunks_per_rank,
        preemptions=made.preemptions,
        gpu_kv_tokens=deployment.engine.gpu_kv_tokens,
        decisions=DecisionCounts.of(decisions),
    )


def _identity(options: SimulateOptions, workload: Workload) -> str:
    """What tells this work from any other: a trace's own hash, else one of its prompts' lengths."""
    try:
        with TraceReader(options.trace or "") as reader:
            return reader.sha256
    except TraceError:
        return hashlib.sha256(workload.chunks.prompt_tokens.tobytes()).hexdigest()


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
