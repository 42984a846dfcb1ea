"""Run directories and sweeps as the analyses read them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from efficient_lmcache.replay.metrics import Snapshot
from efficient_lmcache.replay.run_fields import CallFields, DecisionFields
from efficient_lmcache.replay.rundir import SIMULATED, RunDirectory, read_record
from efficient_lmcache.replay.stored import read_rows, read_stored
from efficient_lmcache.replay.trace import TraceError, TraceReader
from efficient_lmcache.report.sweep_fields import SweepFields

SWEEP_FILE = "sweep.json"
SWEEP_SCHEMA = "efficient-lmcache-sweep/1"
_UNCOUNTED = 0
_SWEEP = TypeAdapter(SweepFields)

T = TypeVar("T")


class ReportError(ValueError):
    """The report's input cannot be read; the message names the file and says what is wrong."""


class Unavailable(Exception):
    """A run's files do not allow an analysis; the message says why."""


@dataclass(frozen=True, slots=True)
class Absent:
    """What stands in an analysis' place where it could not be made."""

    reason: str


def attempt(analysis: Callable[[], T]) -> T | Absent:
    """The analysis' result, or why there is none."""
    try:
        return analysis()
    except (Unavailable, TraceError, ImportError) as error:
        return Absent(str(error))


def to_json(value: Any) -> Any:
    """Results as JSON-able values: dataclasses become dictionaries, tuples lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, dict):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(entry) for entry in value]
    return value


@dataclass(frozen=True)
class Run:
    """One run directory; its files are read when they are first asked for.

    Attributes:
        path: the directory.
        record: run.json.
        name: the sweep's name of the run, else the directory's.
        repeat: 1 for the first run of its configuration, 2 for the next; from the sweep, else by starting time.
        traces: where the trace may lie, beside where run.json says.
    """

    path: Path
    record: dict[str, Any]
    name: str
    repeat: int = 1
    traces: tuple[Path, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = self.record["options"]
        return options

    @property
    def chunk_tokens(self) -> int:
        """b."""
        return int(self.options["chunk_tokens"])

    @cached_property
    def decisions(self) -> list[dict[str, Any]]:
        """Rows of decisions.jsonl.

        Raises:
            Unavailable: the run has none: no connector of ours, or it ended too early.
        """
        rows = read_rows(RunDirectory(self.path).decisions, DecisionFields, ReportError)
        if not rows:
            connector = self.record["connector"]
            raise Unavailable(
                "no decision was logged"
                if connector in ("efficient", SIMULATED)
                else f"no decisions: its connector is {connector!r}, and only 'efficient' logs them"
            )
        return rows

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """Rows of calls.jsonl, in the order in which calls ended.

        Raises:
            Unavailable: no call ended.
        """
        rows = read_rows(RunDirectory(self.path).calls, CallFields, ReportError)
        if not rows:
            raise Unavailable("no call ended")
        return rows

    @cached_property
    def metrics(self) -> tuple[Snapshot, Snapshot]:
        """The server's /metrics before the first and after the last call.

        Raises:
            Unavailable: the run ended without one of them.
        """
        snapshots = []
        for moment in ("before", "after"):
            file = RunDirectory(self.path).metrics(moment)
            try:
                snapshots.append(Snapshot.parse(file.read_text()))
            except OSError:
                raise Unavailable(f"no {file.name}: the run ended without it") from None
            except ValueError as error:
                raise ReportError(f"{file}: not a Prometheus exposition ({error})") from error
        return snapshots[0], snapshots[1]

    @cached_property
    def trace(self) -> Path:
        """The trace that was replayed, identified by its SHA-256.

        Raises:
            Unavailable: it is in none of the places where it could be.
        """
        wanted = self.record["trace"]["sha256"]
        named = Path(self.options["trace"])
        beside = [parent / named.name for parent in self.path.resolve().parents[:3]]
        for place in (*self.traces, named, *beside):
            try:
                with TraceReader(place) as reader:
                    if reader.sha256 == wanted:
                        return place
            except (TraceError, ValueError):
                continue
        raise Unavailable(f"the trace {named.name} is not where the run had it; name it with --trace")


@dataclass(frozen=True, slots=True)
class Sweep:
    """sweep.json.

    Attributes:
        path: the sweep's directory.
        record: sweep.json as it is.
    """

    path: Path
    record: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.record["name"])


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a report is about: all runs, those of sweeps included, and the sweeps themselves."""

    runs: tuple[Run, ...]
    sweeps: tuple[Sweep, ...] = ()


