"""What the numbers say, in sentences computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from efficient_lmcache.report.analyses import Analyses
from efficient_lmcache.report.capacity import PoolRatio, first_runs
from efficient_lmcache.report.figures import tier_text
from efficient_lmcache.report.figures_predictions import verdict
from efficient_lmcache.report.figures_runs import gamma_text, percent, seconds_text, tokens_text
from efficient_lmcache.report.markup import Html, element, joined
from efficient_lmcache.report.predictions import PredictedRun
from efficient_lmcache.report.runs import Absent
from efficient_lmcache.report.table import RunRow

_AS_GOOD = 1.05  # times the least computed prefill: a tier that large gains what there is to gain


def reading(analyses: Analyses) -> list[Html]:
    """One sentence or two per finding; findings that the runs do not allow are left out."""
    found: list[Html] = []
    for figure in analyses.capacity:
        whose = f"{figure.trace_name}: " if len(analyses.capacity) > 1 else ""
        for pool in sorted({one.active_pool for one in figure.series}, reverse=True):
            rows = first_runs(figure.series, pool)
            found += [joined((whose, said)) for said in (*_capacity(rows, pool), *_admission(rows))]
    if not isinstance(analyses.pools, Absent):
        found += _pools(analyses.pools)
    if not isinstance(analyses.predictions, Absent):
        found += _predictions(analyses.predictions)
    return [*found, *_exactness([one.row for one in analyses.runs])]


def _say(text: str, *strong: object) -> Html:
    """`text` with each {} replaced by a strong value."""
    parts = text.split("{}")
    values = [element("strong", value) for value in strong]
    return joined(part for index, part in enumerate(parts) for part in (part, *values[index : index + 1]))


def _capacity(rows: Sequence[RunRow], pool: int) -> Iterable[Html]:
    """From the smallest tier to the smallest one beyond which nothing is gained."""
    offload = sorted((row for row in rows if row.admission == "none"), key=lambda row: row.host_gib_per_rank)
    known = [(row, row.computed_prefill_tokens) for row in offload if row.computed_prefill_tokens]
    if len(known) < 2:
        return
    small, before = known[0]
    least = min(tokens for _, tokens in known)
    large, after = next((row, tokens) for row, tokens in known if tokens <= _AS_GOOD * least)
    if small is large:
        return
    yield _say(
        f"With {{}} agents at the same time, a host tier of {{}} per rank instead of {{}} cuts computed prefill by "
        f"{{}}, from {tokens_text(before)} to {tokens_text(after)} tokens, and changes makespan from "
        f"{seconds_text(small.makespan_s)} to {seconds_text(large.makespan_s)}. "
        f"The working-set estimate is {tier_text(small.working_set_gib_per_rank)} per rank.",
        pool,
        tier_text(large.host_gib_per_rank),
        tier_text(small.host_gib_per_rank),
        percent(1 - after / before),
    )


def _admission(rows: Sequence[RunRow]) -> Iterable[Html]:
    """The smallest and the largest tier at which a policy and offload both ran."""
    ratios = [row for row in rows if row.admission in ("fixed", "conditioned") and row.prefill_to_offload is not None]
    for tier in dict.fromkeys((min(_tiers(ratios), default=None), max(_tiers(ratios), default=None))):
        here = [row for row in ratios if row.host_gib_per_rank == tier]
        if tier is None or not here:
            continue
        side = "below" if (here[0].gamma_h or 0) > 1 else "above"
        policies = [
            _say("{} admission computes {} of offload's prefill", row.admission, f"{row.prefill_to_offload:.2f} ×")
            for row in here
        ]
        yield joined(
            (
                f"At {tier_text(tier)} per rank, a tier {side} the working set (γ_H {gamma_text(here[0].gamma_h)}), ",
                joined(policies, ", "),
                ".",
            )
        )


def _tiers(rows: Iterable[RunRow]) -> list[float]:
    return [row.host_gib_per_rank for row in rows]


def _pools(ratios: Sequence[PoolRatio]) -> Iterable[Html]:
    for ratio in ratios:
        if ratio.active_pool != ratio.base_pool and ratio.computed_prefill is not None:
            yield _say(
                "Without a host tier, {} agents at the same time instead of {} compute {} of the prefill"
                + (f" in {ratio.makespan:.2f} × the makespan." if ratio.makespan is not None else "."),
                ratio.active_pool,
                ratio.base_pool,
                f"{ratio.computed_prefill:.2f} ×",
            )


def _predictions(runs: Sequence[PredictedRun]) -> Iterable[Html]:
    measured = [run for run in runs if run.computed.inside is not None]
    if not measured:
        return
    inside = sum(bool(run.computed.inside) for run in measured)
    worst = max(measured, key=lambda run: abs(run.computed.off or 0))
    furthest = ""
    if worst.computed.off:
        furthest = f" The furthest is {worst.run}, {verdict(worst.computed)} from the nearer end."
    before = "made before the run" if all(run.older for run in measured) else "stored with the sweep"
    yield _say(
        f"Computed prefill was inside the range {before} in {{}} of {{}} predicted runs.{furthest.replace('{}', '')}",
        inside,
        len(measured),
    )


def _exactness(rows: Sequence[RunRow]) -> Iterable[Html]:
    if simulated := sum(row.simulated for row in rows):
        yield _say("{} of {} runs are simulated: no engine ran, and nothing was measured.", simulated, len(rows))
        if simulated == len(rows):
            return
    complete = [row for row in rows if row.status == "complete" and not row.simulated]
    exact = sum(row.exact for row in complete)
    if complete and exact == len(complete):
        yield _say("Every output token of all {} complete runs is the recorded one.", len(complete))
    else:
        yield _say("{} of {} complete runs returned every recorded output token.", exact, len(complete))
