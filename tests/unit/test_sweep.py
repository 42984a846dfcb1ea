"""Sweeps from plan to sweep.json, against a fake server process (see `fake_server`); `recompute` needs no more."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_server import fake_command
from rich.console import Console
from sweep_files import model_directory
from typer.testing import CliRunner

from efficient_lmcache.cli import app
from efficient_lmcache.replay.cli_replay import app as replay_app
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.rundir import RunDirectory
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import NoTraceError
from efficient_lmcache.sweep.plan import PlanError
from efficient_lmcache.sweep.state import SweepError, SweepState, load, only_sweep_in
from efficient_lmcache.sweep.sweep import SweepOptions, run_sweep

CALLS = 4
SLOW_SWEEP = """
import sys
from pathlib import Path
from rich.console import Console
from fake_server import fake_command
from efficient_lmcache.sweep.sweep import SweepOptions, run_sweep
servers = iter([fake_command(), fake_command("hang@2")])
command_of = lambda options, port: next(servers)(options, port)
run_sweep(SweepOptions(Path(sys.argv[1]), Path(sys.argv[2])), Console(quiet=True), command_of)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return plan_with_its_files(tmp_path)


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = plan_with_its_files(tmp_path_factory.mktemp("finished"))
    sweep(plan)
    return plan.parent


@pytest.fixture
def finished(finished_sweep: Path, tmp_path: Path) -> Path:
    """The plan of a sweep whose runs are complete; a copy for each test."""
    shutil.copytree(finished_sweep, tmp_path, dirs_exist_ok=True)
    return tmp_path / "plan.yaml"


def plan_with_its_files(directory: Path) -> Path:
    workload = Workload(tasks=3, calls_per_task=2, vocab_size=64, system_tokens=32, max_prompt_tokens=4_000)
    synthesize(directory / "agents.trace", workload)
    (directory / "model").mkdir()
    model_directory(directory / "model")
    return write_plan(directory)


def write_plan(directory: Path, **changed: Any) -> Path:
    path = directory / "plan.yaml"
    content = {
        "name": "tiny",
        "trace": "agents.trace",
        "model": "model",
        "server": {"gpu_kv_tokens": 8192},
        "replay": {"time_scale": 0, "call_timeout_s": 60},
        "runs": [{"admission": "recompute", "active_pool": 2, "repeats": 2}],
        **changed,
    }
    path.write_text(yaml.safe_dump(content))
    return path


def sweep(plan: Path, *faults: str, resume: bool = False) -> SweepState:
    options = SweepOptions(plan, plan.parent / "out", resume)
    return run_sweep(options, Console(quiet=True), fake_command(*faults))


def calls_of(out: Path, directory: str) -> int:
    rows = [json.loads(line) for line in (out / directory / "calls.jsonl").read_text().splitlines()]
    assert len({(row["task"], row["call"]) for row in rows}) == len(rows)
    return len(rows)


def test_every_run_is_complete_and_younger_than_its_prediction(plan: Path) -> None:
    write_plan(plan.parent, runs=[{"admission": "recompute", "active_pool": [2, 1], "repeats": 2}])
    sweep(plan)
    written = json.loads((plan.parent / "out" / "sweep.json").read_text())
    assert written["schema"] == "efficient-lmcache-sweep/1"
    names = ["a2-recompute", "a2-recompute-r2", "a1-recompute", "a1-recompute-r2"]
    assert [run["name"] for run in written["runs"]] == names
    assert [run["prediction"] for run in written["runs"]] == [0, 0, 1, 1]
    for run in written["runs"]:
        prediction = written["predictions"][run["prediction"]]
        assert run["status"] == "complete"
        assert datetime.fromisoformat(prediction["created_at"]) < datetime.fromisoformat(run["started_at"])
        assert prediction["active_pool"] == run["options"]["active_pool"]
        span = prediction["computed_prefill_tokens"]
        assert 0 < span["low"] <= span["expected"] <= span["high"]
        assert calls_of(plan.parent / "out", run["directory"]) == CALLS


