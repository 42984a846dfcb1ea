"""`efficient-lmcache replay sweep`: many runs of one trace, from a plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from efficient_lmcache.replay.cli_common import INTERRUPTED_STATUS, RUN_FAILED_STATUS, failure, user_errors
from efficient_lmcache.replay.compare import compare, render
from efficient_lmcache.replay.deployment import Ports, plan_deployment
from efficient_lmcache.replay.rundir import RunDirectory
from efficient_lmcache.sweep.estimate import Estimate
from efficient_lmcache.sweep.predictions import predict_runs, prediction_text
from efficient_lmcache.sweep.state import SweepState
from efficient_lmcache.sweep.sweep import Prepared, SweepOptions, new_state, prepare, run_sweep

_DRY_RUN_PORT = 8000  # the first of them; a run takes any free ones


def sweep(
    plan: Annotated[Path, typer.Argument(help="YAML; docs/sweeps.md has every key.")],
    out: Annotated[Path, typer.Option(help="Directory for sweep.json and the runs.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every command; run and create nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in OUT; begin it if there is none.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Instead of the plan's.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory, instead of the plan's.")] = None,
) -> None:
    """Predict, then run, every configuration of a plan, each on a fresh server."""
    options = SweepOptions(plan, out, resume, trace, model)
    with user_errors():
        if dry_run:
            with ExitStack() as closing:
                for line in dry_run_lines(prepare(options, closing), out):
                    typer.echo(line)
            return
        try:
            state = run_sweep(options, Console(stderr=True))
        except KeyboardInterrupt:
            raise failure(f"interrupted; finished runs are kept, --resume goes on: {out}", INTERRUPTED_STATUS) from None
        _report(state, out)


def dry_run_lines(prepared: Prepared, out: Path) -> Iterator[str]:
    """A shell script of the runs; in comments what is predicted, and its servers' commands with their environments."""
    totals, state = prepared.subject.trace.totals, new_state(prepared)
    predict_runs(state, prepared.plan, prepared.subject, prepared.runs)
    estimate = Estimate.of(prepared.runs, totals.calls, state)
    yield (
        f"# {state.name}: {len(prepared.runs)} runs of {totals.calls} calls "
        f"({totals.tasks} tasks, {totals.prompt_tokens} prompt tokens)"
    )
    yield f"# {estimate.text(state)}"
    for sentence in (*state.prediction_notes, *(f"this machine lacks: {each}" for each in prepared.unmet(out))):
        yield f"# {sentence}"
    for planned, run in zip(prepared.runs, state.runs, strict=True):
        prediction = None if run.prediction is None else state.predictions[run.prediction]
        yield f"# {run.name}{'' if prediction is None else ': ' + prediction_text(prediction)}"
        yield shlex.join(planned.options.command())
        options = planned.options
        ports = Ports.of(options, list(range(_DRY_RUN_PORT, _DRY_RUN_PORT + options.engines + 3)))
        facts = prepared.subject.model, planned.context_tokens, RunDirectory(options.out)
        deployment = plan_deployment(options, *facts, Path("METRICS_DIR"), ports, {})
        for part in (*deployment.shared, *deployment.engines):
            variables = (f"{name}={value}" for name, value in part.environment.items())
            yield f"#   {shlex.join([*variables, *part.command])}"


def _report(state: SweepState, out: Path) -> None:
    complete = [out / run.directory for run in state.runs if run.status == "complete"]
    if complete:
        typer.echo(render(compare(complete), "table"))
    if state.unfinished:
        failed = "\n  ".join(f"{run.name}: {run.error}" for run in state.unfinished)
        message = f"{len(state.unfinished)} of {len(state.runs)} runs failed; --resume tries them again:\n  {failed}"
        raise failure(message, RUN_FAILED_STATUS)
