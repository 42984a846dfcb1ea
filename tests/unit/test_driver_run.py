"""Whole runs, from options to run directory, against a fake server process (see `fake_server`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from efficient_lmcache.replay.cli_replay import app
from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.rundir import RunDirectoryError, RunRecord
from efficient_lmcache.replay.server import ServerOptions
from efficient_lmcache.replay.trace import Call, Manifest, TraceError, TraceReader, TraceWriter

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
VOCAB_SIZE = 100


def fake_command(*faults: str) -> Any:
    def command_of(_: ServerOptions, port: int) -> list[str]:
        return [sys.executable, str(FAKE_SERVER), str(port), *[f"--fault={fault}" for fault in faults]]

    return command_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    (directory / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2, "dtype": "bfloat16"}))
    return directory


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
    assert rows == []


def test_a_truncated_trace_is_refused_before_anything_is_created(model: Path, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-10])
    with pytest.raises(TraceError, match=str(trace)):
        run(options(model, trace))
    assert not (trace.parent / "run").exists()


def test_a_gpu_cache_smaller_than_the_longest_call_is_one_error(model: Path, trace: Path) -> None:
    record, _, _ = run(options(model, trace, gpu_kv_tokens=200))
    assert record.error == "gpu_kv_tokens is 200; the trace's longest call needs at least 256"


def test_a_directory_that_holds_anything_is_refused(model: Path, trace: Path) -> None:
    run_options = options(model, trace)
    run_options.out.mkdir()
    (run_options.out / "notes").touch()
    with pytest.raises(RunDirectoryError, match="is not an empty directory; name a new one"):
        run(run_options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_server_and_leaves_a_valid_partial_run(
    number: signal.Signals, model: Path, trace: Path
) -> None:
    run_options = options(model, trace, active_pool=1)
    script = f"""
import sys
from pathlib import Path
from rich.console import Console
sys.path.insert(0, {str(FAKE_SERVER.parent)!r})
from test_driver_run import fake_command, options
from efficient_lmcache.replay.run import run_replay
run_options = options(Path({str(model)!r}), Path({str(trace)!r}), active_pool=1)
record = run_replay(run_options, Console(), fake_command("hang@5"))
sys.exit(0 if record.status == "interrupted" else 1)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    calls = run_options.out / "calls.jsonl"
    while not (calls.exists() and len(calls.read_text().splitlines()) == 4):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 0
    written = json.loads((run_options.out / "run.json").read_text())
    assert (written["status"], written["outputs_exact"], written["errors"]) == ("interrupted", 4, 0)
    assert written["computed_prefill_tokens"] is not None
    assert json.loads(calls.read_text().splitlines()[-1])["status"] in ("answered", "cancelled")
    assert processes_of(run_options) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"admission": "some"}, "admission is 'some'; allowed: recompute, none, fixed, conditioned"),
        ({"connector": "other"}, "connector is 'other'; allowed: efficient, lmcache"),
        ({"connector": "lmcache", "admission": "fixed", "host_gib": 1.0}, "lmcache has no write admission"),
        ({"admission": "none"}, "host_gib is 0.0; it must be positive"),
        ({"chunk_tokens": 100}, "chunk_tokens is 100; it must be a multiple of 128"),
        ({"gpu_kv_tokens": 0}, "gpu_kv_tokens is 0; it must be at least 1"),
        ({"active_pool": 0}, "active_pool is 0; it must be at least 1"),
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
    assert result.output.strip() == "error: host_gib is 0.0; it must be positive"
    missing = CliRunner().invoke(app, [*arguments, "--admission", "recompute", "--model", str(model / "absent")])
    assert missing.exit_code == 2
    assert missing.output.startswith("error: ")
    assert "config.json" in missing.output
