"""Whole runs, from options to run directory, against a fake server process (see `fake_server`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import fake_command
from rich.console import Console
from typer.testing import CliRunner

from efficient_lmcache.replay.cli_replay import app
from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.rundir import RunDirectoryError, RunRecord
from efficient_lmcache.replay.trace import Call, Manifest, TraceReader, TraceWriter

VOCAB_SIZE = 100
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_config(directory)
    return directory


def write_config(directory: Path, **changed: Any) -> None:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **changed}))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    write_trace(path)
    return path


def write_trace(path: Path, highest_token: int = VOCAB_SIZE - 1) -> None:
    with TraceWriter(path, Manifest(highest_token + 1, "synthetic", "test")) as writer:
        for task in range(3):
            tokens = np.array([1, 2, 3, highest_token])
            writer.write_task(f"task-{task}", [Call(tokens[: n + 2], tokens[:2], 0.0) for n in range(3)])


def options(model: Path, trace: Path, **changed: Any) -> RunOptions:
    fields: dict[str, Any] = {
        "trace": trace,
        "model": model,
        "admission": "recompute",
        "host_gib": 0.0,
        "active_pool": 2,
        "out": trace.parent / "run",
        **changed,
    }
    return RunOptions(**fields)


def run(run_options: RunOptions, *faults: str) -> tuple[RunRecord, dict[str, Any], list[dict[str, Any]]]:
    record = run_replay(run_options, Console(quiet=True), fake_command(*faults))
    written = json.loads((run_options.out / "run.json").read_text())
    assert written == json.loads(json.dumps(record.to_json()))
    rows_file = run_options.out / "calls.jsonl"
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    return record, written, rows


def processes_of(run_options: RunOptions) -> list[int]:
    """Processes that still hold the run's server log open."""
    log, found = run_options.out / "server.log", []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if any(os.path.realpath(fd) == str(log.resolve()) for fd in (process / "fd").iterdir()):
                    found.append(int(process.name))
            except OSError:
                continue
    return found


def test_a_complete_run_leaves_every_key_of_the_contract(model: Path, trace: Path) -> None:
    run_options = options(model, trace)
    record, written, rows = run(run_options)
    contract = (
        "schema, status, admission, host_gib_per_rank, active_pool, calls, outputs_exact, errors, prompt_tokens, "
        "computed_prefill_tokens, restored_tokens_per_rank, stored_tokens_per_rank, preemptions, makespan_s, "
        "decisions, dedup_chunks_per_rank, evicted_chunks_per_rank, working_set, versions"
    )
    assert set(contract.split(", ")) <= set(written)
    counts = "total, pressure, declined, declined_chunks, estimate_above, full_and_evicting, stale_reports"
    assert set(written["decisions"]) == set(counts.split(", "))
    assert set(written["working_set"]) == {"pool", "mean_prompt_tokens", "bytes", "gamma_h", "gamma_g"}
    assert record.status == "complete"
    assert (record.calls, record.outputs_exact, record.errors, len(rows)) == (9, 9, 0, 9)
    assert record.prompt_tokens == record.computed_prefill_tokens == 3 * (2 + 3 + 4)
    # (A - 1) N beta, with beta = 2 x 2 layers x 2 heads x 8 x 2 bytes, and A N over 8 blocks of 128 tokens.
    assert written["working_set"]["bytes"] == (2 - 1) * 3.0 * 128
    assert written["working_set"]["gamma_g"] == pytest.approx(2 * 3.0 / 1024)
    assert written["trace"]["sha256"] == TraceReader(trace).sha256
    for name in ("server.log", "metrics-before.txt", "metrics-after.txt"):
        assert (run_options.out / name).stat().st_size
    assert processes_of(run_options) == []


def test_a_dying_server_gives_one_error_and_a_kept_partial_run(model: Path, trace: Path) -> None:
    record, _, rows = run(options(model, trace, active_pool=1), "die@5")
    assert record.status == "failed"
    assert record.error is not None
    assert "the server stopped answering at task 'task-1', call 1" in record.error
    assert "server.log, says\n  ValueError: the fake server says this" in record.error
    assert [row["status"] for row in rows] == ["answered"] * 4 + ["failed"]
    assert (record.outputs_exact, record.errors, record.computed_prefill_tokens) == (4, 1, None)


def test_a_run_whose_connector_stopped_deciding_is_not_complete(model: Path, trace: Path) -> None:
    record, _, _ = run(options(model, trace, admission="fixed", host_gib=1.0))
    assert record.status == "failed"
    assert "9 calls were answered but 0 have an admission decision" in str(record.error)


