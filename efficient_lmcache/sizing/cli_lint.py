"""`efficient-lmcache trace lint`: where prompts stop extending their predecessor, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from efficient_lmcache.replay.cli_common import user_errors
from efficient_lmcache.replay.progress_bar import progress_bar
from efficient_lmcache.sizing.cli_common import check_figure


def lint(
    recording: Annotated[
        Path, typer.Argument(metavar="PATH", help="A trace, agent trajectories, Weka sessions or Mooncake requests.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tekken, bpe:VOCAB or a Hugging Face tokenizer's directory. Recordings of text need one; for a trace, "
            "the one it was made with shows the text of edits."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the worst tasks and calls to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad records out and count them.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw losses by habit and the worst task, as PNG, SVG or PDF.")
    ] = None,
) -> None:
    """Find where prompts stop extending what was processed before, the likely habit, and the tokens that costs."""
    from efficient_lmcache.sizing.lint_report import to_json, to_tables
    from efficient_lmcache.sizing.lint_sources import lint_recording

    with user_errors():
        check_figure(figure)
        with progress_bar("reading") as progress:
            report, decode = lint_recording(recording, tokenizer=tokenizer, skip_bad=skip_bad, progress=progress)
        if figure is not None:
            from efficient_lmcache.sizing.lint_figure import draw

            draw(report, figure)
    if as_json:
        typer.echo(json.dumps(to_json(report, top, decode), indent=2))
    else:
        Console().print(to_tables(report, top, decode))
        if figure is not None:
            typer.echo(f"{figure}: drawn")
