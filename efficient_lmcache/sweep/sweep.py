"""Runs a sweep: what its plan asks for and no earlier attempt has finished, one fresh server after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.options import with_defaults
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.rundir import RunDirectoryError, RunRecord, read_record
from efficient_lmcache.replay.server import ServerOptions, serve_command
from efficient_lmcache.replay.signals import interrupt, on_ending_signal
from efficient_lmcache.sweep.estimate import Estimate, duration
from efficient_lmcache.sweep.expand import PlannedRun, Subject, expand, read_subject
from efficient_lmcache.sweep.plan import Plan, PlanError, load_plan
from efficient_lmcache.sweep.predictions import predict_runs
from efficient_lmcache.sweep.requirements import check, observe
from efficient_lmcache.sweep.state import (
    Status,
    SweepError,
    SweepRun,
    SweepState,
    load,
    now,
    only_sweep_in,
    save,
    stopped,
    sweep_file,
)

_GIB = 1 << 30
# Options in which a run may differ from the one that its sweep was begun with, and still be the same run.
_FREE_OPTIONS = ("trace", "model", "out", "start_timeout_s")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What `replay sweep` is told; `trace` and `model` go before the plan's own."""

    plan: Path
    out: Path
    resume: bool = False
    trace: Path | None = None
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan made concrete, before anything ran."""

    plan: Plan
    subject: Subject
    runs: list[PlannedRun]

    def unmet(self, out: Path) -> list[str]:
        """What the machine lacks, a sentence each: of what the plan requires, and memory and disk in any case."""
        tiers_gib = max(run.options.host_memory_gib for run in self.runs)
        disk_gib = Estimate.of(self.runs, self.subject.trace.totals.calls).disk_bytes / _GIB
        return check(self.plan.requires, observe(out), host_tier_gib=tiers_gib, disk_gib=disk_gib)


def prepare(options: SweepOptions, closing: ExitStack) -> Prepared:
    """Read plan, trace and model. `closing` closes the trace.

    Raises:
        PlanError, ReplayOptionError, TraceError: nothing has been created.
    """
    plan = load_plan(options.plan)
    try:
        subject = read_subject(plan, options.trace, options.model)
        closing.enter_context(subject.trace)
        return Prepared(plan, subject, expand(plan, subject, options.out))
    except PlanError as error:
        raise PlanError(f"{options.plan}: {error}") from error


def run_sweep(
    options: SweepOptions, console: Console, command_of: Callable[[ServerOptions, int], list[str]] = serve_command
) -> SweepState:
    """Run what is left of the sweep; a run that fails does not stop the others. `command_of`: see `run_replay`.

    Raises:
        PlanError, ReplayOptionError, TraceError, SweepError: nothing was run.
        KeyboardInterrupt: the run in progress is kept and counts as not run; `resume` goes on from there.
    """
    with ExitStack() as closing:
        prepared = prepare(options, closing)
        if unmet := prepared.unmet(options.out):
            raise SweepError(f"{options.plan}: this machine lacks what the plan needs:\n  " + "\n  ".join(unmet))
        closing.enter_context(only_sweep_in(options.out))
        closing.enter_context(on_ending_signal(interrupt))
        state = _opened(options, prepared)
        save(state, options.out)
        _run_all(options, prepared, state, console, command_of)
        return state


def new_state(prepared: Prepared) -> SweepState:
    """The sweep before anything ran or was predicted."""
    plan, trace, model = prepared.plan, prepared.subject.trace, prepared.subject.model_path
    return SweepState(
        name=plan.name,
        plan=plan.model_dump(mode="json"),
        trace={"name": trace.path.name, "sha256": trace.sha256, **asdict(trace.totals)},
        runs=[
            SweepRun(run.name, f"runs/{run.name}", run.repeat, {**run.options.to_json(), "out": f"runs/{run.name}"})
            for run in prepared.runs
        ],
        model={
            "name": model.resolve().name,
            "sha256": hashlib.sha256((model / "config.json").read_bytes()).hexdigest(),
        },
    )


def _opened(options: SweepOptions, prepared: Prepared) -> SweepState:
    """The state on disk if there is one, brought up to date with what its runs say of themselves; else a new one."""
    out, fresh = options.out, new_state(prepared)
    if not sweep_file(out).exists():
        if (out / "runs").exists():
            # They could be taken for this sweep's, and be older than its predictions.
            raise SweepError(f"{out}: holds runs, and no {sweep_file(out).name} that knows them; name another --out")
        predict_runs(fresh, prepared.plan, prepared.subject, prepared.runs)
        return fresh
    if not options.resume:
        raise SweepError(f"{out}: holds a sweep already; --resume goes on with it, another --out begins anew")
    state = load(out)
    _require_same(state, fresh, out)
    for run in state.runs:
        _settle(run, out)
    return state


def _require_same(state: SweepState, fresh: SweepState, out: Path) -> None:
    """Raises SweepError unless both are the same runs of one trace and model, wherever those files are now."""
    for what, begun, given in (("trace", state.trace, fresh.trace), ("model", state.model, fresh.model)):
        if begun and begun.get("sha256") != given["sha256"]:
            raise SweepError(f"{out}: was begun with another {what}, {begun.get('name')!r}; name a new --out")
    different = sorted(_differences(state, fresh))
    if different:
        raise SweepError(
            f"{out}: was begun with another plan, which differs in {', '.join(different)}; name a new --out"
        )


def _differences(state: SweepState, fresh: SweepState) -> set[str]:
    """The plan's keys that would make other runs or other predictions."""
    if [run.name for run in state.runs] != [run.name for run in fresh.runs]:
        return {"runs"}
    pairs = [(with_defaults(begun.options), given.options) for begun, given in zip(state.runs, fresh.runs, strict=True)]
    pairs.append(({"predict": state.plan.get("predict")}, {"predict": fresh.plan["predict"]}))
    return {
        name for begun, given in pairs for name in given if name not in _FREE_OPTIONS and begun.get(name) != given[name]
    }


