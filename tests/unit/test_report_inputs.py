"""What a report can be made of, and what it says of what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import edit_record, make_run, write_sweep, write_trace

from efficient_lmcache.replay.rundir import RunDirectoryError
from efficient_lmcache.report.analyses import analyse
from efficient_lmcache.report.runs import Absent, ReportError, read_inputs, to_json

LENGTHS = [[9, 6, 5, 7], [5, 12, 3], [20, 2, 4, 9, 6]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.trace", LENGTHS)


def test_runs_are_found_by_their_own_path_their_parent_and_their_sweep(tmp_path: Path, trace: Path) -> None:
    sweep = tmp_path / "sweep"
    make_run(sweep / "runs", "a", trace, "none", 8)
    make_run(sweep / "runs", "b", trace, "fixed", 8)
    entries = [{"name": name, "directory": f"runs/{name}", "repeat": 3} for name in ("b", "a", "pending")]
    write_sweep(sweep, entries, [])
    assert [run.name for run in read_inputs([sweep / "runs" / "b"]).runs] == ["b"]
    assert [run.name for run in read_inputs([sweep / "runs"]).runs] == ["a", "b"]
    found = read_inputs([sweep, sweep / "runs" / "a"])
    assert [(run.name, run.repeat) for run in found.runs] == [("b", 3), ("a", 3)]
    assert [of.name for of in found.sweeps] == ["small"]


def test_a_sweep_of_which_nothing_ran_is_no_error(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [{"name": "a", "directory": "runs/a"}], [])
    assert analyse(read_inputs([sweep])).runs == ()


def test_repeats_outside_of_a_sweep_are_numbered_by_starting_time(tmp_path: Path, trace: Path) -> None:
    for name, started_at in (("x", "2026-11-29T22:00:00+00:00"), ("y", "2026-11-29T21:00:00+00:00")):
        edit_record(make_run(tmp_path / "runs", name, trace, "none", 8).path, started_at=started_at)
    make_run(tmp_path / "runs", "z", trace, "none", 9)
    assert {run.name: run.repeat for run in read_inputs([tmp_path / "runs"]).runs} == {"x": 2, "y": 1, "z": 1}


def test_the_trace_is_told_by_its_hash_wherever_it_lies(tmp_path: Path, trace: Path) -> None:
    run = make_run(tmp_path / "runs", "a", trace, "none", 8).path
    moved = trace.rename(tmp_path / "elsewhere.trace")
    (absent,) = read_inputs([run]).runs
    assert analyse(read_inputs([run])).runs[0].new_kv_reuse == Absent(
        "the trace small.trace is not where the run had it; name it with --trace"
    )
    other = write_trace(tmp_path / "runs" / "small.trace", [[3, 3]])
    (found,) = read_inputs([run], [other, moved]).runs
    assert found.trace == moved
    assert absent.record == found.record


def test_a_run_that_just_began_has_a_row_and_reasons(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "a", trace, "conditioned", 8).path
    for file in path.iterdir():
        if file.name != "run.json":
            file.unlink()
    edit_record(path, status="running", makespan_s=None, computed_prefill_tokens=None, restored_tokens_per_rank=None)
    analyses = analyse(read_inputs([path]))
    (run,) = analyses.runs
    assert run.row.status == "running"
    assert run.row.makespan_s is None
    assert not run.row.exact
    assert run.thresholds == run.pressure == Absent("no decision was logged")
    assert run.call_times == run.reuse_gap == Absent("no call ended")
    assert run.server_times == Absent("no metrics-before.txt: the run ended without it")
    assert analyses.capacity == ()


def test_a_run_without_our_connector_says_that_only_ours_logs_decisions(tmp_path: Path, trace: Path) -> None:
    analyses = analyse(read_inputs([make_run(tmp_path, "a", trace, "recompute", 0).path]))
    (run,) = analyses.runs
    assert isinstance(run.thresholds, Absent)
    assert "only 'efficient' logs them" in run.thresholds.reason
    assert not isinstance(run.server_times, Absent)


def test_everything_is_json_without_nan(tmp_path: Path, trace: Path) -> None:
    for admission in ("recompute", "none", "fixed", "conditioned"):
        make_run(tmp_path / "runs", admission, trace, admission, 8)
    shown = []
    analyses = analyse(read_inputs([tmp_path / "runs"]), lambda *done: shown.append(done))
    assert shown == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(json.loads(json.dumps(to_json(analyses), allow_nan=False))["runs"]) == 4


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "a", trace, "fixed", 8).path
    lines = (path / "decisions.jsonl").read_text().splitlines(keepends=True)
    (path / "decisions.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    (path / "calls.jsonl").write_text("".join((path / "calls.jsonl").read_text().splitlines(keepends=True)[:3]))
    (run,) = analyse(read_inputs([path])).runs
    assert not isinstance(run.thresholds, Absent)
    assert run.thresholds.decisions == 5
    assert not isinstance(run.declined_reuse, Absent)
    assert run.declined_reuse.declined == sum(not json.loads(line)["save"] for line in lines[:5])


def _sweep(runs: object) -> str:
    sweep = {"schema": "efficient-lmcache-sweep/1", "name": "s", "predictions": [], "trace": {"name": "t"}}
    return json.dumps({**sweep, "runs": runs})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sweep.json": "{"}, "sweep.json: not JSON"),
        ({"sweep.json": '{"schema": "other"}'}, "its schema is 'other'"),
        (
            {"sweep.json": '{"schema": "efficient-lmcache-sweep/1", "runs": []}'},
            "sweep.json: lacks name, trace, predictions",
        ),
        ({"sweep.json": _sweep([{}])}, "sweep.json: lacks runs.0.name, runs.0.directory"),
        ({"sweep.json": _sweep(7)}, "sweep.json: runs is 7: Input should be a valid array"),
        ({}, "holds neither run.json nor sweep.json"),
    ],
)
def test_an_input_without_runs_is_named(content: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ReportError, match=message) as error:
        read_inputs([tmp_path])
    assert str(tmp_path) in str(error.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no such directory"):
        read_inputs([tmp_path / "absent"])
    with pytest.raises(ReportError, match="at least one"):
        read_inputs([])
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="its schema is None"):
        read_inputs([tmp_path])


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("calls.jsonl", {"call": []}, "line 1: call is []: Input should be a valid integer"),
        ("calls.jsonl", {"finished_s": float("inf")}, "line 1: finished_s is inf: Input should be a finite number"),
        ("calls.jsonl", {"dispatched_s": None}, "line 1: Value error, an answered call has dispatched_s"),
        ("decisions.jsonl", {"now_s": "x"}, "line 1: now_s is 'x': Input should be a valid number"),
        ("decisions.jsonl", {"occupancy": -1}, "line 1: occupancy is -1: Input should be greater than or equal to 0"),
        ("decisions.jsonl", {"occupancy": None}, "line 1: Value error, a decision with report_age_s has capacity_"),
        ("decisions.jsonl", {"estimate": {}}, "line 1: lacks estimate.active_pool, estimate.mean_"),
        ("run.json", {"options": {"trace": "t"}}, "options: lacks model, chunk_tokens, time_scale"),
        ("run.json", {"trace": {"name": "t", "sha256": "a"}}, "trace: lacks calls, prompt_tokens, tasks"),
    ],
)
def test_a_field_of_another_kind_is_named(
    file: str, change: dict[str, Any], message: str, tmp_path: Path, trace: Path
) -> None:
    path = make_run(tmp_path, "a", trace, "none", 8).path
    first, _, others = (path / file).read_text().partition("\n" if file.endswith(".jsonl") else "\0")
    (path / file).write_text(json.dumps({**json.loads(first), **change}) + "\n" + others)
    error = RunDirectoryError if file == "run.json" else ReportError
    with pytest.raises(error, match=re.escape(f"{path / file}: {message}")):
        analyse(read_inputs([path]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "line 1: not JSON"),
        ("[1]\n", "line 1: list; it must be an object"),
        ('{"task": "a", "call": 0}\n', "line 1: lacks prompt_tokens, status"),
    ],
)
def test_a_damaged_line_is_named(line: str, message: str, tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "a", trace, "none", 8).path
    (path / "calls.jsonl").write_text(line)
    with pytest.raises(ReportError, match=re.escape(f"{path / 'calls.jsonl'}: {message}")):
        analyse(read_inputs([path]))
