"""The paper's deployment guide (Table 12) for one deployment, in plain words."""

from __future__ import annotations

from typing import NamedTuple

# Table 1: offload paid on the designs up to 2.3 K peak FLOP per host-link byte and slowed every run at 15.5 K.
LOW_FLOP_PER_BYTE = 2_400.0
HIGH_FLOP_PER_BYTE = 15_000.0
# Below so much of its prompts in common with what was sent before, an agent rewrites its history (98.1 % in the paper).
STABLE_SHARE = 0.9
_FEW_BROKEN = 0.02
_NOTICEABLE = 0.005
WORTHWHILE = 0.1  # a smaller saving is not worth a tier, a smaller excess no larger one


class Advice(NamedTuple):
    """One row of the guide.

    Attributes:
        regime: what is weighed.
        finding: how this deployment stands.
        action: what to do.
    """

    regime: str
    finding: str
    action: str


def advise(
    *,
    flop_per_byte: float,
    benefit_range: tuple[float, float] | None,
    gamma_g: float,
    gamma_h: float | None,
    host_gib: float | None,
    recommended_gib: float,
    saving: float,
    excess: float | None,
    stable_share: float | None = None,
    broken_share: float | None = None,
) -> list[Advice]:
    """Table 12's rows: hardware, GPU pressure, host pressure and, where a recording tells it, context editing.

    Args:
        flop_per_byte: peak FLOP per host-link byte of the GPU.
        benefit_range: OBR (Eq. 2) at the fastest and at the slowest prefill; None where nobody knows the prefill.
        gamma_g, gamma_h: pressure on the GPU's KV cache and on the host tier; None without a host tier.
        host_gib: the tier that is judged, per rank; None without one.
        recommended_gib: what the plan recommends, per rank.
        saving: the share of computed prefill that a host tier without limit is predicted to save.
        excess: computed prefill of the host tier over that of an unlimited one, less one; None without a host tier.
        stable_share: of all prompt tokens, those that a tier without limit would cover.
        broken_share: those that it would cover besides, if prompts only extended the ones before; None where
            nobody knows which those are.
    """
    rows = [
        _hardware(flop_per_byte, benefit_range),
        _gpu_pressure(gamma_g, saving),
        _host_pressure(gamma_h, excess, host_gib, recommended_gib),
    ]
    return rows if stable_share is None else [*rows, _editing(stable_share, broken_share)]


def _hardware(flop_per_byte: float, benefit_range: tuple[float, float] | None) -> Advice:
    measure = "measure both: replay your trace with and without the tier"
    if benefit_range is not None and benefit_range[0] < 0:
        least, most = benefit_range
        regime = f"offload benefit ratio {least:.2f} to {most:.2f}"
        if most < 0:
            return Advice(
                regime,
                f"restoring takes {1 - most:.1f} to {1 - least:.1f} times as long as computing again",
                "rely on GPU prefix caching: hits in a host tier cost time",
            )
        return Advice(
            regime,
            f"whether restoring pays cannot be judged: it takes {1 - most:.1f} to {1 - least:.1f} times as long as "
            "computing again, by how fast the engine prefills",
            f"give --prefill-tokens-per-s as you measure it, or {measure}",
        )
    regime = f"{flop_per_byte:,.0f} FLOP per host-link byte"
    if flop_per_byte <= LOW_FLOP_PER_BYTE:
        return Advice(
            regime,
            "low, as on H20 and RTX 3090, where offload took 0.60 to 0.92 of the time once hits survived",
            "offload",
        )
    if flop_per_byte >= HIGH_FLOP_PER_BYTE:
        return Advice(
            regime,
            "high, as on H800, where every offload run took 1.08 to 1.87 times as long",
            "favour GPU prefix caching; measure before you add a host tier",
        )
    return Advice(
        regime,
        "between the designs that the paper measured (offload paid up to 2,300 and cost time at 15,500)",
        measure,
    )


def _gpu_pressure(gamma_g: float, saving: float) -> Advice:
    regime = f"γ_G = {gamma_g:.2f}"
    predicted = f"a host tier can save {saving:.0%} of the computed prefill"
    if gamma_g > 1:
        return Advice(regime, "the pool's context exceeds the GPU's KV cache", predicted)
    fits = "the GPU's KV cache holds the pool's mean context"
    if saving <= WORTHWHILE:
        return Advice(regime, fits, f"GPU prefix caching is enough: {predicted}")
    return Advice(regime, f"{fits}, yet prompts come back after it has forgotten them", predicted)


def _host_pressure(
    gamma_h: float | None, excess: float | None, host_gib: float | None, recommended_gib: float
) -> Advice:
    larger = f"{recommended_gib:,g} GiB per rank"
    if gamma_h is None or excess is None or host_gib is None:
        return Advice(
            "no host tier given", "nothing to weigh", f"plan for {larger}" if recommended_gib else "plan without one"
        )
    regime = f"γ_H = {gamma_h:.2f}"
    left = "it leaves no more to compute than an unlimited one"
    if excess >= _NOTICEABLE:
        left = f"it leaves {1 + excess:.{2 if excess < 1 else 1}f} times as much to compute as an unlimited one"
    if not recommended_gib:
        return Advice(regime, left, "leave the host tier out: nothing is recommended")
    if gamma_h > 1 and (excess > WORTHWHILE or host_gib < recommended_gib):
        conditioned = "conditioned admission (it declines writes that would be evicted unread)"
        return Advice(
            regime,
            f"the host tier is smaller than the pool's working set: {left}",
            f"{conditioned}, or a larger tier: {larger}" if host_gib < recommended_gib else conditioned,
        )
    if excess > WORTHWHILE:
        return Advice(
            regime,
            f"the host tier holds the working set of one round, but {left}",
            f"admit every write; consider {larger}" if host_gib < recommended_gib else "admit every write",
        )
    if gamma_h > 1:
        return Advice(regime, f"smaller than the pool's working set, yet {left}", "admit every write: admission none")
    return Advice(
        regime, "the host tier holds what the pool reuses", "admit every write: conditioned admission never engages"
    )


def _editing(stable_share: float, broken_share: float | None) -> Advice:
    regime = f"{stable_share:.1%} of prompt tokens stable"
    if stable_share >= STABLE_SHARE or (broken_share is not None and broken_share <= _FEW_BROKEN):
        extend = "prompts extend what was sent before"
        if stable_share < STABLE_SHARE:
            extend += ", and the rest is new or fills no chunk"
        return Advice(regime, extend, "keep it so: judge edits by cache-stable length")
    edits = "early edits or little sharing"
    if broken_share is not None:
        edits = f"early edits: {broken_share:.1%} more would be, if prompts only extended what was sent before"
    return Advice(
        regime,
        f"{edits}; a rewritten early part rekeys every later chunk",
        "judge edits by cache-stable length; `efficient-lmcache trace lint` finds where prompts stop extending",
    )
