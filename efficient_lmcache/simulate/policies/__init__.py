"""What else could lie behind a GPU's cache: tiers by name, each a `tiers.KVTier`; docs/policies.md compares them.

inclusive    written when computed, as LMCache does: gated by frequency, by TinyLFU, by a retention time
server       LMCache's server mode, eager and lazy
exclusive    written when the GPU evicts: plain, behind the paper's admission, by return times
admissions   LMCache's tier, with another pressure signal or another threshold than the paper's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from efficient_lmcache.simulate.policies.exclusive import ExclusiveTier
from efficient_lmcache.simulate.policies.inclusive import FrequencyGate, Retention, TinyLFU
from efficient_lmcache.simulate.policies.request_gates import AdaptiveThresholdTier, StackDistanceTier
from efficient_lmcache.simulate.policies.returns import ReturnTier
from efficient_lmcache.simulate.policies.server import LazyServerTier, ServerTier
from efficient_lmcache.simulate.policies.working_set import WorkingSetTier
from efficient_lmcache.simulate.tiers import KVTier
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tier is to work.

    Attributes:
        capacity_chunks: K_H, at least 1.
        admission: its parameters, for tiers with an admission; its activity window is a retention's time.
        bytes_per_token: beta per rank.
        gpu_kv_tokens: K_G.
    """

    workload: Workload
    capacity_chunks: int
    admission: Admission
    bytes_per_token: int
    gpu_kv_tokens: int

    @property
    def conditioned(self) -> Admission:
        """The paper's admission with the place's parameters."""
        return replace(self.admission, name="conditioned")


def _adaptive(place: Place) -> KVTier:
    return AdaptiveThresholdTier(place.workload.chunks, place.capacity_chunks, place.conditioned, place.bytes_per_token)


def _stack_distance(place: Place) -> KVTier:
    return StackDistanceTier(place.workload.chunks, place.capacity_chunks, place.conditioned, place.bytes_per_token)


def _working_set(place: Place) -> KVTier:
    return WorkingSetTier(
        place.workload, place.capacity_chunks, place.conditioned, place.bytes_per_token, place.gpu_kv_tokens
    )


POLICIES: dict[str, Callable[[Place], KVTier]] = {
    "frequency": lambda place: FrequencyGate(place.workload.chunks, place.capacity_chunks),
    "tinylfu": lambda place: TinyLFU(place.workload.chunks, place.capacity_chunks),
    "ttl": lambda place: Retention(place.workload.chunks, place.capacity_chunks, place.admission.activity_window_s),
    "server": lambda place: ServerTier(place.workload, place.capacity_chunks),
    "server-lazy": lambda place: LazyServerTier(place.workload, place.capacity_chunks),
    "stack-distance": _stack_distance,
    "adaptive-kappa": _adaptive,
    "exclusive": lambda place: ExclusiveTier(place.workload, place.capacity_chunks),
    "exclusive-working-set": _working_set,
    "exclusive-return": lambda place: ReturnTier(place.workload, place.capacity_chunks),
}


def new_tiers(name: str, place: Place, count: int = 1, *, shared: bool = False) -> list[KVTier]:
    """Empty tiers of one kind.

    Args:
        shared: several engines use one of them.

    Raises:
        ValueError: no policy of that name; or it must know what its engine's GPU holds, and is shared.
    """
    if name not in POLICIES:
        raise ValueError(f"policy is {name!r}; it must be one of {', '.join(POLICIES)}")
    made = [POLICIES[name](place) for _ in range(count)]
    if shared and isinstance(made[0], ExclusiveTier | LazyServerTier):
        raise ValueError(f"policy {name} follows one engine's GPU; engines cannot share such a tier here")
    return made
