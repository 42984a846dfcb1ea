"""Policies held against each other: the same agents on the same engine, the host tier from ample to small.

study       a workload on a deployment
baseline    what operators can choose today: plain offload and the paper's two admissions
bound       the clairvoyant tier: what the best choice of what to keep would reach behind the same GPU
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from efficient_lmcache.core.references import References
from efficient_lmcache.simulate.deployment import Configuration, Deployment, Simulated, simulate
from efficient_lmcache.simulate.policies import POLICIES
from efficient_lmcache.simulate.policies.clairvoyant import ClairvoyantTier
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.prediction import GIB, capacity_chunks
from efficient_lmcache.sizing.workload import Workload

GAMMAS = (0.3, 0.57, 0.8, 1.0, 1.2, 1.4, 1.6, 2.2, 3.0, 4.0)
BASELINES = ("none", "fixed", "conditioned")
RECOMMENDED = "exclusive-return"
CLAIRVOYANT = "clairvoyant"
RULES = (*BASELINES, *POLICIES, CLAIRVOYANT)

#: What the recommended rule is held to: never worse than the best baseline but for noise, and this far below the
#: conditioned admission around the transition.
TOLERANCE = 0.02
TRANSITION, SAVING = (0.8, 1.6), 0.40
_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class Study:
    """A workload on a deployment of one engine.

    Attributes:
        admission: the parameters of every rule that has an admission.
    """

    name: str
    workload: Workload
    deployment: Deployment
    admission: Admission

    def host_gib(self, gamma_h: float) -> float:
        """C_H per rank of a tier with this working set over it."""
        active = min(self.deployment.pool.active_pool, self.workload.sessions)
        tokens = (active - 1) * self.workload.mean_prompt_tokens / gamma_h
        return tokens * self.deployment.bytes_per_token / GIB


class Row(NamedTuple):
    """One rule in one tier; tokens in all, per rank where they are copies."""

    study: str
    gamma_h: float
    rule: str
    computed_prefill_tokens: int
    stored_tokens_per_rank: int
    restored_tokens_per_rank: int
    makespan_s: float
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


def measure(study: Study, gamma_h: float, rule: str) -> Row:
    """Simulate one cell of the table.

    Raises:
        ValueError: the rule is not known, or the tier does not hold a chunk.
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
    gib = study.host_gib(gamma_h)
    if not capacity_chunks(gib, study.workload.chunks.chunk_tokens, study.deployment.bytes_per_token):
        raise ValueError(f"{study.name} at γ_H {gamma_h:g}: a tier of {gib:g} GiB does not hold a chunk")
    if rule in BASELINES:
        made = simulate(study.workload, study.deployment, Configuration(gib, replace(study.admission, name=rule)))
    elif rule == CLAIRVOYANT:
        made = _clairvoyant(study, gib)
    else:
        made = simulate(study.workload, study.deployment, Configuration(gib, study.admission, rule))
    return Row(
        study.name,
        gamma_h,
        rule,
        made.computed_prefill_tokens,
        made.stored_tokens_per_rank,
        made.restored_tokens_per_rank,
        made.makespan_s,
        made.wall_s,
    )


def _clairvoyant(study: Study, gib: float) -> Simulated:
    """The best of a few rounds, each of which knows the order that the one before led to."""
    workload, deployment = study.workload, study.deployment
    configuration = Configuration(gib, study.admission, RECOMMENDED)
    made = simulate(workload, deployment, configuration)
    capacity = capacity_chunks(gib, workload.chunks.chunk_tokens, deployment.bytes_per_token)
    rounds = []
    for _ in range(_ITERATIONS):
        tier = ClairvoyantTier(workload, capacity, made.outcome.looked_up_s)
        made = simulate(workload, deployment, configuration, tiers=[tier])
        rounds.append(made)
    return min(rounds, key=lambda made: made.computed_prefill_tokens)


class Verdict(NamedTuple):
    """The recommended rule against the baselines in one tier; ratios of computed prefill.

    Attributes:
        best: the best baseline.
        to_best, to_conditioned, to_bound: the rule's computed prefill over that one's; None without a bound.
        holds: it is no worse than the best, and far enough below conditioned where that is asked for.
    """

    study: str
    gamma_h: float
    best: str
    to_best: float
    to_conditioned: float
    to_bound: float | None
    holds: bool


def verdicts(rows: Iterable[Row], rule: str = RECOMMENDED) -> list[Verdict]:
    """One for every study and tier of which baselines and rule are there."""
    cells: dict[tuple[str, float], dict[str, int]] = {}
    for row in rows:
        cells.setdefault((row.study, row.gamma_h), {})[row.rule] = row.computed_prefill_tokens
    made = []
    for (study, gamma_h), computed in cells.items():
        if not {*BASELINES, rule} <= computed.keys():
            continue
        best = min(BASELINES, key=computed.__getitem__)
        to_best, to_conditioned = computed[rule] / computed[best], computed[rule] / computed["conditioned"]
        to_bound = computed[rule] / computed[CLAIRVOYANT] if CLAIRVOYANT in computed else None
        asked = TRANSITION[0] <= gamma_h <= TRANSITION[1]
        holds = to_best <= 1 + TOLERANCE and (not asked or to_conditioned <= 1 - SAVING)
        made.append(Verdict(study, gamma_h, best, to_best, to_conditioned, to_bound, holds))
    return made


def first_sessions(workload: Workload, count: int, least_calls: int = 1) -> Workload:
    """The calls of the first `count` sessions that have so many calls, in their order."""
    calls = np.bincount(workload.chunks.session)
    kept = np.flatnonzero(calls >= least_calls)[:count]
    order = np.flatnonzero(np.isin(workload.chunks.session, kept))
    return replace(workload, chunks=workload.chunks.reordered(order), blocks=workload.blocks.reordered(order))


def with_intervals(workload: Workload) -> Workload:
    """Where an agent's own time is not recorded: the time from its lane's previous request to this one."""
    return replace(workload, chunks=_with_intervals(workload.chunks), blocks=_with_intervals(workload.blocks))


def _with_intervals(references: References) -> References:
    intervals_s = references.interval_s.copy()
    last_s: dict[int, float] = {}
    for call, (lane, start_s) in enumerate(zip(references.lane.tolist(), references.start_s.tolist(), strict=True)):
        if np.isnan(intervals_s[call]) and lane in last_s:
            intervals_s[call] = start_s - last_s[lane]
        last_s[lane] = start_s
    return replace(references, interval_s=intervals_s)
