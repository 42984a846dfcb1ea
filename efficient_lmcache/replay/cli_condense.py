"""`efficient-lmcache trace condense`: the trace that a history condenser would have left."""

from __future__ import annotations

from typing import Annotated

import typer

from efficient_lmcache.replay.cli_common import check_output, user_errors
from efficient_lmcache.replay.cli_trace import Force, Out, TracePath
from efficient_lmcache.replay.condense import (
    CONDENSERS,
    CUT_OUTPUTS,
    Condenser,
    Counts,
    ObservationMasking,
    PerCall,
    RecentEvents,
    Summary,
    per_call,
)
from efficient_lmcache.replay.condense import condense as write_condensed
from efficient_lmcache.replay.progress_bar import progress_bar
from efficient_lmcache.replay.spelling import option
from efficient_lmcache.replay.trace import TraceError, TraceReader


def condense(
    trace: TracePath,
    out: Out,
    condenser: Annotated[str, typer.Option(help=f"One of: {', '.join(CONDENSERS)}.")],
    max_events: Annotated[
        int | None, typer.Option(help=f"recent: events in a prompt. {RecentEvents().max_events} by default.")
    ] = None,
    keep_first: Annotated[
        int | None, typer.Option(help="recent, summary: first events that stay; the first prompt is one. 1 by default.")
    ] = None,
    attention_window: Annotated[
        int | None,
        typer.Option(
            help=f"masking: latest events that are not masked. {ObservationMasking().attention_window} by default."
        ),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(help=f"summary: events beyond which half are kept. {Summary().max_size} by default."),
    ] = None,
    summary_tokens: Annotated[
        int | None, typer.Option(help=f"summary: length of each. {Summary().summary_tokens} by default.")
    ] = None,
    force: Force = False,
) -> None:
    """Make the trace that a history condenser would have left, and show what that does to prompts and their reuse."""
    options = {
        "max_events": max_events,
        "keep_first": keep_first,
        "attention_window": attention_window,
        "max_size": max_size,
        "summary_tokens": summary_tokens,
    }
    with user_errors():
        chosen = _condenser(condenser, {name: value for name, value in options.items() if value is not None})
        check_output(out, force)
        with progress_bar("measuring", "tasks") as progress, TraceReader(trace) as before:
            recorded = per_call(before, progress)
        with progress_bar("condensing", "tasks") as progress:
            counts = write_condensed(trace, out, chosen, progress)
        with progress_bar("measuring", "tasks") as progress, TraceReader(out) as after:
            condensed = per_call(after, progress)
            masks_outputs = CUT_OUTPUTS in after.manifest.assumptions
    _show({"as recorded": recorded, condenser: condensed}, counts)
    if masks_outputs:
        typer.echo(f"{CUT_OUTPUTS}; condense first, then `trace trim --max-output`")


def _condenser(name: str, options: dict[str, int]) -> Condenser:
    if name not in CONDENSERS:
        raise TraceError(f"--condenser {name!r} is unknown; allowed are {', '.join(CONDENSERS)}")
    kind = CONDENSERS[name]
    allowed = kind.__dataclass_fields__
    for given in options:
        if given not in allowed:
            raise TraceError(
                f"{option(given)} is not an option of {name}; allowed are {', '.join(map(option, allowed))}"
            )
    return kind(**options)


def _show(rows: dict[str, PerCall], counts: Counts) -> None:
    typer.echo(f"{'tokens per call':<16}{'calls':>8}{'prompt':>10}{'cache-stable':>21}{'fresh':>9}")
    for name, row in rows.items():
        stable = f"{row.cache_stable_tokens:,.0f} ({row.cache_stable_share:.1%})"
        typer.echo(f"{name:<16}{row.calls:>8,}{row.prompt_tokens:>10,.0f}{stable:>21}{row.fresh_tokens:>9,.0f}")
    if counts.summarizing_calls:
        typer.echo(f"{counts.summarizing_calls} summarizing calls inserted")
    if counts.rewritten:
        typer.echo(
            f"{counts.rewritten} prompts do not extend their predecessor: each counts as a first prompt, kept whole"
        )
    if counts.altered_outputs:
        typer.echo(f"{counts.altered_outputs} prompts do not repeat the whole output before them")
