"""`efficient-lmcache trace profile`: what a recording's calls look like, whatever its format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from efficient_lmcache.replay.cli_common import user_errors
from efficient_lmcache.replay.progress_bar import progress_bar
from efficient_lmcache.sizing.cli_common import check_figure

_WHOLE_FROM = 1000.0
_DISTRIBUTIONS = {
    "calls_per_lane": "calls per lane",
    "prompt_tokens_per_call": "prompt tokens",
    "output_tokens_per_call": "output tokens",
    "cache_stable_tokens_per_later_call": "cache-stable tokens",
    "interval_s": "interval, s",
}


def profile(
    recording: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A trace, Weka or Mooncake file, lookup-hash log or agent trajectories."),
    ],
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens per chunk; the recording's block size, or 256 where it has tokens.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For trajectories: tekken, bpe:VOCAB or a Hugging Face tokenizer's directory.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad records out and count them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw the profile, as PNG, SVG or PDF.")] = None,
) -> None:
    """Show how long a recording's calls are, how much of them repeats, and how much new KV the next call reads."""
    from efficient_lmcache.sizing.profile import profile as measure
    from efficient_lmcache.sizing.streams import open_stream

    with user_errors():
        check_figure(figure)
        with progress_bar("reading") as progress:
            stream = open_stream(recording, chunk_tokens, tokenizer=tokenizer, skip_bad=skip_bad, progress=progress)
            measured = measure(stream)
        if figure is not None:
            from efficient_lmcache.sizing.profile_figure import draw

            draw(measured, figure)
    facts = measured.facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    _show(facts)
    if figure is not None:
        typer.echo(f"{figure}: drawn")


def _show(facts: dict[str, Any]) -> None:
    console = Console()
    shared, new, chunks = facts["shared_prefix"], facts["new_kv"], facts["chunks"]
    at_least = "" if facts["shares_are"] == "exact" else "at least "
    summary = Table(show_header=False, box=None)
    rows = {
        "recording": facts["name"],
        "sessions, lanes, calls": f"{facts['sessions']:,}, {facts['lanes']:,}, {facts['calls']:,}",
        "prompt tokens": f"{facts['prompt_tokens']:,}",
        "output tokens": f"{facts['output_tokens']:,}" if facts["output_tokens"] else "not recorded",
        "in the lane's previous prompt": at_least + _sum_and_share(shared, "previous_prompt", "prompt tokens"),
        "cache-stable (and its output)": at_least + _sum_and_share(shared, "cache_stable", "prompt tokens"),
        f"new KV of {new['of']}": f"{new['tokens']:,} in calls that have a next one",
        "shared by the lane's next call": at_least + _sum_and_share(new, "reused_by_next_call", "that"),
        f"chunks of {facts['chunk_tokens']:,}": f"{chunks['references']:,} references to {chunks['distinct']:,}",
        "of them in several sessions": _of_several_sessions(chunks),
        "shares are": facts["shares_are"],
        "bad records skipped": f"{facts['skipped_records']:,}",
        "notes": "\n".join(facts["notes"]),
    }
    for name, text in rows.items():
        summary.add_row(Text(name, style="bold"), Text(text))
    console.print(summary)
    table = Table(*("", "mean", "min", "p50", "p90", "p99", "max"))
    for name, values in facts["distributions"].items():
        cells = [f"{value:,.1f}" if value < _WHOLE_FROM else f"{value:,.0f}" for value in values.values()]
        table.add_row(_DISTRIBUTIONS[name], *(cells or ["not recorded"]))
    console.print(table)


def _of_several_sessions(chunks: dict[str, Any]) -> str:
    if chunks["in_several_sessions"] is None:
        return "not recorded"
    return f"{chunks['in_several_sessions']:,} ({chunks['in_several_sessions_share']:.1%})"


def _sum_and_share(facts: dict[str, Any], name: str, of: str) -> str:
    return f"{facts[f'{name}_tokens']:,} ({facts[f'{name}_share']:.1%} of {of})"
