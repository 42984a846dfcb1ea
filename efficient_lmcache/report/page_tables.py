"""The page's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from efficient_lmcache.report.condensers import CondenserRow
from efficient_lmcache.report.figures import MARKS, mark_name, swatch, tier_text
from efficient_lmcache.report.figures_gap import GapRun
from efficient_lmcache.report.figures_predictions import verdict
from efficient_lmcache.report.figures_runs import Link, gamma_text, percent, seconds_text, tokens_text
from efficient_lmcache.report.figures_thresholds import Sensitive
from efficient_lmcache.report.latency import Quantiles, ServerTimes
from efficient_lmcache.report.markup import Column, Html, element, joined, table
from efficient_lmcache.report.predictions import Held, PredictedRun
from efficient_lmcache.report.runs import Absent, Inputs
from efficient_lmcache.report.table import RunRow


def _named(row: RunRow, link: Link) -> Html:
    """The run's mark and its name, which leads to its directory."""
    mark = MARKS[mark_name(row.admission, row.connector)]
    hollow = row.repeat > 1
    return joined((swatch(mark.path, mark.colour, hollow=hollow), element("a", row.name, href=link(row.directory))))


def runs(rows: Sequence[RunRow], link: Link) -> Html:
    columns = [
        Column("Run", number=False),
        Column("Configuration", number=False),
        Column("A"),
        Column("Host tier per rank"),
        Column("γ_H"),
        Column("Makespan"),
        Column("Computed prefill"),
        Column("÷ offload"),
        Column("Restored"),
        Column("Stored"),
        Column("Preempt."),
        Column("Declined"),
        Column("Exact"),
    ]
    complete = [row for row in rows if row.status == "complete"]
    cells = [
        [
            _named(row, link),
            element("div", row.configuration, f", repeat {row.repeat}" if row.repeat > 1 else None, class_="wide"),
            row.active_pool,
            tier_text(row.host_gib_per_rank),
            gamma_text(row.gamma_h),
            seconds_text(row.makespan_s),
            tokens_text(row.computed_prefill_tokens),
            "–" if row.prefill_to_offload is None else f"{row.prefill_to_offload:.2f}",
            tokens_text(row.restored_tokens_per_rank),
            tokens_text(row.stored_tokens_per_rank),
            "–" if row.preemptions is None else f"{row.preemptions:,}",
            f"{row.declined:,}" if row.decisions else "–",
            _exact(row),
        ]
        for row in complete
    ]
    caption = (
        "Complete runs. Each is one replay on a fresh server with a cold cache, unless it says that it is simulated; "
        "repeats are kept apart. "
        "Tokens; restored (host → GPU) and stored (GPU → host) per rank; declined calls. "
        "“÷ offload”: computed prefill relative to the offload run of the same tier and pool."
    )
    return table(caption, columns, cells) if cells else element("p", "No run is complete.", class_="absent")


def _exact(row: RunRow) -> object:
    if row.simulated:
        return "simulated"
    return "all" if row.exact else element("span", f"{row.outputs_exact:,} of {row.calls:,}", class_="bad")


def unfinished(inputs: Inputs, rows: Sequence[RunRow], link: Link) -> list[Html]:
    """Runs that are not complete, and those of sweeps that left no directory."""
    cells: list[list[object]] = [
        [_named(row, link), row.status, f"{row.outputs_exact:,} of {row.calls:,}", row.error or "–"]
        for row in rows
        if row.status != "complete"
    ]
    known = {Path(row.directory).resolve() for row in rows}
    cells += [
        [str(entry["name"]), str(entry["status"]), "–", str(entry.get("error") or "not run yet")]
        for sweep in inputs.sweeps
        for entry in sweep.record["runs"]
        if (sweep.path / entry["directory"]).resolve() not in known and entry["status"] != "complete"
    ]
    if not cells:
        return []
    columns = [
        Column("Run", number=False),
        Column("Status", number=False),
        Column("Exact outputs"),
        Column("Why", number=False),
    ]
    return [table("Runs that are not complete. Figures of makespan and tokens leave them out.", columns, cells)]


def predictions(found: Sequence[PredictedRun], address: Callable[[PredictedRun], str | None]) -> Html:
    columns = [
        Column("Run", number=False),
        Column("A"),
        Column("Host tier per rank"),
        Column("γ_H"),
        Column("Computed prefill, predicted (tokens)"),
        Column("measured"),
        Column("Restored, predicted (tokens per rank)"),
        Column("measured"),
        Column("Predicted (UTC)", number=False),
    ]
    cells = [
        [
            _linked(run, address(run)),
            run.active_pool,
            tier_text(run.host_gib_per_rank),
            gamma_text(run.gamma_h),
            *_held(run.computed),
            *_held(run.restored),
            _moment(run),
        ]
        for run in found
    ]
    caption = "Predictions and measurements. Expected value and range; “inside” and “off” are relative to the range."
    return table(caption, columns, cells)


def _linked(run: PredictedRun, address: str | None) -> Html:
    mark = MARKS[mark_name(run.admission, run.connector)]
    name = element("a", run.run, href=address) if address else run.run
    return joined((swatch(mark.path, mark.colour, hollow=run.repeat > 1), name))


