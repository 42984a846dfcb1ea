"""Table 3: one row per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from efficient_lmcache.report.runs import Run


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. Counts that it ended too early to know are None.

    Attributes:
        name, directory: of the run.
        configuration: as the paper names it, with kappa and theta where they are not the default's.
        admission: recompute | none | fixed | conditioned.
        connector: none | efficient | lmcache.
        active_pool: A.
        host_gib_per_rank: C_H; 0 without a tier.
        working_set_gib_per_rank: (A - 1) N beta of the whole trace (Eq. 5).
        gamma_h, gamma_g: the working set over the tier, A N over the GPU's KV.
        write_threshold_chunks, occupancy_threshold: kappa and theta where the run set them.
        repeat: 1 for the first run of this configuration.
        status, error: of run.json.
        makespan_s, computed_prefill_tokens, preemptions: as in run.json.
        restored_tokens_per_rank, stored_tokens_per_rank: host to GPU ("retrieved"), GPU to host.
        evicted_chunks_per_rank, dedup_chunks_per_rank: evicted to make room; not copied because already there.
        decisions, pressure, declined, declined_chunks: admission decisions, and those chunks not written.
        calls, outputs_exact, errors, skipped: of the trace, and what came of them.
        exact: every call returned exactly the recorded tokens.
        prefill_to_offload, makespan_to_offload: ratios to the offload run of the same tier and pool.
        trace_name, trace_sha256: of what was replayed; only runs of one trace compare.
    """

    name: str
    directory: str
    configuration: str
    admission: str
    connector: str
    active_pool: int
    host_gib_per_rank: float
    working_set_gib_per_rank: float | None
    gamma_h: float | None
    gamma_g: float | None
    write_threshold_chunks: int | None
    occupancy_threshold: float | None
    repeat: int
    status: str
    error: str | None
    makespan_s: float | None
    computed_prefill_tokens: int | None
    restored_tokens_per_rank: int | None
    stored_tokens_per_rank: int | None
    preemptions: int | None
    evicted_chunks_per_rank: int | None
    dedup_chunks_per_rank: int | None
    decisions: int
    pressure: int
    declined: int
    declined_chunks: int
    calls: int
    outputs_exact: int
    errors: int
    skipped: int
    exact: bool
    prefill_to_offload: float | None
    makespan_to_offload: float | None
    trace_name: str
    trace_sha256: str | None


def runs_table(runs: Sequence[Run]) -> tuple[RunRow, ...]:
    """Large pools first, then recompute, offload, fixed and conditioned admission, small tiers first."""
    raise NotImplementedError
