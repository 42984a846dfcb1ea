"""`efficient-lmcache trace …`: import, synthesize, inspect and trim traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from efficient_lmcache.replay.cli_common import check_output, user_errors
from efficient_lmcache.replay.describe import describe
from efficient_lmcache.replay.importers.formats import IMPORTERS
from efficient_lmcache.replay.importers.importing import AUTO, import_recording
from efficient_lmcache.replay.importers.records import RecordError, stop
from efficient_lmcache.replay.progress_bar import progress_bar
from efficient_lmcache.replay.synthesize import Workload
from efficient_lmcache.replay.synthesize import synthesize as write_synthetic
from efficient_lmcache.replay.trace import TraceReader
from efficient_lmcache.replay.trim import trim as write_trimmed

app = typer.Typer(help="Import, synthesize, inspect, lint and edit traces.", no_args_is_help=True)

_DEFAULT = Workload()

TracePath = Annotated[Path, typer.Argument(metavar="T", help="A trace.")]
Out = Annotated[Path, typer.Option("--out", help="Where to write the trace.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A recording: a file, plain or gzip, or a directory.")],
    out: Out,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="For recordings of text: tekken, bpe:VOCAB or a Hugging Face tokenizer's directory."),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help=f"{AUTO}, {', '.join(IMPORTERS)}.")] = AUTO,
    tasks: Annotated[int | None, typer.Option(help="How many tasks to sample; all by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    vocab: Annotated[int | None, typer.Option(help="Token ids are below it; text's are folded into so many.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad records out and count them.")] = False,
    force: Force = False,
) -> None:
    """Make a trace of recorded agents or requests."""
    bad: list[RecordError] = []
    with user_errors():
        check_output(out, force)
        with progress_bar("importing", "tasks") as progress:
            import_recording(
                source,
                out,
                format_=format_,
                tokenizer=tokenizer,
                tasks=tasks,
                seed=seed,
                vocab_size=vocab,
                skip=bad.append if skip_bad else stop,
                progress=progress,
            )
        if bad:
            typer.echo(f"bad records left out: {len(bad)}; the first: {bad[0]}", err=True)
        _say_written(out)


@app.command()
def synthesize(
    out: Out,
    tasks: Annotated[int, typer.Option(help="Tasks.")] = _DEFAULT.tasks,
    calls_per_task: Annotated[float, typer.Option(help="Mean calls a task.")] = _DEFAULT.calls_per_task,
    vocab: Annotated[int, typer.Option(help="Token ids are below it.")] = _DEFAULT.vocab_size,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = _DEFAULT.seed,
    system_tokens: Annotated[int, typer.Option(help="Prefix that all tasks share.")] = _DEFAULT.system_tokens,
    issue_tokens: Annotated[float, typer.Option(help="Mean length of a task's text.")] = _DEFAULT.issue_tokens,
    output_tokens: Annotated[float, typer.Option(help="Mean length of an output.")] = _DEFAULT.output_tokens,
    observation_tokens: Annotated[
        float, typer.Option(help="Mean length of a tool's answer.")
    ] = _DEFAULT.observation_tokens,
    max_output: Annotated[int | None, typer.Option(help="No output is longer.")] = _DEFAULT.max_output_tokens,
    max_prompt: Annotated[int, typer.Option(help="Tasks end before longer prompts.")] = _DEFAULT.max_prompt_tokens,
    median_gap: Annotated[float, typer.Option(help="Median seconds between calls.")] = _DEFAULT.median_gap_s,
    force: Force = False,
) -> None:
    """Make a trace of synthetic agents; the defaults have the shape of the paper's workload."""
    with user_errors():
        workload = Workload(
            tasks=tasks,
            calls_per_task=calls_per_task,
            vocab_size=vocab,
            seed=seed,
            system_tokens=system_tokens,
            issue_tokens=issue_tokens,
            output_tokens=output_tokens,
            observation_tokens=observation_tokens,
            max_output_tokens=max_output,
            max_prompt_tokens=max_prompt,
            median_gap_s=median_gap,
        )
        check_output(out, force)
        with progress_bar("synthesizing", "tasks") as progress:
            write_synthetic(out, workload, progress)
        _say_written(out)


@app.command()
def info(
    trace: TracePath,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte and record as well.")] = False,
) -> None:
    """Show what a trace contains and how much of its prompts repeats."""
    with user_errors(), TraceReader(trace) as reader:
        if verify:
            with progress_bar("verifying", "tasks") as progress:
                reader.verify(progress)
        with progress_bar("reading", "tasks") as progress:
            facts = describe(reader, progress)
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
        else:
            _show(facts)


@app.command()
def trim(
    trace: TracePath,
    out: Out,
    tasks: Annotated[int | None, typer.Option(help="Keep the first so many tasks.")] = None,
    calls: Annotated[int | None, typer.Option(help="Keep the first so many calls of each task.")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="End a task before its first longer prompt.")] = None,
    max_output: Annotated[int | None, typer.Option(help="Cut outputs to so many tokens; prompts stay.")] = None,
    force: Force = False,
) -> None:
    """Make a smaller trace of a trace; its manifest records how."""
    with user_errors():
        check_output(out, force)
        with progress_bar("trimming", "tasks") as progress:
            write_trimmed(
                trace,
                out,
                tasks=tasks,
                calls=calls,
                max_prompt=max_prompt,
                max_output=max_output,
                progress=progress,
            )
        _say_written(out)


def _say_written(out: Path) -> None:
    with TraceReader(out) as reader:
        totals = reader.totals
        typer.echo(f"{out}: {totals.tasks} tasks, {totals.calls} calls, {totals.prompt_tokens:,} prompt tokens")


def _show(facts: dict[str, Any]) -> None:
    console = Console()
    manifest, shared = facts["manifest"], facts["shared_prefix"]
    summary = Table(show_header=False, box=None)
    rows = {
        "source": manifest["source"],
        "tokenizer": f"{manifest['tokenizer']}, {manifest['vocab_size']:,} ids",
        "sha256": f"{facts['sha256'][:16]}…",
        "file": f"{facts['file_bytes']:,} bytes",
        "tasks, calls": f"{facts['tasks']:,}, {facts['calls']:,}",
        "prompt tokens": f"{facts['prompt_tokens']:,}",
        "output tokens": f"{facts['output_tokens']:,}",
        "in the task's previous prompt": _sum_and_share(shared, "previous_prompt"),
        "cache-stable (and its output)": _sum_and_share(shared, "cache_stable"),
        "history": "\n".join(json.dumps(step) for step in manifest["history"]),
        "assumptions": "\n".join(manifest["assumptions"]),
    }
    for name, text in rows.items():
        summary.add_row(Text(name, style="bold"), Text(text))
    console.print(summary)
    table = Table(*("", "mean", "min", "p50", "p90", "p99", "max"))
    for name, values in facts["distributions"].items():
        table.add_row(name.replace("_", " "), *(f"{value:,.1f}" for value in values.values()))
    console.print(table)


def _sum_and_share(shared: dict[str, Any], name: str) -> str:
    return f"{shared[f'{name}_tokens']:,} ({shared[f'{name}_share']:.1%} of prompt tokens)"


if __name__ == "__main__":
    app()
