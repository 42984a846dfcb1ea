"""Table 13: what rewriting the history does to reuse, for runs whose traces differ by a condense step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from efficient_lmcache.report.runs import Run


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
    raise NotImplementedError
