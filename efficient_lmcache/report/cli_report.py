"""`efficient-lmcache report`: run directories or a sweep as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from efficient_lmcache.replay.cli_common import check_output, user_errors


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Run directories, sweeps, or directories of them.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    trace: Annotated[
        list[Path] | None, typer.Option(help="Where the runs' trace lies now, if it has moved; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> None:
    """Show runs as one self-contained page: tables, predictions against measurements, interactive plots."""
    with user_errors():
        check_output(out, force)
        size_bytes = write_report(runs, out, trace or [])
    typer.echo(f"{out}: {size_bytes / 1e6:.1f} MB")


def write_report(runs: list[Path], out: Path, traces: list[Path]) -> int:
    """Write the page of `runs` and return its bytes; see `report`."""
    from efficient_lmcache.replay.progress_bar import progress_bar
    from efficient_lmcache.report.analyses import analyse
    from efficient_lmcache.report.page import page
    from efficient_lmcache.report.runs import read_inputs

    inputs = read_inputs(runs, traces)
    with progress_bar("analysing", "runs") as progress:
        analyses = analyse(inputs, progress)
    written = page(inputs, analyses, out).encode()
    partial = out.with_name(out.name + ".partial")
    partial.write_bytes(written)
    partial.replace(out)
    return len(written)