def test_a_failed_run_does_not_stop_the_others_and_is_tried_again(plan: Path) -> None:
    first = sweep(plan, "die@2")
    assert {run.status for run in first.runs} == {"failed"}
    assert all("stopped answering" in (run.error or "") for run in first.runs)
    predictions = first.predictions
    second = sweep(plan, resume=True)
    assert {run.status for run in second.runs} == {"complete"}
    assert second.predictions == predictions
    assert second.runs[0].directory == "runs/a2-recompute-attempt2"
    assert (plan.parent / "out/runs/a2-recompute/run.json").exists()


def test_outputs_that_are_not_exact_fail_the_run(plan: Path) -> None:
    state = sweep(plan, "wrong@2")
    assert {run.error for run in state.runs} == {f"1 of {CALLS} outputs are not exact"}


def test_resuming_a_finished_sweep_runs_nothing(finished: Path) -> None:
    before = load(finished.parent / "out")
    assert sweep(finished, "die@1", resume=True) == before


def test_a_killed_sweep_keeps_what_was_finished_and_resumes_without_a_lost_or_doubled_call(plan: Path) -> None:
    out = plan.parent / "out"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", SLOW_SWEEP, str(plan), str(out)], env=environment)
    deadline_s = time.monotonic() + 60
    while not (out / "runs/a2-recompute-r2/calls.jsonl").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = load(out)
    assert [run.status for run in killed.runs] == ["complete", "running"]
    resumed = sweep(plan, resume=True)
    assert {run.status for run in resumed.runs} == {"complete"}
    assert resumed.runs[0] == killed.runs[0]
    assert resumed.runs[1].directory == "runs/a2-recompute-r2-attempt2"
    assert [calls_of(out, run.directory) for run in resumed.runs] == [CALLS] * 2


def test_a_run_that_finished_just_before_its_sweep_was_killed_is_believed(finished: Path) -> None:
    state = load(finished.parent / "out")
    file = finished.parent / "out" / "sweep.json"
    content = json.loads(file.read_text())
    content["runs"][0]["status"] = "running"
    file.write_text(json.dumps(content))
    resumed = sweep(finished, "die@1", resume=True)
    assert [run.status for run in resumed.runs] == ["complete"] * 2
    assert resumed.runs[0].attempts == state.runs[0].attempts
    assert load(finished.parent / "out") == resumed


def test_a_run_whose_record_is_gone_or_garbled_is_run_again(finished: Path) -> None:
    out = finished.parent / "out"
    shutil.rmtree(out / "runs/a2-recompute")
    (out / "runs/a2-recompute-r2/run.json").write_text('{"schema": "efficient-lmcache-run/1"}')
    resumed = sweep(finished, resume=True)
    assert [run.status for run in resumed.runs] == ["complete"] * 2
    assert [run.directory for run in resumed.runs] == ["runs/a2-recompute", "runs/a2-recompute-r2-attempt2"]


def test_a_directory_is_used_only_by_the_sweep_that_began_in_it(finished: Path) -> None:
    with pytest.raises(SweepError, match="holds a sweep already; --resume goes on with it"):
        sweep(finished)
    for changed, named in (
        ({"replay": {"time_scale": 2}}, "time_scale"),
        ({"runs": [{"admission": "recompute", "active_pool": 1}]}, "runs"),
        ({"predict": {"output_s_per_token": [0.1, 0.2]}}, "predict"),
    ):
        write_plan(finished.parent, **{"replay": {"time_scale": 0, "call_timeout_s": 60}, **changed})
        with pytest.raises(SweepError, match=f"was begun with another plan, which differs in .*{named}"):
            sweep(finished, resume=True)
    write_plan(finished.parent)
    model_directory(finished.parent / "model", context_tokens=32_768)
    with pytest.raises(SweepError, match="was begun with another model, 'model'"):
        sweep(finished, resume=True)
    synthesize(finished.parent / "agents.trace", Workload(tasks=1, calls_per_task=2, vocab_size=64, system_tokens=8))
    with pytest.raises(SweepError, match=r"was begun with another trace, 'agents\.trace'"):
        sweep(finished, resume=True)
    (finished.parent / "agents.trace").unlink()
    with pytest.raises(NoTraceError, match=r"agents\.trace"):
        sweep(finished, resume=True)


