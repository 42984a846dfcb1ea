"""sweep.json: the runs of a sweep, how far each has come, and what was predicted of it before.

It is replaced in one step after every change, so that whatever ends a sweep, the file says what was finished. A run's
own run.json is the authority on that run: where a sweep was killed between the two, resuming believes the run.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from efficient_lmcache.replay.stored import read_stored

SCHEMA = "efficient-lmcache-sweep/1"
Status = Literal["pending", "running", "complete", "failed"]


class SweepError(ValueError):
    """A sweep directory that cannot be used as asked; the message names it and says what to do."""


@dataclass(slots=True)
class SweepRun:
    """One run.

    Attributes:
        directory: of its latest attempt, relative to the sweep's.
        repeat: 1 for the first run of its configuration.
        status: complete means that every output was exact.
        prediction: index into the sweep's predictions; None where nothing could be predicted.
        started_at, finished_at: of its latest attempt.
    """

    name: str
    directory: str
    repeat: int
    options: dict[str, Any]
    prediction: int | None = None
    status: Status = "pending"
    error: str | None = None
    started_at: str | None = None
    finished_at: str | None = None
    attempts: int = 0


@dataclass(slots=True)
class SweepState:
    """The whole file.

    Attributes:
        plan: as read.
        trace: name, sha256 and totals.
        model: name, and sha256 of its config.json.
        predictions: see `predictions.predict_runs`; every one is older than its runs.
        prediction_notes: what they assume, or why there are none.
    """

    name: str
    plan: dict[str, Any]
    trace: dict[str, Any]
    runs: list[SweepRun]
    predictions: list[dict[str, Any]] = field(default_factory=list)
    prediction_notes: list[str] = field(default_factory=list)
    model: dict[str, str] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[SweepRun]:
        return [run for run in self.runs if run.status != "complete"]


_STATE = TypeAdapter(SweepState)


def sweep_file(out: Path) -> Path:
    return out / "sweep.json"


def save(state: SweepState, out: Path) -> None:
    """Raises SweepError where the disk does not take it: what was saved before still stands."""
    partial = sweep_file(out).with_suffix(".partial")
    try:
        with open(partial, "w") as file:
            file.write(json.dumps({"schema": SCHEMA, **asdict(state)}, indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, sweep_file(out))
    except OSError as error:
        raise stopped(out, error) from error


def stopped(out: Path, error: OSError) -> SweepError:
    return SweepError(f"{out}: the sweep stopped: {error}; finished runs are kept, --resume goes on")


def load(out: Path) -> SweepState:
    """Raises SweepError for a directory without a sweep.json of this schema."""
    file = sweep_file(out)
    state = read_stored(file, SCHEMA, _STATE, "replay sweep", SweepError)
    for run in state.runs:
        if run.prediction is not None and run.prediction not in range(len(state.predictions)):
            raise SweepError(f"{file}: {run.name}: there is no prediction {run.prediction}")
    return state


@contextmanager
def only_sweep_in(out: Path) -> Iterator[None]:
    """Creates `out` and holds it against other sweeps while the block runs; the lock ends with the process.

    Raises:
        SweepError: another sweep holds it, or it cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / "sweep.lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise SweepError(f"{out}: cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SweepError(f"{out}: another sweep is running in it; wait for it, or stop it") from None
        yield


def now() -> str:
    """UTC, to the microsecond: a prediction and its run must never share a time."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
