"""A profile's costs, fitted to real runs: what a machine does is best told by what it did.

What is minimised is the squared logarithm of simulated over measured time, in closed loops: of each run's makespan, and
of the calls of each quarter of prompt lengths, from being sent to being answered. A search by least squares (Levenberg
and Marquardt's) over the costs' logarithms, so that none becomes negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints
from efficient_lmcache.simulate.costs import ModelShape
from efficient_lmcache.simulate.deployment import simulate
from efficient_lmcache.simulate.profiles import Profile
from efficient_lmcache.simulate.recorded_run import RecordedRun
from efficient_lmcache.sizing.workload import Workload

MEASURED_FIELDS = ("step_s", "sequence_s", "token_s", "pair_s", "restored_token_s", "stored_token_s")
GPU_FIELDS = ("step_s", "sequence_s", "copy_s", "compute_efficiency", "memory_efficiency")
_SHARES = {"compute_efficiency", "memory_efficiency"}
_QUARTERS = 4
_CALLS_WEIGHT = 0.5  # of a quarter's time beside the makespan's
_MOST_ROUNDS = 12
_LEAST_GAIN = 0.01  # of the sum of squares, in a round
_DIFFERENCE = 0.1  # of a logarithm, for slopes: a smaller one would measure who met whom
_FURTHEST = 1.5  # of a logarithm, in a round
_FIRST_DAMPING, _LAST_DAMPING = 1e-2, 1e3
# Where a profile has no such cost, one that is too small to matter.
_LEAST = 1e-9

#: Called with how many costs were tried.
Tried = Callable[[int], None]


class Observed(NamedTuple):
    """A run to fit to, and the work that it did."""

    run: RecordedRun
    workload: Workload


def fit(
    profile: Profile, shape: ModelShape, observed: Sequence[Observed], tried: Tried = lambda count: None
) -> Profile:
    """The profile with other costs, or a GPU's with other efficiencies and costs of a step.

    Args:
        profile: where the search begins; what the runs do not tell apart stays about as it is there.
        shape: of the runs' model.
        observed: at least one.

    Raises:
        RunDirectoryError: a run is of another trace.
    """
    fields = GPU_FIELDS if profile.measured is None else MEASURED_FIELDS
    given = {name: getattr(profile, name) for name in fields} if profile.measured is None else profile.measured
    measured_s = np.concatenate([_measured_s(each) for each in observed])
    weights = np.tile([1.0] + [_CALLS_WEIGHT] * _QUARTERS, len(observed))
    count = 0

    def with_costs(logarithms: Floats) -> Profile:
        found = {name: float(f"{value:.3g}") for name, value in zip(fields, np.exp(logarithms), strict=True)}
        for name in found.keys() & _SHARES:
            found[name] = min(found[name], 1.0)
        return profile.with_costs(found)

    def residuals(logarithms: Floats) -> Floats:
        nonlocal count
        count += 1
        tried(count)
        candidate = with_costs(logarithms)
        simulated_s = [_simulated_s(each, candidate, shape) for each in observed]
        missed: Floats = weights * np.log(np.concatenate(simulated_s) / measured_s)
        return missed

    start = np.log([max(given.get(name, 0.0), _LEAST) for name in fields])
    names = ", ".join(each.run.path.name for each in observed)
    return replace(with_costs(least_squares(residuals, start)), source=f"fitted to {names}")


def _measured_s(observed: Observed) -> Floats:
    recorded = observed.run.calls(observed.workload)
    makespan_s = float(observed.run.record["makespan_s"])
    return _times_s(makespan_s, recorded.finished_s - recorded.sent_s, observed.workload)


def _simulated_s(observed: Observed, profile: Profile, shape: ModelShape) -> Floats:
    run, workload = observed
    outcome = simulate(workload, run.deployment(profile, shape), run.configuration).outcome
    return _times_s(outcome.makespan_s, outcome.calls.finished_s - outcome.arrived_s, workload)


def _times_s(makespan_s: float, calls_s: Floats, workload: Workload) -> Floats:
    """The makespan, and the calls' sum in each quarter of prompt lengths; at least a microsecond."""
    lengths = workload.chunks.prompt_tokens
    quarter: Ints = np.argsort(np.argsort(lengths, kind="stable")) * _QUARTERS // len(lengths)
    sums = np.bincount(quarter, calls_s, minlength=_QUARTERS)
    times_s: Floats = np.maximum(np.concatenate(([makespan_s], sums)), 1e-6)
    return times_s


def least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Logarithms of costs at which the residuals' squares are few, from `start` on."""
    found, missed, damping = start, residuals(start), _FIRST_DAMPING
    for _ in range(_MOST_ROUNDS):
        slopes = np.column_stack([_slope(residuals, found, missed, place) for place in range(len(found))])
        better = None
        while better is None and damping < _LAST_DAMPING:
            moved = found + _step(slopes, missed, damping)
            tried = residuals(moved)
            better = (moved, tried) if tried @ tried < missed @ missed else None
            damping *= 4 if better is None else 1 / 4
        if better is None:
            break
        gain = 1 - (better[1] @ better[1]) / (missed @ missed)
        found, missed = better
        if gain < _LEAST_GAIN:
            break
    return found


def _slope(residuals: Callable[[Floats], Floats], at: Floats, missed: Floats, place: int) -> Floats:
    moved = at.copy()
    moved[place] += _DIFFERENCE
    return (residuals(moved) - missed) / _DIFFERENCE


def _step(slopes: Floats, missed: Floats, damping: float) -> Floats:
    curvature = slopes.T @ slopes
    damped = curvature + damping * (np.diag(np.diag(curvature)) + 1e-3 * np.eye(len(curvature)))
    step: Floats = np.clip(np.linalg.solve(damped, -slopes.T @ missed), -_FURTHEST, _FURTHEST)
    return step
