"""Table 3: one row per run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from efficient_lmcache.replay.compare import compare
from efficient_lmcache.replay.rundir import SIMULATED
from efficient_lmcache.report.runs import Run

GIB = 1 << 30
# As the paper names them, in its order.
_CONFIGURATIONS = {
    "recompute": "Recompute",
    "none": "Offload",
    "fixed": "Fixed write admission",
    "conditioned": "Conditioned admission",
}
_CONNECTORS = {"lmcache": " (LMCache's)", SIMULATED: " (simulated)"}
_COUNTED = ("pressure", "declined", "declined_chunks", "estimate_above", "full_and_evicting", "stale_reports")
_COPIED = (
    "admission",
    "connector",
    "active_pool",
    "host_gib_per_rank",
    "status",
    "error",
    "makespan_s",
    "computed_prefill_tokens",
    "restored_tokens_per_rank",
    "stored_tokens_per_rank",
    "preemptions",
    "evicted_chunks_per_rank",
    "dedup_chunks_per_rank",
    "calls",
    "outputs_exact",
    "errors",
    "skipped",
)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. Counts that it ended too early to know are None.

    Attributes:
        name, directory: of the run.
        configuration: as the paper names it, with kappa and theta where they are not the default's, and with what is
            not one engine with LMCache in process.
        admission: recompute | none | fixed | conditioned.
        connector: none | efficient | lmcache | simulated.
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
        estimate_above, full_and_evicting, stale_reports: decisions by the factors of Eq. 10 (Appendix D's counters).
        calls, outputs_exact, errors, skipped: of the trace, and what came of them.
        exact: every call returned exactly the recorded tokens, or was simulated.
        prefill_to_offload, makespan_to_offload: ratios to the offload run of the same tier and pool.
        trace_name, trace_sha256: of what was replayed; only runs of one trace compare. The name tells traces apart.
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
    estimate_above: int
    full_and_evicting: int
    stale_reports: int
    calls: int
    outputs_exact: int
    errors: int
    skipped: int
    exact: bool
    prefill_to_offload: float | None
    makespan_to_offload: float | None
    trace_name: str
    trace_sha256: str | None

    @property
    def simulated(self) -> bool:
        """Nothing ran: the simulator made these numbers."""
        return self.connector == SIMULATED


def runs_table(runs: Sequence[Run]) -> tuple[RunRow, ...]:
    """Large pools first, then recompute, offload, fixed and conditioned admission, small tiers first."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        # Only runs of one trace compare; one whose trace could not be opened compares with none.
        groups.setdefault(run.record["trace"]["sha256"] or run.path, []).append(run)
    rows = [row for group in groups.values() for row in _rows_of_one_trace(group)]
    return tuple(sorted(_with_distinct_traces(rows), key=_order))


def _with_distinct_traces(rows: Sequence[RunRow]) -> list[RunRow]:
    """Different traces of one name get the beginnings of their hashes."""
    shared = Counter(name for name, _ in {(row.trace_name, row.trace_sha256) for row in rows})
    return [
        replace(row, trace_name=f"{row.trace_name} ({row.trace_sha256[:8]}…)")
        if shared[row.trace_name] > 1 and row.trace_sha256
        else row
        for row in rows
    ]


def _rows_of_one_trace(runs: Sequence[Run]) -> list[RunRow]:
    compared = {row["run"]: row for row in compare([run.path for run in runs])}
    return [_row(run, compared[str(run.path)]) for run in runs]


def _row(run: Run, compared: dict[str, Any]) -> RunRow:
    record, options = run.record, run.options
    working_set, decisions = record["working_set"], record["decisions"]
    working_set_bytes = working_set["bytes"]
    kappa, theta = options.get("write_threshold_chunks"), options.get("occupancy_threshold")
    return RunRow(
        name=run.name,
        directory=str(run.path),
        configuration=_configuration(record, kappa, theta),
        working_set_gib_per_rank=None if working_set_bytes is None else working_set_bytes / GIB,
        gamma_h=working_set["gamma_h"],
        gamma_g=working_set["gamma_g"],
        write_threshold_chunks=kappa,
        occupancy_threshold=theta,
        repeat=run.repeat,
        decisions=decisions["total"],
        **{name: decisions[name] for name in _COUNTED},
        exact=record["status"] == "complete" and record["outputs_exact"] == record["calls"],
        prefill_to_offload=compared["computed_prefill_tokens_to_offload"],
        makespan_to_offload=compared["makespan_s_to_offload"],
        trace_name=record["trace"]["name"],
        trace_sha256=record["trace"]["sha256"],
        **{name: record[name] for name in _COPIED},
    )


def _configuration(record: dict[str, Any], kappa: int | None, theta: float | None) -> str:
    engines = len(record["engines"]) or 1
    set_to = [f"κ = {kappa}"] if kappa is not None else []
    set_to += [f"θ = {theta:g}"] if theta is not None else []
    set_to += [f"{engines} engines"] if engines > 1 else []
    if record["mode"] == "server":
        set_to.append("lazy server" if record["options"].get("lazy_offload") else "server")
    name = _CONFIGURATIONS[record["admission"]] + _CONNECTORS.get(record["connector"], "")
    return ", ".join([name, *set_to])


def _order(row: RunRow) -> tuple[Any, ...]:
    kappa, theta = row.write_threshold_chunks, row.occupancy_threshold
    return (
        row.trace_name,
        -row.active_pool,
        list(_CONFIGURATIONS).index(row.admission),
        row.connector,
        -1 if kappa is None else kappa,
        -1 if theta is None else theta,
        row.host_gib_per_rank,
        row.repeat,
        row.name,
    )
