"""A plan on a trace and a model: the runs, in the order in which they will run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_lmcache.core.workingset import reuse_working_set_bytes
from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.preflight import ModelFacts, longest_call_tokens, max_model_len_tokens, read_model
from efficient_lmcache.replay.trace import TraceReader
from efficient_lmcache.sweep.plan import Matrix, Plan, PlanError

_GIB = 1 << 30
# In the order of a run's name; each multiplies the runs, and is left out where the plan does not give it.
_AXES = (
    "active_pool",
    "admission",
    "connector",
    "host_gib",
    "gamma_h",
    "write_threshold_chunks",
    "occupancy_threshold",
    "gpu_kv_tokens",
    "gpu_memory_utilization",
    "prefix_caching",
    "mode",
    "lazy_offload",
)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        name: unique in the sweep; the run directory's name.
        repeat: 1 for the first run of its configuration.
        options: of its first attempt.
        context_tokens: what its server takes.
    """

    name: str
    repeat: int
    options: RunOptions
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What a plan is run on: its trace and model, and what they decide."""

    trace: TraceReader
    model_path: Path
    model: ModelFacts
    longest_tokens: int

    @property
    def mean_prompt_tokens(self) -> float:
        """N."""
        return self.trace.totals.prompt_tokens / self.trace.totals.calls

    def working_set_bytes(self, active_pool: int) -> float:
        """Eq. 5, per rank."""
        pool = min(active_pool, self.trace.totals.tasks)
        return reuse_working_set_bytes(pool, self.mean_prompt_tokens, self.model.bytes_per_token)


def read_subject(plan: Plan, trace: Path | None, model: Path | None) -> Subject:
    """Open the trace and read the model; `trace` and `model` go before the plan's own. Decodes every call once.

    Raises:
        PlanError: neither the plan nor the caller names one of them.
        TraceError, ReplayOptionError: it cannot be read.
    """
    trace_path, model_path = trace or plan.trace, model or plan.model
    for name, value in (("trace", trace_path), ("model", model_path)):
        if value is None:
            raise PlanError(f"the plan names no {name}; pass --{name}")
    assert trace_path is not None
    assert model_path is not None
    facts = read_model(model_path, plan.server.tensor_parallel)
    reader = TraceReader(trace_path)
    if not reader.tasks:
        raise PlanError(f"{trace_path}: has no tasks; there is nothing to replay")
    return Subject(reader, model_path, facts, longest_call_tokens(reader, facts.vocab_size))


def expand(plan: Plan, subject: Subject, out: Path) -> list[PlannedRun]:
    """Every run of the plan, its directory in `out`/runs.

    Raises:
        PlanError: two runs of one name, or a combination that no replay can be made with.
    """
    runs: list[PlannedRun] = []
    for number, matrix in enumerate(plan.runs):
        for values in _combinations(matrix):
            for repeat in range(1, matrix.repeats + 1):
                name = _name(values, repeat)
                try:
                    options = _options(plan, subject, values, out / "runs" / name)
                    context_tokens = max_model_len_tokens(options, subject.model, subject.longest_tokens)
                except ReplayOptionError as error:
                    raise PlanError(f"runs[{number}], {name}: {error}") from error
                if any(run.name == name for run in runs):
                    raise PlanError(f"runs[{number}]: {name} is planned already; use repeats to run it again")
                runs.append(PlannedRun(name, repeat, options, context_tokens))
    return runs


def _combinations(matrix: Matrix) -> Iterator[dict[str, Any]]:
    axes = {name: values for name in _AXES if (values := getattr(matrix, name)) is not None}
    for combination in itertools.product(*axes.values()):
        yield dict(zip(axes, combination, strict=True))


def _options(plan: Plan, subject: Subject, values: dict[str, Any], out: Path) -> RunOptions:
    values = dict(values)
    pool = values["active_pool"]
    gamma_h = values.pop("gamma_h", None)
    if gamma_h is not None:
        if min(pool, subject.trace.totals.tasks) == 1:
            raise ReplayOptionError("gamma_h sizes no tier for a single agent, which has no working set; give host_gib")
        tiers = 1 if values.get("mode", plan.server.mode) == "server" else plan.server.engines
        values["host_gib"] = subject.working_set_bytes(pool) / gamma_h / tiers / _GIB
    return RunOptions(
        **{
            "trace": subject.trace.path,
            "model": subject.model_path,
            "out": out,
            "host_gib": 0.0,
            "gpu_kv_tokens": _gpu_kv_tokens(plan, subject),
            **plan.server.model_dump(exclude={"gpu_kv_tokens", "gamma_g"}),
            **plan.replay.model_dump(),
            **values,
        }
    )


def _gpu_kv_tokens(plan: Plan, subject: Subject) -> int | None:
    if plan.server.gamma_g is None:
        return plan.server.gpu_kv_tokens
    pool = max(pool for matrix in plan.runs for pool in matrix.active_pool)
    tokens = min(pool, subject.trace.totals.tasks) * subject.mean_prompt_tokens / plan.server.gamma_g
    return int(tokens / plan.server.engines)


def _name(values: dict[str, Any], repeat: int) -> str:
    spelled = {
        "active_pool": "a{}",
        "admission": "{}",
        "host_gib": "{:.12g}gib",
        "gamma_h": "g{:.12g}",
        "write_threshold_chunks": "k{}",
        "occupancy_threshold": "t{:.12g}",
        "gpu_kv_tokens": "kv{}",
        "gpu_memory_utilization": "m{:.12g}",
        "mode": "{}",
    }
    parts = [spelled[name].format(value) for name, value in values.items() if name in spelled]
    if values["connector"] == "lmcache":
        parts.append("lmcache")
    if not values["prefix_caching"]:
        parts.append("uncached")
    if values.get("lazy_offload"):
        parts.append("lazy")
    if repeat > 1:
        parts.append(f"r{repeat}")
    return "-".join(parts)