def _held(held: Held) -> tuple[Html, Html]:
    spread = element("div", f"{tokens_text(held.low)} – {tokens_text(held.high)}", class_="quiet")
    said = element("div", verdict(held), class_={True: "good", False: "bad", None: "quiet"}[held.inside])
    return joined((tokens_text(held.expected), spread)), joined((tokens_text(held.measured), said))


def _moment(run: PredictedRun) -> Html:
    when = run.created_at[:16].replace("T", " ")
    note = {True: "before the run", False: "after its start", None: "not run yet"}[run.older]
    return joined((when, element("div", note, class_="bad" if run.older is False else "quiet")))


def latency(calls: Sequence[tuple[RunRow, Quantiles]], server: Mapping[str, ServerTimes], link: Link) -> Html:
    columns = [
        Column("Run", number=False),
        *(Column(name) for name in ("Queue", "First token", "Prefill", "Decode", "Whole request")),
        *(Column(f"Call, {name}") for name in ("median", "90th", "99th")),
    ]
    cells = []
    for row, call in calls:
        times = server.get(row.directory)
        means = (
            (times.queue_s, times.first_token_s, times.prefill_s, times.decode_s, times.request_s)
            if times
            else (None,) * 5
        )
        cells.append([_named(row, link), *map(seconds_text, means), *map(seconds_text, (call.p50, call.p90, call.p99))])
    caption = (
        "Time per call. Left: the server's means. Right: percentiles from dispatch to response, as the client sees it."
    )
    return table(caption, columns, cells)


def thresholds(found: Sequence[Sensitive], link: Link) -> Html:
    kappas = sorted({one.write_threshold_chunks for _, result in found for one in result.write_thresholds})
    columns = [
        Column("Run", number=False),
        Column("Decisions"),
        Column("u ≤ 1"),
        Column("Median refill (chunks)"),
        *(Column(f"κ = {kappa}") for kappa in kappas),
        Column("Evicting reports"),
        Column("their lowest occupancy"),
    ]
    cells = []
    for row, result in found:
        declined = {one.write_threshold_chunks: percent(one.declined_share) for one in result.write_thresholds}
        cells.append(
            [
                _named(row, link),
                f"{result.decisions:,}",
                percent(result.at_most_one_new_chunk / max(result.decisions, 1)),
                "–" if result.median_refill_chunks is None else f"{result.median_refill_chunks:,.0f}",
                *(declined.get(kappa, "–") for kappa in kappas),
                f"{result.reports_evicting:,}",
                "–" if result.occupancy_lowest is None else f"{result.occupancy_lowest:.3f}",
            ]
        )
    caption = (
        "New full chunks u, and the share of new-chunk writes declined by κ. "
        "Runs without admission are decided under the conditioned rule."
    )
    return table(caption, columns, cells)


def gaps(found: Sequence[GapRun], link: Link) -> Html:
    columns = [
        Column("Run", number=False),
        Column("Gap, median"),
        Column("Own time, median"),
        Column("Gap ÷ own"),
        Column("Gap, 90th"),
        Column("Chunks written"),
        Column("evicted before the next call"),
        Column("computed again"),
    ]
    cells = []
    for row, gap, evicted in found:
        lost: tuple[object, ...] = ("–", "–", "–")
        if not isinstance(evicted, Absent):
            lost = (f"{evicted.written_chunks:,}", percent(evicted.evicted_share), percent(evicted.recomputed_share))
        cells.append(
            [
                _named(row, link),
                seconds_text(gap.gap_s.p50),
                seconds_text(gap.own_s.p50),
                "–" if gap.median_ratio is None else f"{gap.median_ratio:.1f} ×",
                seconds_text(gap.gap_s.p90),
                *lost,
            ]
        )
    return table("The gap between an agent's turns, and what the tier lost in it.", columns, cells)


def condensers(found: Sequence[CondenserRow], link: Link) -> Html:
    columns = [
        Column("Condenser", number=False),
        Column("Run", number=False),
        Column("A"),
        Column("Host tier per rank"),
        Column("Admission", number=False),
        Column("Mean prompt (tokens)"),
        Column("Cache-stable"),
        Column("Prefix-hit rate of the GPU"),
        Column("Computed prefill (tokens)"),
        Column("÷ as recorded"),
        Column("Restored (tokens)"),
        Column("Makespan"),
    ]
    cells = [
        [
            row.condenser,
            element("a", row.run, href=link(row.directory)),
            row.active_pool,
            tier_text(row.host_gib_per_rank),
            row.admission,
            "–" if row.mean_prompt_tokens is None else f"{row.mean_prompt_tokens:,.0f}",
            percent(row.cache_stable_share),
            percent(row.prefix_hit_rate),
            tokens_text(row.computed_prefill_tokens),
            "–" if row.computed_to_recorded is None else f"{row.computed_to_recorded:.2f}",
            tokens_text(row.restored_tokens_per_rank),
            seconds_text(row.makespan_s),
        ]
        for row in found
    ]
    return table("What edits of the history do to reuse.", columns, cells)
