"""A simulation of a real run, held against what the run measured.

Twice: in a closed loop of its own, where every difference in time changes who meets whom in the caches; and in order,
with each call at the engine when the run looked it up, which leaves the caches' behaviour alone to differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from efficient_lmcache.core.references import Ints
from efficient_lmcache.simulate.costs import ModelShape
from efficient_lmcache.simulate.deployment import Simulated, simulate
from efficient_lmcache.simulate.profiles import Profile
from efficient_lmcache.simulate.recorded_run import RecordedRun
from efficient_lmcache.sizing.workload import Workload


class Comparison(NamedTuple):
    """One run and its simulations.

    Attributes:
        run: the directory's name.
        measured: run.json's record.
        simulated: in a closed loop.
        in_order: with each call at the engine when the run looked it up, or sent it if there is no decision log.
        equal_cached: share of calls whose cached tokens (GPU and host together) are the run's, `in_order`.
        equal_host_match: share of calls whose host match is the run's, `in_order`; None without a decision log.
    """

    run: str
    measured: dict[str, Any]
    simulated: Simulated
    in_order: Simulated
    equal_cached: float
    equal_host_match: float | None

    def to_json(self) -> dict[str, Any]:
        """Measured and simulated totals, and the ratios that say how far they are apart."""
        names = ("computed_prefill_tokens", "restored_tokens_per_rank", "stored_tokens_per_rank", "makespan_s")
        measured = {name: self.measured[name] for name in (*names, "preemptions")}
        return {
            "run": self.run,
            "admission": self.measured["admission"],
            "active_pool": self.measured["active_pool"],
            "gamma_h": self.measured["working_set"]["gamma_h"],
            "measured": measured,
            "simulated": self.simulated.to_json(),
            "in_order": self.in_order.to_json(),
            "computed_ratio": _ratio(self.simulated.computed_prefill_tokens, measured["computed_prefill_tokens"]),
            "computed_ratio_in_order": _ratio(
                self.in_order.computed_prefill_tokens, measured["computed_prefill_tokens"]
            ),
            "makespan_ratio": _ratio(self.simulated.makespan_s, measured["makespan_s"]),
            "equal_cached": self.equal_cached,
            "equal_host_match": self.equal_host_match,
        }


def compare_run(run: RecordedRun, workload: Workload, profile: Profile, shape: ModelShape) -> Comparison:
    """Simulate what a run did.

    Args:
        workload: of the run's own trace, with the run's chunk and block sizes.
        profile, shape: of its machine and of its model.

    Raises:
        RunDirectoryError: the run is of another trace.
    """
    deployment, configuration = run.deployment(profile, shape), run.configuration
    recorded = run.calls(workload)
    in_order = simulate(workload, deployment, configuration, sent_s=recorded.reached_s)
    calls = in_order.outcome.calls
    return Comparison(
        run=run.path.name,
        measured=run.record,
        simulated=simulate(workload, deployment, configuration),
        in_order=in_order,
        equal_cached=float(np.mean(calls.gpu_tokens + calls.restored_tokens == recorded.cached_tokens)),
        equal_host_match=_share_equal(recorded.host_match_tokens, in_order.outcome.host_tokens),
    )


def _share_equal(matched: Ints, simulated: Ints) -> float | None:
    known = matched >= 0
    return float(np.mean((simulated == matched)[known])) if known.any() else None


def _ratio(simulated: float, measured: float | None) -> float | None:
    return simulated / measured if measured else None
