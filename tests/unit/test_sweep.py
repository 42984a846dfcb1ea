"""Sweeps from plan to sweep.json, against a fake server process (see `fake_server`); `recompute` needs no more."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
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
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.sweep.state import SweepError, SweepState, load
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
    workload = Workload(tasks=3, calls_per_task=2, vocab_size=64, system_tokens=32, max_prompt_tokens=4_000)
    synthesize(tmp_path / "agents.trace", workload)
    (tmp_path / "model").mkdir()
    model_directory(tmp_path / "model")
    return write_plan(tmp_path)


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


def test_resuming_a_finished_sweep_runs_nothing(plan: Path) -> None:
    before = sweep(plan)
    assert sweep(plan, "die@1", resume=True) == before


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


def test_a_run_that_finished_just_before_its_sweep_was_killed_is_believed(plan: Path) -> None:
    state = sweep(plan)
    file = plan.parent / "out" / "sweep.json"
    content = json.loads(file.read_text())
    content["runs"][0]["status"] = "running"
    file.write_text(json.dumps(content))
    resumed = sweep(plan, "die@1", resume=True)
    assert [run.status for run in resumed.runs] == ["complete"] * 2
    assert resumed.runs[0].attempts == state.runs[0].attempts


def test_a_directory_is_used_only_by_the_sweep_that_began_in_it(plan: Path) -> None:
    sweep(plan)
    with pytest.raises(SweepError, match="holds a sweep already; --resume goes on with it"):
        sweep(plan)
    write_plan(plan.parent, replay={"time_scale": 2})
    with pytest.raises(SweepError, match="was begun with another plan, which differs in replay"):
        sweep(plan, resume=True)
    write_plan(plan.parent)
    synthesize(plan.parent / "agents.trace", Workload(tasks=1, calls_per_task=2, vocab_size=64, system_tokens=8))
    with pytest.raises(SweepError, match="was begun with the trace"):
        sweep(plan, resume=True)


def test_a_machine_that_lacks_what_the_plan_requires_runs_nothing(plan: Path) -> None:
    write_plan(plan.parent, requires={"gpu": "H20", "gpus": 4096})
    with pytest.raises(SweepError, match="does not meet `requires`:\n  needs 4096 x H20"):
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
    )
    seen: list[RunOptions] = []

    def remember(options: RunOptions, _: Console) -> None:
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("efficient_lmcache.replay.cli_replay.run_replay", remember)
    CliRunner().invoke(replay_app, run.command()[2:])
    assert seen == [run]


def test_user_errors_are_one_line(plan: Path) -> None:
    result = CliRunner().invoke(
        app, ["replay", "sweep", str(plan.parent / "no.yaml"), "--out", str(plan.parent / "out")]
    )
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "error: " in result.output