def test_what_does_not_change_the_runs_may_change_between_attempts(finished: Path) -> None:
    begun = load(finished.parent / "out")
    server = {"gpu_kv_tokens": 8192, "start_timeout_s": 30}
    write_plan(finished.parent, name="renamed", server=server, requires={"host_memory_gib": 0.001})
    assert sweep(finished, "die@1", resume=True) == begun


def test_two_sweeps_do_not_share_a_directory(plan: Path) -> None:
    with (
        only_sweep_in(plan.parent / "out"),
        pytest.raises(SweepError, match="another sweep is running in it"),
    ):
        sweep(plan)
    shutil.rmtree(plan.parent / "out")
    (plan.parent / "out").write_text("a file")
    with pytest.raises(SweepError, match="out: cannot be used: File exists"):
        sweep(plan)


def test_runs_without_their_sweep_are_not_taken_for_those_of_a_new_one(finished: Path) -> None:
    (finished.parent / "out/sweep.json").unlink()
    with pytest.raises(SweepError, match=r"holds runs, and no sweep\.json that knows them"):
        sweep(finished, resume=True)


@pytest.mark.parametrize(
    ("garble", "message"),
    [
        (lambda content: content["runs"][0].update(status="done"), r"runs\.0\.status is 'done': .*'pending'"),
        (lambda content: content["runs"][1].pop("options"), r"lacks runs\.1\.options"),
        (lambda content: content["runs"][1].update(prediction=7), "a2-recompute-r2: there is no prediction 7"),
        (lambda content: content.pop("trace"), "lacks trace"),
    ],
)
def test_a_garbled_sweep_names_what_is_wrong(finished: Path, garble: Callable[[Any], None], message: str) -> None:
    file = finished.parent / "out/sweep.json"
    content = json.loads(file.read_text())
    garble(content)
    file.write_text(json.dumps(content))
    with pytest.raises(SweepError, match=message) as raised:
        sweep(finished, resume=True)
    assert str(raised.value).startswith(f"{file}: ")


def test_a_full_disk_ends_the_sweep_in_one_line_and_loses_nothing(finished: Path) -> None:
    out = finished.parent / "out"
    begun = load(finished.parent / "out")
    shutil.rmtree(out / "runs/a2-recompute-r2")
    (out / "sweep.partial").symlink_to("/dev/full")
    command = ["replay", "sweep", str(finished), "--out", str(out), "--resume"]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "the sweep stopped: [Errno 28] No space left on device; finished runs are kept" in result.output
    (out / "sweep.partial").unlink()
    assert [run.status for run in sweep(finished, resume=True).runs] == [run.status for run in begun.runs]


