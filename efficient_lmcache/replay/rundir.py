"""The run directory: what one replay leaves behind.

run.json            the run's record (`RunRecord`), valid from the start on, whatever happens
calls.jsonl         one row per call (`driver.CallRow`), in the order in which calls ended
decisions.jsonl     one row per admission decision (`core.admission.Decision`), of our connector
server.log          the server's output
metrics-before.txt  /metrics before the first call and
metrics-after.txt   after the last one

Of several engines, number 0 has server-0.log, metrics-before-0.txt and metrics-after-0.txt; decisions.jsonl has all of
theirs. What engines share has its own files: lmcache-server.log, lmcache-metrics-before.txt and -after.txt, redis.log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter

from efficient_lmcache.replay.options import ADMISSIONS, CONNECTORS, MODES
from efficient_lmcache.replay.run_fields import OptionFields, TraceFields
from efficient_lmcache.replay.shapes import Count, Number, of_shape, one_of
from efficient_lmcache.replay.stored import read_stored

SCHEMA = "efficient-lmcache-run/1"
NO_CONNECTOR, SIMULATED = "none", "simulated"
STATUSES = ("running", "complete", "interrupted", "failed")


class RunDirectoryError(ValueError):
    """A run directory cannot be created or read; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class DecisionCounts:
    """Totals over decisions.jsonl.

    Attributes:
        declined_chunks: new full chunks of the declined requests.
        estimate_above, full_and_evicting: decisions in which that factor of Eq. 10 held.
        stale_reports: decisions without a fresh tier report.
    """

    total: Count = 0
    pressure: Count = 0
    declined: Count = 0
    declined_chunks: Count = 0
    estimate_above: Count = 0
    full_and_evicting: Count = 0
    stale_reports: Count = 0

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]]) -> DecisionCounts:
        counts = dict.fromkeys(cls.__dataclass_fields__, 0)
        for row in rows:
            counts["total"] += 1
            counts["pressure"] += row["pressure"]
            counts["declined"] += not row["save"]
            counts["declined_chunks"] += 0 if row["save"] else row["new_full_chunks"]
            counts["estimate_above"] += row["estimate_above"]
            counts["full_and_evicting"] += bool(row["full_and_evicting"])
            counts["stale_reports"] += not row["report_fresh"]
        return cls(**counts)


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Eq. 5 for the whole trace: A is the replay's pool, N the trace's mean prompt. All None but A without a trace.

    Attributes:
        pool: A, tasks at the same time: the active pool, or as many as the trace has if those are fewer.
        bytes: (A - 1) N beta per rank.
        gamma_h: those bytes over the host tier's, of all engines' tiers together if each has one; None without a tier.
        gamma_g: A N over all GPUs' KV tokens; None before the servers have said how many those are.
    """

    pool: Count
    mean_prompt_tokens: Number | None
    bytes: Number | None
    gamma_h: Number | None
    gamma_g: Number | None


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One of several engines' part of the run; names are those of `RunRecord`, which has the sums.

    What a shared LMCache server counts for all engines together is None here.
    """

    server_command: list[str]
    answered: Count = 0
    computed_prefill_tokens: Count | None = None
    restored_tokens_per_rank: Count | None = None
    stored_tokens_per_rank: Count | None = None
    dedup_chunks_per_rank: Count | None = None
    evicted_chunks_per_rank: Count | None = None
    preemptions: Count | None = None
    gpu_kv_tokens: Count | None = None
    decisions: DecisionCounts = field(default_factory=DecisionCounts)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json. Counts that need the server's last metrics are None where the run ended without them.

    Attributes:
        status: running | complete | interrupted | failed.
        error: why the run is not complete.
        calls: calls of the trace (0 if it cannot be opened); a complete run without errors has that many exact outputs.
        answered, errors, skipped: calls with an output, calls without, and calls whose task had failed.
        prompt_tokens, output_tokens: of the answered calls.
        computed_prefill_tokens: prompt tokens that vLLM computed, per request's first prefill.
        makespan_s: from the first dispatch to the last response.
        options, command, server_command, trace: what was run; `server_command` is the first engine's.
        mode: in_process | server; in_process where there is no tier.
        lmcache_server_command: empty without such a server.
        dropped_chunks_per_rank: that an LMCache server was asked to store and had no room for; None without one.
        engines: one for each, if there are several.
    """

    status: Annotated[str, one_of(STATUSES)]
    admission: Annotated[str, one_of(ADMISSIONS)]
    connector: Annotated[str, one_of((*CONNECTORS, NO_CONNECTOR, SIMULATED))]
    host_gib_per_rank: Number
    active_pool: Count
    calls: Count
    working_set: WorkingSet
    options: Annotated[dict[str, Any], of_shape(OptionFields)]
    command: list[str]
    trace: Annotated[dict[str, Any], of_shape(TraceFields)]
    versions: dict[str, str]
    started_at: str
    server_command: list[str] = field(default_factory=list)
    error: str | None = None
    answered: Count = 0
    outputs_exact: Count = 0
    errors: Count = 0
    skipped: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    makespan_s: Number | None = None
    computed_prefill_tokens: Count | None = None
    restored_tokens_per_rank: Count | None = None
    stored_tokens_per_rank: Count | None = None
    dedup_chunks_per_rank: Count | None = None
    evicted_chunks_per_rank: Count | None = None
    preemptions: Count | None = None
    gpu_kv_tokens: Count | None = None
    decisions: DecisionCounts = field(default_factory=DecisionCounts)
    mode: Annotated[str, one_of(MODES)] = "in_process"
    lmcache_server_command: list[str] = field(default_factory=list)
    dropped_chunks_per_rank: Count | None = None
    engines: list[EngineRecord] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


_RECORD = TypeAdapter(RunRecord)


class RunDirectory:
    """Paths and writers of one run; `create` refuses a directory that holds anything.

    Args:
        engine: one of several, whose files these are; None: the run's.
    """

    def __init__(self, path: Path, engine: int | None = None) -> None:
        self.path = path
        self._part = "" if engine is None else f"-{engine}"
        self.record = path / "run.json"
        self.calls = path / "calls.jsonl"
        self.decisions = path / f"decisions{self._part}.jsonl"
        self.server_log = path / f"server{self._part}.log"

    def of_engine(self, engine: int, engines: int) -> RunDirectory:
        """Where one of `engines` engines has its files; an only one's are the run's."""
        return RunDirectory(self.path, engine) if engines > 1 else self

    @staticmethod
    def require_new(path: Path) -> None:
        try:
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be read: {error.strerror}") from error
        if taken:
            raise RunDirectoryError(f"{path}: exists and is not an empty directory; name a new one")

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        cls.require_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be created: {error.strerror}") from error
        return cls(path)

    def metrics(self, moment: str) -> Path:
        """`moment` is before or after."""
        return self.path / f"metrics-{moment}{self._part}.txt"

    def lmcache_metrics(self, moment: str) -> Path:
        """Of the LMCache server."""
        return self.path / f"lmcache-metrics-{moment}.txt"

    def write_record(self, record: RunRecord) -> None:
        """Replace run.json in one step: a reader sees the old record or the new one."""
        partial = self.record.with_suffix(".partial")
        partial.write_text(json.dumps(record.to_json(), indent=2, allow_nan=False) + "\n")
        os.replace(partial, self.record)

    def decision_rows(self) -> Iterable[dict[str, Any]]:
        """The decisions logged so far; a last line cut short by a killed server is left out."""
        if not self.decisions.exists():
            return
        with open(self.decisions) as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)

    def merge_decisions(self, engines: int) -> None:
        """Make one log of several engines', in the order of their clock, which processes of one machine share."""
        parts = [self.of_engine(number, engines) for number in range(engines)]
        rows = [{**row, "engine": number} for number, part in enumerate(parts) for row in part.decision_rows()]
        if not rows:
            return
        rows.sort(key=lambda row: float(row["now_s"]))
        self.decisions.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for part in parts:
            part.decisions.unlink(missing_ok=True)


def run_directories(path: Path) -> list[Path]:
    """A run's directory itself, or the runs in a sweep's, or in a directory of runs; `path` where there is none."""
    if (path / "run.json").exists():
        return [path]
    return sorted(file.parent for pattern in ("*", "runs/*") for file in path.glob(f"{pattern}/run.json")) or [path]


def read_record(path: Path) -> dict[str, Any]:
    """The run.json of a run directory as a dictionary with the fields of `RunRecord`.

    Raises:
        RunDirectoryError: it is absent, not JSON, of another schema, or lacks or garbles a field.
    """
    return read_stored(path / "run.json", SCHEMA, _RECORD, "replay run", RunDirectoryError).to_json()
