"""Tables 4 and 5: what was predicted before a run against what the run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from efficient_lmcache.report.runs import Inputs, Sweep, Unavailable
from efficient_lmcache.report.table import RunRow, runs_table


@dataclass(frozen=True, slots=True)
class Held:
    """One predicted quantity of one run.

    Attributes:
        quantity: computed_prefill_tokens, restored_tokens_per_rank, stored_tokens_per_rank, makespan_s or declined.
        expected, low, high: the prediction.
        measured: None where the run did not complete.
        inside: low <= measured <= high.
        off: by which share of the nearest end the measurement lies outside (+0.12: 12 % above `high`); 0 inside, None
            without a measurement or beside an end of 0.
        to_expected: measured / expected - 1; None where that cannot be said.
    """

    quantity: str
    expected: float
    low: float
    high: float
    measured: float | None
    inside: bool | None
    off: float | None
    to_expected: float | None


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """One run of a sweep and the prediction made for it.

    Attributes:
        sweep, run: names.
        sweep_directory: of the sweep.
        directory: of the run, as in the table; None until it has begun.
        connector, write_threshold_chunks, occupancy_threshold: of the run; the connector does not change a prediction.
        created_at: when the prediction was made; `older` says whether that was before the run started (None: not yet).
        capacity_chunks: K_H.
        computed, restored: the two quantities of the paper's tables.
        stored, makespan, declined: what else a sweep predicts; None where it does not.
    """

    sweep: str
    sweep_directory: str
    run: str
    directory: str | None
    repeat: int
    status: str
    active_pool: int
    admission: str
    connector: str
    write_threshold_chunks: int | None
    occupancy_threshold: float | None
    host_gib_per_rank: float
    gamma_h: float | None
    capacity_chunks: int | None
    created_at: str
    started_at: str | None
    older: bool | None
    computed: Held
    restored: Held
    stored: Held | None
    makespan: Held | None
    declined: Held | None


def predicted_runs(inputs: Inputs) -> tuple[PredictedRun, ...]:
    """Every run of the sweeps that has a prediction, in the table's order.

    Raises:
        Unavailable: there are none.
    """
    rows = {Path(row.directory).resolve(): row for row in runs_table(inputs.runs)}
    found = [predicted for sweep in inputs.sweeps for predicted in _predicted_runs(sweep, rows)]
    if not found:
        raise Unavailable("no sweep with predictions is among the inputs")
    order = {row: place for place, row in enumerate(rows)}
    return tuple(run for _, run in sorted(found, key=lambda pair: order.get(pair[0], len(order))))


def _predicted_runs(sweep: Sweep, rows: dict[Path, RunRow]) -> Iterator[tuple[Path, PredictedRun]]:
    predictions = sweep.record["predictions"]
    for entry in sweep.record["runs"]:
        if entry["prediction"] is None:
            continue
        path = (sweep.path / entry["directory"]).resolve()
        yield path, _predicted_run(sweep, entry, predictions[entry["prediction"]], rows.get(path))


def _predicted_run(sweep: Sweep, entry: dict[str, Any], prediction: dict[str, Any], row: RunRow | None) -> PredictedRun:
    complete = row is not None and row.status == "complete"
    created_at, started_at = prediction["created_at"], entry["started_at"]

    def held(quantity: str, predicted: str | None = None) -> Held:
        measured = getattr(row, quantity) if complete else None
        return held_against(quantity, prediction[predicted or quantity], measured)

    def held_if_predicted(quantity: str, predicted: str) -> Held | None:
        return held(quantity, predicted) if predicted in prediction else None

    return PredictedRun(
        sweep=sweep.name,
        sweep_directory=str(sweep.path),
        run=entry["name"],
        directory=row.directory if row else None,
        repeat=entry["repeat"],
        status=entry["status"],
        active_pool=prediction["active_pool"],
        admission=prediction["admission"],
        connector=entry["options"].get("connector", "efficient"),
        write_threshold_chunks=prediction.get("write_threshold_chunks"),
        occupancy_threshold=prediction.get("occupancy_threshold"),
        host_gib_per_rank=prediction["host_gib"],
        gamma_h=row.gamma_h if row else None,
        capacity_chunks=prediction["capacity_chunks"],
        created_at=created_at,
        started_at=started_at,
        older=None if started_at is None else datetime.fromisoformat(created_at) <= datetime.fromisoformat(started_at),
        computed=held("computed_prefill_tokens"),
        restored=held("restored_tokens_per_rank"),
        stored=held_if_predicted("stored_tokens_per_rank", "stored_tokens_per_rank"),
        makespan=held_if_predicted("makespan_s", "makespan_s"),
        declined=held_if_predicted("declined", "declined_calls"),
    )


def held_against(quantity: str, prediction: dict[str, float], measured: float | None) -> Held:
    """A measurement against a predicted `expected`, `low` and `high`."""
    expected, low, high = (prediction[name] for name in ("expected", "low", "high"))
    inside = off = to_expected = None
    if measured is not None:
        nearest = min(max(measured, low), high)
        inside = measured == nearest
        off = measured / nearest - 1 if nearest else (0.0 if inside else None)
        to_expected = measured / expected - 1 if expected else None
    return Held(quantity, expected, low, high, measured, inside, off, to_expected)
