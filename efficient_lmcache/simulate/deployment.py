"""What is simulated: engines of one kind with their tiers, under one configuration after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats
from efficient_lmcache.simulate.costs import Costs
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.policies import Place, new_tiers
from efficient_lmcache.simulate.remote_tier import RemoteTier
from efficient_lmcache.simulate.routing import ROUTERS
from efficient_lmcache.simulate.simulation import Outcome, Pool, Progress, Simulation
from efficient_lmcache.simulate.tiers import KVTier, LMCacheTier, NoTier
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.prediction import GIB, capacity_chunks
from efficient_lmcache.sizing.workload import Workload

RECOMPUTE = "recompute"
_PLAIN_OFFLOAD = Admission()


@dataclass(frozen=True, slots=True)
class Deployment:
    """Engines and the agents that they serve.

    Attributes:
        engine: each engine's settings.
        costs: each engine's.
        bytes_per_token: beta per rank.
        pool: the agents.
        engines: how many.
        route: load, session or prefix.
        shared_tier: one tier for all engines, as of an LMCache server, instead of one for each.
        ranks: of each engine; each one's KV crosses a link.
    """

    engine: EngineSettings
    costs: Costs
    bytes_per_token: int
    pool: Pool
    engines: int = 1
    route: str = "load"
    shared_tier: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ValueError(f"Deployment.engines is {self.engines}; it must be at least 1")
        if self.route not in ROUTERS:
            raise ValueError(f"Deployment.route is {self.route!r}; it must be one of {', '.join(ROUTERS)}")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of a study.

    Attributes:
        host_gib: C_H per rank, of each engine or of all if they share it; 0 recomputes.
        admission: what may enter the tier.
        policy: a tier of `policies.POLICIES` instead of LMCache's; one that works with an admission takes this one's
            parameters.
        link_gb_s: of a store that all engines share, behind their own tiers; it has no bounds, takes whatever is
            computed, and no admission or policy is asked. 0 for none.
    """

    host_gib: float
    admission: Admission = _PLAIN_OFFLOAD
    policy: str = ""
    link_gb_s: float = 0.0

    @property
    def name(self) -> str:
        """The policy or else the admission, or that there is no tier."""
        return self.policy or self.admission.name if self.host_gib or self.link_gb_s else RECOMPUTE


class Simulated(NamedTuple):
    """One configuration's result; tokens per rank are whole ranks' copies.

    Attributes:
        computed_prefill_tokens: of every call's first admission: prompt tokens that no tier held.
        recomputed_tokens: computed once more after preemptions; not part of the former.
        link_read_bytes: of all ranks.
        queue_delay_mean_s: from a call's arrival to its admission.
        wall_s: that the simulation took.
        outcome: every call's; and the tiers, for what else they know.
    """

    configuration: Configuration
    calls: int
    prompt_tokens: int
    computed_prefill_tokens: int
    gpu_hit_tokens: int
    restored_tokens_per_rank: int
    stored_tokens_per_rank: int
    recomputed_tokens: int
    preemptions: int
    declined_calls: int
    evicted_chunks_per_rank: int
    link_read_bytes: int
    makespan_s: float
    queue_delay_mean_s: float
    wall_s: float
    outcome: Outcome
    tiers: Sequence[KVTier]

    def to_json(self) -> dict[str, Any]:
        """Every number by its name."""
        asked = self.configuration
        row: dict[str, Any] = {"admission": asked.name, "host_gib": asked.host_gib, "link_gb_s": asked.link_gb_s}
        return row | {name: getattr(self, name) for name in self._fields if name not in ("configuration", *_OBJECTS)}


_OBJECTS = ("outcome", "tiers")


def simulate(
    workload: Workload,
    deployment: Deployment,
    configuration: Configuration,
    progress: Progress | None = None,
    sent_s: Floats | None = None,
    tiers: Sequence[KVTier] = (),
) -> Simulated:
    """Run one configuration. The same arguments give the same result but for `wall_s`.

    Args:
        progress, sent_s: of `Simulation`.
        tiers: new ones, instead of the configuration's.
    """
    started_s = time.perf_counter()
    remote = _remote(workload, deployment, configuration)
    tiers = tiers or (remote.engine_tiers() if remote else _tiers(workload, deployment, configuration))
    per_engine = list(tiers) * (deployment.engines // len(tiers))
    simulation = Simulation(
        workload,
        deployment.pool,
        [deployment.engine] * deployment.engines,
        per_engine,
        deployment.costs,
        router=ROUTERS[deployment.route],
        remote=remote,
        logs_evictions=bool(configuration.policy),
        sent_s=sent_s,
    )
    outcome = simulation.run(progress)
    calls = outcome.calls
    restored = calls.restored_tokens
    lmcache = [tier for tier in tiers if isinstance(tier, LMCacheTier)]
    return Simulated(
        configuration=configuration,
        calls=len(calls.prompt_tokens),
        prompt_tokens=int(calls.prompt_tokens.sum()),
        computed_prefill_tokens=int((calls.prompt_tokens - calls.gpu_tokens - restored).sum()),
        gpu_hit_tokens=int(calls.gpu_tokens.sum()),
        restored_tokens_per_rank=int(restored.sum()),
        stored_tokens_per_rank=sum(tier.stored_tokens for tier in tiers),
        recomputed_tokens=int(calls.recomputed_tokens.sum()),
        preemptions=int(calls.preemptions.sum()),
        declined_calls=sum(not decision.save for tier in lmcache for decision in tier.decisions.values()),
        evicted_chunks_per_rank=sum(tier.evicted_chunks for tier in lmcache),
        link_read_bytes=int(remote.reads.size_bytes.sum()) if remote else 0,
        makespan_s=outcome.makespan_s,
        queue_delay_mean_s=float(np.mean(calls.admitted_s - outcome.arrived_s)),
        wall_s=time.perf_counter() - started_s,
        outcome=outcome,
        tiers=tiers,
    )


def gamma_h(workload: Workload, deployment: Deployment, host_gib: float) -> float | None:
    """The reuse working set (Eq. 5) over the host tier; None without a tier."""
    if not host_gib:
        return None
    active = min(deployment.pool.active_pool, workload.sessions)
    working_set = (active - 1) * workload.mean_prompt_tokens * deployment.bytes_per_token
    return working_set / (host_gib * GIB * (1 if deployment.shared_tier else deployment.engines))


def _remote(workload: Workload, deployment: Deployment, configuration: Configuration) -> RemoteTier | None:
    if not configuration.link_gb_s:
        return None
    bytes_per_token = deployment.bytes_per_token
    return RemoteTier(
        workload.chunks,
        bytes_per_token * deployment.ranks,
        deployment.engines,
        link_bytes_per_s=configuration.link_gb_s * 1e9,
        local_chunks=capacity_chunks(configuration.host_gib, workload.chunks.chunk_tokens, bytes_per_token),
    )


def _tiers(workload: Workload, deployment: Deployment, configuration: Configuration) -> Sequence[KVTier]:
    chunks, bytes_per_token = workload.chunks, deployment.bytes_per_token
    capacity = capacity_chunks(configuration.host_gib, chunks.chunk_tokens, bytes_per_token)
    if not capacity:
        return [NoTier()]
    count = 1 if deployment.shared_tier else deployment.engines
    if configuration.policy:
        place = Place(workload, capacity, configuration.admission, bytes_per_token, deployment.engine.gpu_kv_tokens)
        return new_tiers(configuration.policy, place, count, shared=deployment.engines > count)
    return [LMCacheTier(chunks, capacity, configuration.admission, bytes_per_token) for _ in range(count)]