def test_a_server_that_cannot_start_is_reported_with_its_log(model: Path, trace: Path) -> None:
    run_options = options(model, trace)
    command = [sys.executable, "-c", "raise ValueError('no such option')"]
    record = run_replay(run_options, Console(quiet=True), lambda *_: command)
    assert record.status == "failed"
    assert "exited with status 1 while starting" in str(record.error)
    assert str(record.error).endswith("ValueError: no such option")


def test_a_server_that_never_gets_ready_is_stopped(model: Path, trace: Path) -> None:
    run_options = options(model, trace, start_timeout_s=1.0)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    record = run_replay(run_options, Console(quiet=True), lambda *_: command)
    assert "not ready after 1 s" in str(record.error)
    assert processes_of(run_options) == []


def test_children_of_a_server_that_ignore_signals_are_killed(model: Path, trace: Path) -> None:
    run_options = options(model, trace, start_timeout_s=2.0)
    ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {ignoring!r}]); time.sleep(600)"
    run_replay(run_options, Console(quiet=True), lambda *_: [sys.executable, "-c", parent])
    assert processes_of(run_options) == []


def test_a_token_outside_the_models_vocabulary_is_one_error_in_a_kept_run(model: Path, trace: Path) -> None:
    write_trace(trace, highest_token=VOCAB_SIZE)
    record, _, rows = run(options(model, trace))
    assert record.status == "failed"
    assert "task 'task-0', call 2 has token id 100; the model's vocabulary allows 0 to 99" in str(record.error)
    assert "`trace import --vocab`" in str(record.error)
    assert "`model create --vocab`" in str(record.error)
    assert rows == []


def test_a_truncated_trace_is_one_error_in_a_kept_run(model: Path, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-10])
    record, written, rows = run(options(model, trace))
    assert (record.status, record.calls, rows) == ("failed", 0, [])
    assert str(record.error).startswith(f"{trace}: unfinished, truncated or damaged at its end")
    assert written["trace"] == {"name": "trace", "sha256": None}
    assert written["working_set"] == {**dict.fromkeys(written["working_set"]), "pool": 2}


def test_a_damaged_task_is_one_error_in_a_kept_run(model: Path, trace: Path) -> None:
    content = bytearray(trace.read_bytes())
    with TraceReader(trace) as reader:
        content[reader._offsets[1] + 20] ^= 1
    trace.write_bytes(content)
    record, _, rows = run(options(model, trace))
    assert (record.status, record.calls, rows) == ("failed", 9, [])
    assert "task 'task-1' (number 2) is damaged" in str(record.error)


@pytest.mark.parametrize(
    ("changed", "config", "message"),
    [
        ({"gpu_kv_tokens": 200}, {}, "--gpu-kv-tokens is 200; the trace's longest call needs at least 256"),
        ({}, {"max_position_embeddings": 5}, r"longest call has 6 tokens .* takes 5 .*`trace trim --max-prompt`"),
        ({}, {"text_config": {**SHAPE, "max_position_embeddings": 5}}, "longest call has 6 tokens"),
        ({"model": Path("absent")}, {}, "absent/config.json"),
        ({"model": Path(__file__)}, {}, r"--model .*\.py: is a file; give the model's directory"),
        ({"trace": Path("absent")}, {}, "absent: no such trace"),
        ({"trace": Path(__file__)}, {}, "not a trace"),
    ],
)
def test_what_the_user_can_mend_is_refused_before_anything_is_created(
    changed: dict[str, Any], config: dict[str, Any], message: str, model: Path, trace: Path
) -> None:
    write_config(model, **config)
    run_options = replace(options(model, trace), **changed)
    with pytest.raises(ValueError, match=message):
        run(run_options)
    assert not run_options.out.exists()


def test_the_working_set_is_that_of_the_tasks_there_are(model: Path, trace: Path) -> None:
    _, written, _ = run(options(model, trace, active_pool=50))
    assert (written["active_pool"], written["working_set"]["pool"]) == (50, 3)
    assert written["working_set"]["bytes"] == (3 - 1) * 3.0 * 128


