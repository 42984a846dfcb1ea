"""Table 13: what rewriting the history does to reuse, for runs whose traces differ by a condense step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from efficient_lmcache.replay.condense import per_call
from efficient_lmcache.replay.trace import TraceReader
from efficient_lmcache.report.latency import metric_increase
from efficient_lmcache.report.runs import Absent, Run, Unavailable, attempt

CONDENSE_STEP = "condense"
NO_CONDENSER = "none"


@dataclass(frozen=True, slots=True)
class CondenserRow:
    """One run. Mean GPU KV utilization, the table's other column, is not known: /metrics has it as a gauge only.

    Attributes:
        run, trace_name: names.
        condenser: the trace's condense steps in words; "none" without one.
        active_pool, admission, host_gib_per_rank: of the run.
        prefix_hit_rate: tokens found in the GPU's prefix cache over tokens looked up; None without metrics.
        mean_prompt_tokens: N.
        cache_stable_share: of the trace's prompt tokens; see `replay.condense.PerCall`.
        computed_prefill_tokens, restored_tokens_per_rank, makespan_s: of the run.
        computed_to_recorded: computed prefill over that of the run of the same trace as recorded under the same
            options; None without such a run.
    """

    run: str
    directory: str
    trace_name: str
    condenser: str
    active_pool: int
    admission: str
    host_gib_per_rank: float
    prefix_hit_rate: float | None
    mean_prompt_tokens: float | None
    cache_stable_share: float | None
    computed_prefill_tokens: int | None
    restored_tokens_per_rank: int | None
    makespan_s: float | None
    computed_to_recorded: float | None = None


def condenser_table(runs: Sequence[Run]) -> tuple[CondenserRow, ...]:
    """The complete runs whose traces can be read.

    Raises:
        Unavailable: no trace of theirs has a condense step.
    """
    complete = [run for run in runs if run.record["status"] == "complete"]
    made = [made for run in complete if not isinstance(made := attempt(partial(_row, run)), Absent)]
    if all(row.condenser == NO_CONDENSER for row, _ in made):
        raise Unavailable("no run whose trace can be read replays a trace with a condense step")
    recorded = {key: row.computed_prefill_tokens for row, key in made if row.condenser == NO_CONDENSER}
    rows = [replace(row, computed_to_recorded=_ratio(row, recorded.get(key))) for row, key in made]
    return tuple(sorted(rows, key=lambda row: (row.condenser != NO_CONDENSER, row.condenser, row.run)))


def _ratio(row: CondenserRow, recorded_tokens: int | None) -> float | None:
    computed = row.computed_prefill_tokens
    return computed / recorded_tokens if computed is not None and recorded_tokens else None


def _row(run: Run) -> tuple[CondenserRow, str]:
    """A run's row, and what it has in common with those that differ by their condensers alone."""
    with TraceReader(run.trace) as reader:
        manifest = reader.manifest
        trace = per_call(reader)
    steps = [step for step in manifest.history if step.get("step") == CONDENSE_STEP]
    others = [step for step in manifest.history if step.get("step") != CONDENSE_STEP]
    options = {name: value for name, value in run.options.items() if name not in ("out", "trace")}
    hit_rate = attempt(lambda: prefix_hit_rate(run))
    row = CondenserRow(
        run=run.name,
        directory=str(run.path),
        trace_name=run.record["trace"]["name"],
        condenser=", then ".join(map(_words, steps)) or NO_CONDENSER,
        active_pool=run.record["active_pool"],
        admission=run.record["admission"],
        host_gib_per_rank=run.record["host_gib_per_rank"],
        prefix_hit_rate=None if isinstance(hit_rate, Absent) else hit_rate,
        mean_prompt_tokens=trace.prompt_tokens,
        cache_stable_share=trace.cache_stable_share,
        computed_prefill_tokens=run.record["computed_prefill_tokens"],
        restored_tokens_per_rank=run.record["restored_tokens_per_rank"],
        makespan_s=run.record["makespan_s"],
    )
    return row, json.dumps([manifest.source, others, options], sort_keys=True)


def _words(step: dict[str, Any]) -> str:
    """``recent (max_events 20, keep_first 1)``."""
    options = ", ".join(f"{name} {value}" for name, value in step.items() if name not in ("step", "condenser"))
    return f"{step.get('condenser')} ({options})" if options else str(step.get("condenser"))


def prefix_hit_rate(run: Run) -> float:
    """Tokens that the GPU's prefix cache had over the tokens looked up in it. Raises Unavailable without metrics."""
    hits, queries = (metric_increase(run, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries"))
    if not queries:
        raise Unavailable("no token was looked up in the GPU's prefix cache")
    return hits / queries