def test_a_disk_that_fills_during_a_run_ends_the_sweep(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAFullDisk(RunDirectory):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.calls = Path("/dev/full")

    with monkeypatch.context() as patch:
        patch.setattr("efficient_lmcache.replay.run.RunDirectory", OnAFullDisk)
        with pytest.raises(SweepError, match=r"the sweep stopped: \[Errno 28\] No space left on device"):
            sweep(plan)
    assert [run.status for run in load(plan.parent / "out").runs] == ["failed", "pending"]


def test_a_machine_that_lacks_what_the_plan_needs_runs_nothing(plan: Path) -> None:
    huge = [{"admission": "none", "active_pool": 2, "host_gib": 1e6}]
    for changed, named in (({"requires": {"gpu": "H20", "gpus": 4096}}, "4096 x H20"), ({"runs": huge}, "1e\\+06 GiB")):
        write_plan(plan.parent, **changed)
        with pytest.raises(SweepError, match=f"this machine lacks what the plan needs:\n  needs {named}"):
            sweep(plan)
    assert not (plan.parent / "out").exists()


def test_a_dry_run_is_a_script_of_the_runs_and_creates_nothing(plan: Path) -> None:
    tiered = {"admission": "conditioned", "active_pool": 2, "host_gib": 0.001, "write_threshold_chunks": 4}
    write_plan(plan.parent, runs=[tiered, {"admission": "recompute", "active_pool": 2}])
    result = CliRunner().invoke(app, ["replay", "sweep", str(plan), "--dry-run", "--out", str(plan.parent / "out")])
    assert result.exit_code == 0, result.output
    assert not (plan.parent / "out").exists()
    lines = result.output.splitlines()
    assert f"2 runs of {CALLS} calls" in lines[0]
    assert "MiB of disk" in lines[1]
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert [command[:3] for command in commands] == [["efficient-lmcache", "replay", "run"]] * 2
    assert "predicted" in lines[lines.index(shlex.join(commands[0])) - 1]
    servers = [shlex.split(line[1:]) for line in lines if line.startswith("#   ")]
    assert any(word.startswith("LMCACHE_MAX_LOCAL_CPU_SIZE=") for word in servers[0])
    assert "efficient_lmcache.cli" in servers[1]


def test_a_dry_run_has_every_process_of_a_run_and_says_what_is_not_predicted(plan: Path) -> None:
    server = {"gpu_kv_tokens": 8192, "mode": "server", "engines": 2, "lazy_offload": True}
    write_plan(plan.parent, server=server, runs=[{"admission": "conditioned", "active_pool": 2, "host_gib": 0.001}])
    result = CliRunner().invoke(app, ["replay", "sweep", str(plan), "--dry-run", "--out", str(plan.parent / "out")])
    assert result.exit_code == 0, result.output
    programs = [line for line in result.output.splitlines() if line.startswith("#   ")]
    assert ["lmcache.cli.main" in programs[0], "redis-server" in programs[1]] == [True, True]
    assert all("efficient_lmcache.cli serve" in program for program in programs[2:])
    assert len(programs) == 4
    assert "not predicted" in result.output


def test_a_sweep_begun_before_an_option_existed_goes_on(finished: Path) -> None:
    file = finished.parent / "out" / "sweep.json"
    state = json.loads(file.read_text())
    for run in state["runs"]:
        for name in ("mode", "lazy_offload", "engines", "route", "telemetry"):
            del run["options"][name]
    file.write_text(json.dumps(state))
    assert {run.status for run in sweep(finished, "die@1", resume=True).runs} == {"complete"}


def test_a_printed_command_means_the_run_it_was_printed_for(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunOptions(
        trace=plan.parent / "agents.trace",
        model=plan.parent / "model",
        admission="conditioned",
        host_gib=0.1 + 0.2,
        active_pool=3,
        out=plan.parent / "a run",
        time_scale=0.5,
        gpu_kv_tokens=8192,
        chunk_tokens=512,
        block_tokens=16,
        write_threshold_chunks=4,
        occupancy_threshold=0.9,
        activity_window_s=6.0,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len_tokens=4096,
        tensor_parallel=2,
        gpu_memory_utilization=0.65,
        prefix_caching=False,
        vllm_args=("--seed", "7", "--no-async-scheduling"),
        label_tasks=False,
        call_timeout_s=60.0,
        start_timeout_s=30.0,
        mode="server",
        engines=3,
        route="session",
        telemetry="local",
    )
    lazy = replace(run, lazy_offload=True, prefix_caching=True, telemetry="redis")
    seen: list[RunOptions] = []

    def remember(options: RunOptions, _: Console) -> None:
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("efficient_lmcache.replay.cli_replay.run_replay", remember)
    for each in (run, lazy):
        CliRunner().invoke(replay_app, each.command()[2:])
    assert seen == [run, lazy]


def test_a_plan_that_cannot_be_run_is_named_with_its_file(plan: Path) -> None:
    write_plan(plan.parent, server={"gpu_kv_tokens": 128})
    with pytest.raises(PlanError, match=rf"{plan}: runs\[0\], a2-recompute: --gpu-kv-tokens is 128"):
        sweep(plan)


def test_user_errors_are_one_line(plan: Path) -> None:
    result = CliRunner().invoke(
        app, ["replay", "sweep", str(plan.parent / "no.yaml"), "--out", str(plan.parent / "out")]
    )
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "error: " in result.output