def test_a_proxy_in_the_environment_is_not_asked_for_our_own_server(
    model: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    record, _, _ = run(options(model, trace, start_timeout_s=60.0))
    assert (record.status, record.error) == ("complete", None)


def test_a_directory_that_holds_anything_is_refused(model: Path, trace: Path) -> None:
    run_options = options(model, trace)
    run_options.out.mkdir()
    (run_options.out / "notes").touch()
    with pytest.raises(RunDirectoryError, match="is not an empty directory; name a new one"):
        run(run_options)


def start_run_that_hangs(model: Path, trace: Path) -> subprocess.Popen[bytes]:
    """Another process that replays, and gets no answer to its fifth call."""
    script = f"""
import sys
from pathlib import Path
from rich.console import Console
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_driver_run import fake_command, options
from efficient_lmcache.replay.run import run_replay
run_options = options(Path({str(model)!r}), Path({str(trace)!r}), active_pool=1)
record = run_replay(run_options, Console(), fake_command("hang@5"))
sys.exit(0 if record.status == "interrupted" else 1)
"""
    # Tests started with nohup hand their ignored SIGHUP on, which a run respects.
    process = subprocess.Popen(
        [sys.executable, "-c", script], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    )
    calls = trace.parent / "run" / "calls.jsonl"
    while not (calls.exists() and len(calls.read_text().splitlines()) == 4):
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_the_server_and_leaves_a_valid_partial_run(
    number: signal.Signals, model: Path, trace: Path
) -> None:
    run_options = options(model, trace)
    process = start_run_that_hangs(model, trace)
    process.send_signal(number)
    assert process.wait(60) == 0
    written = json.loads((run_options.out / "run.json").read_text())
    assert (written["status"], written["outputs_exact"], written["errors"]) == ("interrupted", 4, 0)
    assert written["computed_prefill_tokens"] is not None
    calls = run_options.out / "calls.jsonl"
    assert json.loads(calls.read_text().splitlines()[-1])["status"] in ("answered", "cancelled")
    assert processes_of(run_options) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_a_killed_run_leaves_no_server_behind(model: Path, trace: Path) -> None:
    run_options = options(model, trace)
    process = start_run_that_hangs(model, trace)
    assert processes_of(run_options) != []
    process.kill()
    process.wait(60)
    deadline_s = time.monotonic() + 60
    while processes_of(run_options):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert json.loads((run_options.out / "run.json").read_text())["status"] == "running"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"admission": "some"}, "--admission is 'some'; allowed: recompute, none, fixed, conditioned"),
        ({"connector": "other"}, "--connector is 'other'; allowed: efficient, lmcache"),
        ({"connector": "lmcache", "admission": "fixed", "host_gib": 1.0}, "lmcache has no write admission"),
        ({"admission": "none"}, "--host-gib is required for admission none: a positive number, not 0"),
        ({"chunk_tokens": 100}, "--chunk-tokens is 100; it must be a multiple of --block-tokens, 128"),
        ({"block_tokens": 0}, "--block-tokens is 0; it must be at least 1"),
        ({"tensor_parallel": 0}, "--tensor-parallel is 0; it must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5; it must be above 0 and at most 1"),
        (
            {"admission": "none", "host_gib": 1.0, "write_threshold_chunks": 4},
            "--write-threshold-chunks is for admission fixed or",
        ),
        (
            {"admission": "fixed", "host_gib": 1.0, "occupancy_threshold": 0.5},
            "--occupancy-threshold is for admission conditioned, not",
        ),
        (
            {"admission": "conditioned", "host_gib": 1.0, "occupancy_threshold": 2.0},
            "--occupancy-threshold is 2; it must be from 0 to 1",
        ),
        ({"activity_window_s": 0}, "--activity-window-s is 0; it must be a finite number > 0"),
        ({"gpu_kv_tokens": 0}, "--gpu-kv-tokens is 0; it must be at least 1"),
        ({"active_pool": 0}, "--active-pool is 0; it must be at least 1"),
        ({"call_timeout_s": float("inf")}, "--call-timeout-s is inf; it must be a finite number > 0"),
    ],
)
def test_an_option_out_of_range_is_named(changed: dict[str, Any], message: str, model: Path, trace: Path) -> None:
    with pytest.raises(ReplayOptionError, match=message):
        options(model, trace, **changed)


def test_the_command_line_reports_user_errors_in_one_line(model: Path, trace: Path) -> None:
    arguments = [
        "run",
        "--trace",
        str(trace),
        "--model",
        str(model),
        "--active-pool",
        "2",
        "--out",
        str(trace.parent / "r"),
    ]
    result = CliRunner().invoke(app, [*arguments, "--admission", "none"])
    assert result.exit_code == 2
    assert result.output.strip() == "error: --host-gib is required for admission none: a positive number, not 0"
    missing = CliRunner().invoke(app, [*arguments, "--admission", "recompute", "--model", str(model / "absent")])
    assert missing.exit_code == 2
    assert missing.output.startswith("error: ")
    assert "config.json" in missing.output
    trace.write_bytes(trace.read_bytes()[:-10])
    damaged = CliRunner().invoke(app, [*arguments, "--admission", "recompute"])
    assert damaged.exit_code == 1
    assert damaged.output.startswith(f"error: {trace}: unfinished, truncated or damaged")
    assert damaged.output.strip().endswith(f"; partial run in {trace.parent / 'r'}")
    assert len(damaged.output.splitlines()) == 1
