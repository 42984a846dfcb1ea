"""Size a host tier before deployment: working set, pressure, predicted curve, recommendation and advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from efficient_lmcache.core.offload_benefit import OffloadCost
from efficient_lmcache.core.reuse import broken_tokens, stable_tokens
from efficient_lmcache.core.workingset import gamma_g, gamma_h, reuse_working_set_bytes
from efficient_lmcache.sizing.advice import Advice, advise
from efficient_lmcache.sizing.hardware import Hardware
from efficient_lmcache.sizing.pool import PoolModel
from efficient_lmcache.sizing.prediction import GIB, Prediction, Predictor
from efficient_lmcache.sizing.workload import Workload

TOLERANCE = 0.05  # computed prefill of the recommended tier over that of an unlimited one
_SCALE_MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
_REFINEMENTS = 10
_FLAT = 0.02  # of the computed prefill without a tier: smaller steps of the curve are not refined
_RESOLUTION = 1.03  # between the recommendation and the largest capacity known to be too small
_TRANSITION_SHARES = (0.1, 0.9)
# Without a recording, contexts may be far more unequal than assumed: at gamma_G = 0.77 (A = 8, Table 3) the paper's
# pool computed 41.5 M tokens without a tier where assumed agents compute 2.5 M. Below this, twice as much context fits.
_SURELY_FITS_GAMMA_G = 0.5


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to be deployed.

    Attributes:
        ranks: tensor-parallel GPUs of a node.
        bytes_per_token: beta per rank.
        activated_parameters: per token; None where nobody knows, and then there is no OBR.
        gpu_kv_tokens: K_G.
        pool: the agents and the engine's rates.
        host_gib: tiers per rank that are considered; the first one's gamma_H is the plan's.
        ttl_s: retention window of the host tier; None for none.
        prefill_measured: the pool's prefill rates are the user's, not derived or assumed.
        latent: ranks would hold copies of the same latent vectors (MLA), of which LMCache keeps the first rank's.
    """

    hardware: Hardware
    ranks: int
    bytes_per_token: int
    activated_parameters: float | None
    gpu_kv_tokens: int
    pool: PoolModel
    host_gib: tuple[float, ...] = ()
    ttl_s: float | None = None
    prefill_measured: bool = False
    latent: bool = False

    @property
    def tiers(self) -> int:
        """Of a node: one for each rank, unless one has it all."""
        return 1 if self.latent else self.ranks

    @property
    def benefit_ratio(self) -> float | None:
        """OBR of long prefixes with prefill at its peak."""
        if self.activated_parameters is None:
            return None
        cost = self.hardware.offload_cost(self.bytes_per_token, self.activated_parameters, self.ranks)
        return cost.benefit_ratio()

    @property
    def benefit_range(self) -> tuple[float, float] | None:
        """OBR of long prefixes at the fastest and at the slowest prefill; None where nobody knows either.

        The fastest is the user's, or else the GPUs' peak.
        """
        slow, fast = (
            OffloadCost(self.bytes_per_token, 1 / rate, self.hardware.restore_bytes_per_s).benefit_ratio()
            for rate in self.pool.prefill_tokens_per_s
        )
        if self.prefill_measured:
            return fast, slow
        return None if self.benefit_ratio is None else (self.benefit_ratio, slow)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the planner says.

    Attributes:
        mean_prompt_tokens: N.
        working_set_bytes: Eq. 5, per rank.
        gamma_h: of the first tier given; None without one.
        benefit_ratio: OBR at the GPUs' peak; None where activated parameters are unknown.
        stable_share: of all prompt tokens, those that a tier without limit would cover.
        curve: by rising capacity, from no tier to one that holds everything.
        transition_gib: per rank, where 10 % and 90 % of what a tier can save are saved; None if it saves nothing.
        recommended_gib: per rank.
        rule: how the recommendation is found.
        notes: what is assumed.
    """

    workload: str
    deployment: Deployment
    mean_prompt_tokens: float
    working_set_bytes: float
    gamma_g: float
    gamma_h: float | None
    benefit_ratio: float | None
    stable_share: float
    curve: tuple[Prediction, ...]
    transition_gib: tuple[float, float] | None
    recommended_gib: float
    rule: str
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary; `plan --json` prints it."""
        deployment = self.deployment
        return {
            "workload": self.workload,
            "active_pool": deployment.pool.active_pool,
            "mean_prompt_tokens": self.mean_prompt_tokens,
            "kv_bytes_per_token_per_rank": deployment.bytes_per_token,
            "working_set_bytes": self.working_set_bytes,
            "gamma_g": self.gamma_g,
            "gamma_h": self.gamma_h,
            "obr": self.benefit_ratio,
            "obr_range": deployment.benefit_range,
            "flop_per_host_link_byte": deployment.hardware.flop_per_byte,
            "activated_parameters": deployment.activated_parameters,
            "stable_share": self.stable_share,
            "recommended_gib_per_rank": self.recommended_gib,
            "recommended_gib_per_node": self.recommended_gib * deployment.tiers,
            "rule": self.rule,
            "transition_gib": self.transition_gib,
            "curve": [self._row(prediction) for prediction in self.curve],
            "advice": [row._asdict() for row in self.advice],
            "notes": list(self.notes),
        }

    def _row(self, prediction: Prediction) -> dict[str, Any]:
        computed, restored = prediction.computed_prefill_tokens, prediction.restored_tokens
        ratio = gamma_h(self.working_set_bytes, prediction.host_gib * GIB)
        return {
            "host_gib": prediction.host_gib,
            "capacity_chunks": prediction.capacity_chunks,
            "gamma_h": ratio if math.isfinite(ratio) else None,
            "computed_prefill_tokens": computed.expected,
            "computed_prefill_tokens_range": [computed.low, computed.high],
            "restored_tokens": restored.expected,
            "restored_tokens_range": [restored.low, restored.high],
        }