def _settle(run: SweepRun, out: Path) -> None:
    """Believe the run's own record, whatever the sweep was when it was written."""
    try:
        record = read_record(out / run.directory)
    except RunDirectoryError:
        run.status = "pending"
        return
    if record["status"] == "complete" and record["outputs_exact"] == record["calls"]:
        run.status, run.error = "complete", None
    else:
        run.status = "pending"


def _run_all(
    options: SweepOptions,
    prepared: Prepared,
    state: SweepState,
    console: Console,
    command_of: Callable[[ServerOptions, int], list[str]],
) -> None:
    planned = {run.name: run for run in prepared.runs}
    estimate = Estimate.of(prepared.runs, prepared.subject.trace.totals.calls, state)
    done = len(state.runs) - len(state.unfinished)
    opening = f"{state.name}: {len(state.runs)} runs, {done} of them done; {estimate.text(state)}"
    console.print(opening, highlight=False, soft_wrap=True)
    for number, run in enumerate(state.runs, 1):
        if run.status == "complete":
            continue
        console.rule(f"{number}/{len(state.runs)} {run.name}")
        _run_one(options, planned[run.name], run, state, console, command_of)
        estimate.learn(run, state)
        left = estimate.left_s(state)
        said = f"; about {duration(left)} left" if left else ""
        console.print(f"{run.name}: {run.status}{f' ({run.error})' if run.error else ''}{said}", highlight=False)


def _run_one(
    options: SweepOptions,
    planned: PlannedRun,
    run: SweepRun,
    state: SweepState,
    console: Console,
    command_of: Callable[[ServerOptions, int], list[str]],
) -> None:
    run.attempts = _next_attempt(run, options.out)
    run.directory = f"runs/{run.name}" + (f"-attempt{run.attempts}" if run.attempts > 1 else "")
    run.status, run.error, run.started_at, run.finished_at = "running", None, now(), None
    save(state, options.out)
    try:
        record = run_replay(replace(planned.options, out=options.out / run.directory), console, command_of)
        run.status, run.error = _outcome(record)
    except (ReplayOptionError, RunDirectoryError) as error:
        run.status, run.error = "failed", str(error)
    except OSError as error:  # a full disk would fail every other run too
        run.status, run.error = "failed", str(error)
        raise stopped(options.out, error) from error
    except KeyboardInterrupt:
        run.status, run.error = "pending", "interrupted"
        raise
    finally:
        run.finished_at = now()
        save(state, options.out)
    if run.status == "pending":
        raise KeyboardInterrupt


def _next_attempt(run: SweepRun, out: Path) -> int:
    """Earlier attempts stay where they are, for whoever wants to know what went wrong."""
    used = run.attempts > 0 and (out / run.directory).exists()
    return run.attempts + 1 if used else max(1, run.attempts)


def _outcome(record: RunRecord) -> tuple[Status, str | None]:
    if record.status == "interrupted":
        return "pending", record.error
    if record.status != "complete":
        return "failed", record.error
    if record.outputs_exact != record.calls:
        return "failed", f"{record.calls - record.outputs_exact} of {record.calls} outputs are not exact"
    return "complete", None
