"""Table 13: what rewriting the history does to reuse, for runs whose traces differ by a condense step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from efficient_lmcache.replay.trace import TraceReader
from efficient_lmcache.report.latency import metric_increase
from efficient_lmcache.report.prefixes import call_prefixes
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
        cache_stable_share: of the trace's prompt tokens.
        computed_prefill_tokens, makespan_s: of the run.
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
    makespan_s: float | None


def condenser_table(runs: Sequence[Run]) -> tuple[CondenserRow, ...]:
    """The complete runs whose traces can be read.

    Raises:
        Unavailable: no trace of theirs has a condense step.
    """
    complete = [run for run in runs if run.record["status"] == "complete"]
    rows = [row for run in complete if isinstance(row := attempt(partial(_row, run)), CondenserRow)]
    if all(row.condenser == NO_CONDENSER for row in rows):
        raise Unavailable("no run whose trace can be read replays a trace with a condense step")
    return tuple(sorted(rows, key=lambda row: (row.condenser != NO_CONDENSER, row.condenser, row.run)))


def _row(run: Run) -> CondenserRow:
    with TraceReader(run.trace) as reader:
        steps = [step for step in reader.manifest.history if step.get("step") == CONDENSE_STEP]
    calls = [call for task in call_prefixes(run.trace).values() for call in task]
    prompt_tokens = sum(call.prompt for call in calls)
    hit_rate = attempt(lambda: prefix_hit_rate(run))
    return CondenserRow(
        run=run.name,
        directory=str(run.path),
        trace_name=run.record["trace"]["name"],
        condenser=", then ".join(map(_words, steps)) or NO_CONDENSER,
        active_pool=run.record["active_pool"],
        admission=run.record["admission"],
        host_gib_per_rank=run.record["host_gib_per_rank"],
        prefix_hit_rate=None if isinstance(hit_rate, Absent) else hit_rate,
        mean_prompt_tokens=prompt_tokens / len(calls),
        cache_stable_share=sum(call.cache_stable for call in calls) / prompt_tokens,
        computed_prefill_tokens=run.record["computed_prefill_tokens"],
        makespan_s=run.record["makespan_s"],
    )


def _words(step: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in step.items() if name != "step")


def prefix_hit_rate(run: Run) -> float:
    """Tokens that the GPU's prefix cache had over the tokens looked up in it. Raises Unavailable without metrics."""
    hits, queries = (metric_increase(run, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries"))
    if not queries:
        raise Unavailable("no token was looked up in the GPU's prefix cache")
    return hits / queries