def make_plan(
    workload: Workload,
    deployment: Deployment,
    *,
    recorded: bool = True,
    mean_prompt_tokens: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Plan a host tier.

    Args:
        recorded: the workload is a recording; otherwise, and where it has fewer sessions than the pool has agents,
            nothing below Eq. 5's scale is recommended.
        mean_prompt_tokens: N, where it is known better than by the workload's mean.
        progress: called with how many capacities are predicted so far.
    """
    pool, hardware = deployment.pool, deployment.hardware
    mean = workload.mean_prompt_tokens if mean_prompt_tokens is None else mean_prompt_tokens
    working_set = reuse_working_set_bytes(pool.active_pool, mean, deployment.bytes_per_token)
    curve = _Curve(workload, deployment, progress)
    curve.sample(working_set / GIB)
    pressure_g = gamma_g(pool.active_pool, mean, deployment.gpu_kv_tokens)
    is_whole_pool = recorded and workload.sessions >= pool.active_pool
    needed_gib, rule = _needed(deployment, curve, None if is_whole_pool else working_set / GIB, pressure_g)
    recommended = _rounded_up(needed_gib)
    pressure_h = gamma_h(working_set, deployment.host_gib[0] * GIB) if deployment.host_gib else None
    prompts = workload.chunks.prompt_tokens.sum()
    stable = float(stable_tokens(workload.chunks).sum() / prompts)
    return Plan(
        workload=workload.name,
        deployment=deployment,
        mean_prompt_tokens=mean,
        working_set_bytes=working_set,
        gamma_g=pressure_g,
        gamma_h=pressure_h if pressure_h is None or math.isfinite(pressure_h) else None,
        benefit_ratio=deployment.benefit_ratio,
        stable_share=stable,
        curve=tuple(curve.predictions()),
        transition_gib=curve.transition_gib(),
        recommended_gib=recommended,
        rule=rule,
        advice=tuple(
            advise(
                flop_per_byte=hardware.flop_per_byte,
                benefit_range=deployment.benefit_range,
                gamma_g=pressure_g,
                gamma_h=pressure_h,
                host_gib=deployment.host_gib[0] if deployment.host_gib else None,
                recommended_gib=recommended,
                saving=curve.saving(),
                excess=curve.excess(deployment.host_gib[0]) if deployment.host_gib else None,
                stable_share=stable if recorded else None,
                broken_share=None
                if workload.lanes_are_guessed
                else float(broken_tokens(workload.chunks).sum() / prompts),
            )
        ),
        notes=(*workload.notes, *_assumptions(workload, deployment)),
    )


def _needed(
    deployment: Deployment, curve: _Curve, working_set_gib: float | None, pressure_g: float
) -> tuple[float, str]:
    """GiB per rank, and the rule that they follow from.

    Args:
        working_set_gib: per rank; None where the workload is a recording of the whole pool.
    """
    benefit = deployment.benefit_range
    if benefit is not None and benefit[1] < 0:
        return (
            0.0,
            "no host tier: restoring takes longer than computing again, at both ends of the prefill rate (Eq. 2)",
        )
    rule = (
        f"the smallest tier that leaves at most {TOLERANCE:.0%} more computed prefill than an unlimited one, at the "
        "pessimistic end of the prediction, rounded up"
    )
    needed_gib = curve.smallest_gib_that_suffices()
    if working_set_gib is not None and (needed_gib or pressure_g > _SURELY_FITS_GAMMA_G):
        needed_gib = max(needed_gib, working_set_gib)
        rule += "; without a recording of the whole pool never below the working set (Eq. 5)"
        if curve.transition_gib() is None:
            rule += (
                ", although these agents would save nothing with it: real contexts are more unequal, and at this γ_G "
                "only a recording can tell"
            )
    if not needed_gib:
        return 0.0, rule
    if benefit is None:
        rule += "; whether restoring pays cannot be judged: give --activated-params or --prefill-tokens-per-s"
    elif benefit[0] < 0:
        rule += "; only where restoring pays, which cannot be judged from this model and GPU alone (Eq. 2)"
    return needed_gib, rule


class _Curve:
    """Predictions by capacity, added where the curve bends."""

    def __init__(self, workload: Workload, deployment: Deployment, progress: Callable[[int], None] | None) -> None:
        self._deployment = deployment
        self._progress = progress
        self._predictor = Predictor(
            workload, deployment.pool, deployment.gpu_kv_tokens, deployment.bytes_per_token, deployment.ttl_s
        )
        self._by_gib: dict[float, Prediction] = {}

    def predictions(self) -> list[Prediction]:
        """By rising capacity."""
        return [self._by_gib[gib] for gib in sorted(self._by_gib)]

    def sample(self, scale_gib: float) -> None:
        """The tiers asked for, multiples of the scale up to one that holds everything, then the steepest gaps."""
        ample_gib = max([self._predictor.all_gib, *self._deployment.host_gib])
        multiples = (scale_gib * multiple for multiple in _SCALE_MULTIPLES)
        self._add([0.0, *self._deployment.host_gib, *(gib for gib in multiples if gib < ample_gib), ample_gib])
        for _ in range(_REFINEMENTS):
            points = self.predictions()
            gaps = [
                (abs(a.computed_prefill_tokens.expected - b.computed_prefill_tokens.expected), a.host_gib, b.host_gib)
                for a, b in pairwise(points)
                if b.capacity_chunks - a.capacity_chunks > 1
            ]
            steepest, low, high = max(gaps, default=(0, 0.0, 0.0))
            if steepest <= _FLAT * points[0].computed_prefill_tokens.expected:
                return
            self._add([_between(low, high)])

    def smallest_gib_that_suffices(self) -> float:
        """The smallest capacity that leaves little more to compute than the largest; 0 if none is needed."""
        points = self.predictions()
        enough = points[-1].computed_prefill_tokens.high * (1 + TOLERANCE)
        too_small = [point.host_gib for point in points if point.computed_prefill_tokens.high > enough]
        if not too_small:
            return 0.0
        low = max(too_small)
        high = min(point.host_gib for point in points if point.host_gib > low)
        while high > low * _RESOLUTION and self._chunks(high) > self._chunks(low) + 1:
            middle = _between(low, high)
            self._add([middle])
            if self._by_gib[middle].computed_prefill_tokens.high > enough:
                low = middle
            else:
                high = middle
        return high

    def transition_gib(self) -> tuple[float, float] | None:
        """Where the curve has saved 10 % and 90 % of what it saves in the end."""
        points = self.predictions()
        first, last = (points[end].computed_prefill_tokens.expected for end in (0, -1))
        if first - last <= TOLERANCE * last:
            return None
        low, high = (self._gib_at(points, first - share * (first - last)) for share in _TRANSITION_SHARES)
        return low, high

    def saving(self) -> float:
        """The share of computed prefill that the largest tier saves."""
        points = self.predictions()
        return 1 - points[-1].computed_prefill_tokens.expected / points[0].computed_prefill_tokens.expected

    def excess(self, gib: float) -> float:
        """Computed prefill of a sampled tier over the largest one's, less one."""
        least = self.predictions()[-1].computed_prefill_tokens.expected
        return self._by_gib[gib].computed_prefill_tokens.expected / least - 1

    @staticmethod
    def _gib_at(points: list[Prediction], computed: float) -> float:
        """The capacity at which the curve first falls to so much computed prefill, interpolated."""
        for before, after in pairwise(points):
            above, below = before.computed_prefill_tokens.expected, after.computed_prefill_tokens.expected
            if below <= computed:
                share = (above - computed) / (above - below) if above > below else 1.0
                return before.host_gib + share * (after.host_gib - before.host_gib)
        return points[-1].host_gib

    def _chunks(self, gib: float) -> int:
        return self._by_gib[gib].capacity_chunks

    def _add(self, capacities_gib: Iterable[float]) -> None:
        for gib in capacities_gib:
            if gib not in self._by_gib:
                self._by_gib[gib] = self._predictor.predict(gib)
                if self._progress is not None:
                    self._progress(len(self._by_gib))


def _between(low: float, high: float) -> float:
    """The middle of a gap: geometric, unless it starts at no tier."""
    return math.sqrt(low * high) if low > 0 else high / 2


def _rounded_up(gib: float) -> float:
    """To two significant digits: nobody orders memory by the MiB."""
    if gib <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(gib)) - 1)
    return round(math.ceil(round(gib / step, 6)) * step, 12)


