"""Tables 4 and 5: what was predicted before a run against what the run measured."""

from __future__ import annotations

from dataclasses import dataclass

from efficient_lmcache.report.runs import Inputs


@dataclass(frozen=True, slots=True)
class Held:
    """One predicted quantity of one run, in tokens.

    Attributes:
        quantity: computed_prefill_tokens | restored_tokens_per_rank.
        expected, low, high: the prediction.
        measured: None where the run did not complete.
        inside: low <= measured <= high.
        off: by which share of the nearest end the measurement lies outside (+0.12: 12 % above `high`); 0 inside, None
            without a measurement or beside an end of 0.
        to_expected: measured / expected - 1; None where that cannot be said.
    """

    quantity: str
    expected: int
    low: int
    high: int
    measured: int | None
    inside: bool | None
    off: float | None
    to_expected: float | None


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """One run of a sweep and the prediction made for it.

    Attributes:
        sweep, run: names.
        created_at: when the prediction was made; `older` says whether that was before the run started (None: not yet).
        capacity_chunks: K_H.
        computed, restored: the two quantities.
    """

    sweep: str
    run: str
    repeat: int
    status: str
    active_pool: int
    admission: str
    host_gib_per_rank: float
    gamma_h: float | None
    capacity_chunks: int | None
    created_at: str
    started_at: str | None
    older: bool | None
    computed: Held
    restored: Held


def predicted_runs(inputs: Inputs) -> tuple[PredictedRun, ...]:
    """Every run of the sweeps that has a prediction, in the table's order.

    Raises:
        Unavailable: there are none.
    """
    raise NotImplementedError
