"""The policies of `core.admission`, asked again about a run's recorded facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from efficient_lmcache.core.admission import ADMISSIONS, AdmissionParameters, Decision, RequestFacts
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.report.runs import Run

# A report's receipt is recorded as the age at the decision and the time of the log line, which is a moment later.
_SAME_REPORT_S = 0.05

Facts = tuple[RequestFacts, TierReport | None, float]


def recorded_parameters(run: Run) -> AdmissionParameters:
    """What the run's policy was set to, as far as its decisions and options say; the rest is the default."""
    first = run.decisions[0]
    theta = run.options.get("occupancy_threshold")
    parameters = AdmissionParameters(
        chunk_tokens=run.chunk_tokens,
        bytes_per_token=first["estimate"]["bytes_per_token"],
        configured_capacity_bytes=first["capacity_bytes"],
        write_threshold_chunks=first["write_threshold_chunks"],
    )
    return parameters if theta is None else replace(parameters, occupancy_threshold=theta)


def recorded_facts(run: Run) -> list[Facts]:
    """What `decide` was given, for every decision. Decisions that saw one report share it."""
    facts: list[Facts] = []
    report: TierReport | None = None
    for row in run.decisions:
        report = _report(row, report, run.chunk_tokens)
        request = RequestFacts(row["task"], row["prompt_tokens"], row["host_match_tokens"])
        facts.append((request, report, row["now_s"]))
    return facts


def redecide(policy: str, parameters: AdmissionParameters, facts: Sequence[Facts]) -> Iterator[Decision]:
    """The decisions of a fresh policy, by its name in `ADMISSIONS`."""
    deciding = ADMISSIONS[policy](parameters)
    return (deciding.decide(*fact) for fact in facts)


def _report(row: dict[str, Any], previous: TierReport | None, chunk_tokens: int) -> TierReport | None:
    if row["report_age_s"] is None:
        return None
    chunk_bytes = chunk_tokens * row["estimate"]["bytes_per_token"]
    capacity_chunks = row["capacity_bytes"] // chunk_bytes
    received_s = row["now_s"] - row["report_age_s"]
    report = TierReport(
        engine_id="recorded",
        sequence=0,
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_bytes,
        registered_chunks=round(row["occupancy"] * capacity_chunks),
        capacity_chunks=capacity_chunks,
        evicted_chunks=row["evicted_chunks"],
        evicted_chunks_total=0,
        received_s=received_s,
        eviction_batch_chunks=row.get("eviction_batch_chunks", 0),
        backing_tiers=row.get("backing_tiers", 0),
    )
    if previous is not None and abs(previous.received_s - received_s) < _SAME_REPORT_S:
        return previous if replace(report, received_s=previous.received_s) == previous else report
    return report