def read_inputs(paths: Sequence[Path], traces: Iterable[Path] = ()) -> Inputs:
    """Runs, sweeps, and directories that hold runs.

    Args:
        paths: each a directory with a run.json, with a sweep.json, or with such directories in it.
        traces: files that may be the runs' traces.

    Raises:
        ReportError: a path with nothing to report on.
        RunDirectoryError: a run.json that cannot be read.
    """
    runs: list[Run] = []
    sweeps: list[Sweep] = []
    for path in paths:
        found = _read_path(path, tuple(traces))
        runs += found.runs
        sweeps += found.sweeps
    unique = {run.path.resolve(): run for run in reversed(runs)}
    if not unique and not sweeps:
        raise ReportError("name at least one directory of `replay run` or `replay sweep`")
    return Inputs(tuple(_with_repeats(list(reversed(unique.values())))), tuple(sweeps))


def _read_path(path: Path, traces: tuple[Path, ...]) -> Inputs:
    if (path / SWEEP_FILE).exists():
        return _read_sweep(path, traces)
    if (path / "run.json").exists():
        return Inputs((_read_run(path, traces),))
    if not path.is_dir():
        raise ReportError(f"{path}: {'is not a directory' if path.exists() else 'no such directory'}")
    held = [_read_path(child, traces) for child in sorted(path.iterdir()) if _holds_runs(child)]
    if not held:
        raise ReportError(f"{path}: holds neither run.json nor {SWEEP_FILE}, nor directories that do")
    return Inputs(tuple(run for part in held for run in part.runs), tuple(s for part in held for s in part.sweeps))


def _holds_runs(path: Path) -> bool:
    return any((path / name).exists() for name in (SWEEP_FILE, "run.json"))


def _read_run(path: Path, traces: tuple[Path, ...]) -> Run:
    return Run(path, read_record(path), path.resolve().name, _UNCOUNTED, traces)


def _read_sweep(path: Path, traces: tuple[Path, ...]) -> Inputs:
    """A sweep and those of its runs that have begun."""
    file = path / SWEEP_FILE
    read_stored(file, SWEEP_SCHEMA, _SWEEP, "replay sweep", ReportError)
    record = json.loads(file.read_text())
    sweep = Sweep(path, record)
    places = [(path / entry["directory"], entry["name"], entry["repeat"]) for entry in record["runs"]]
    # The trace's place is relative to the plan, which is not here; its name is.
    traces = (*traces, path / record["trace"]["name"])
    begun = [place for place in places if (place[0] / "run.json").exists()]
    return Inputs(tuple(Run(at, read_record(at), name, repeat, traces) for at, name, repeat in begun), (sweep,))


def _with_repeats(runs: list[Run]) -> list[Run]:
    """Runs that no sweep has counted get their number by configuration and starting time."""
    seen: Counter[str] = Counter()
    repeats = {run.path: run.repeat for run in runs}
    for run in sorted(runs, key=lambda run: str(run.record.get("started_at"))):
        if run.repeat == _UNCOUNTED:
            key = json.dumps({**run.options, "out": None, "trace": run.record["trace"]["sha256"]}, sort_keys=True)
            seen[key] += 1
            repeats[run.path] = seen[key]
    return [replace(run, repeat=repeats[run.path]) for run in runs]