def _assumptions(workload: Workload, deployment: Deployment) -> list[str]:
    (slow, fast), (short, long) = deployment.pool.prefill_tokens_per_s, deployment.pool.output_s_per_token
    notes = []
    if (sessions := workload.sessions) < deployment.pool.active_pool:
        notes.append(
            f"the recording has {sessions} session{'s' * (sessions > 1)}, fewer than the pool's "
            f"{deployment.pool.active_pool:,}: the curve is that of so many agents; the working set is the whole pool's"
        )
    needed = workload.chunks.prompt_tokens + workload.chunks.output_tokens
    if too_long := int((needed > deployment.gpu_kv_tokens).sum()):
        notes.append(
            f"{too_long:,} of {len(needed):,} calls, of up to {needed.max():,} tokens with their output, exceed the "
            "GPU's KV cache: vLLM does not serve them, but they are counted here"
        )
    notes += [
        f"the engine prefills {slow:,.0f} to {fast:,.0f} tokens/s and takes {short * 1e3:g} to {long * 1e3:g} ms per "
        "output token; ranges span both ends",
        "preemptions are not modelled: they add computed prefill where the GPU's KV cache is overcommitted",
    ]
    if deployment.latent and deployment.ranks > 1:
        notes.append("MLA: ranks need the same vectors, and LMCache keeps those of the first: one tier for the node")
    if deployment.benefit_range is not None and not deployment.hardware.restore_measured:
        notes.append("OBR takes the host link at its peak: nobody measured restores on this GPU; real ones are slower")
    return notes
