"""Comparing runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from efficient_lmcache.replay.cli_replay import app
from efficient_lmcache.replay.compare import CompareError, compare, render
from efficient_lmcache.replay.rundir import SCHEMA, RunDirectoryError

OPTIONS = {"trace": "some", "model": "model", "active_pool": 4, "time_scale": 1.0, "chunk_tokens": 128}
TRACE = {"sha256": "a" * 64, "name": "some", "tasks": 4, "calls": 10, "prompt_tokens": 2_000_000}


def make_run(parent: Path, name: str, admission: str, host_gib: float, **changed: Any) -> Path:
    options = {**OPTIONS, "admission": admission, "host_gib": host_gib, "out": name, **changed.pop("options", {})}
    record = {
        "schema": SCHEMA,
        "status": "complete",
        "error": None,
        "admission": admission,
        "connector": "none" if admission == "recompute" else "efficient",
        "host_gib_per_rank": host_gib,
        "active_pool": 4,
        "calls": 10,
        "outputs_exact": 10,
        "errors": 0,
        "skipped": 0,
        "computed_prefill_tokens": 1_000_000,
        "stored_tokens_per_rank": 0,
        "restored_tokens_per_rank": 0,
        "preemptions": 0,
        "makespan_s": 20.0,
        "working_set": {
            "pool": 4,
            "mean_prompt_tokens": 1000.0,
            "bytes": 1e9,
            "gamma_h": 1 / host_gib if host_gib else None,
            "gamma_g": None,
        },
        "decisions": {"declined": 0, "total": 0},
        "command": [],
        "versions": {},
        "started_at": "2026-11-29T08:00:00+00:00",
        "options": options,
        **changed,
        "trace": {**TRACE, **changed.get("trace", {})},
    }
    path = parent / name
    path.mkdir()
    (path / "run.json").write_text(json.dumps(record))
    return path


def test_ratios_are_to_the_offload_run_of_the_same_capacity(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, "large", "conditioned", 2.0, computed_prefill_tokens=500_000),
        make_run(tmp_path, "small", "conditioned", 1.0, computed_prefill_tokens=600_000, makespan_s=30.0),
        make_run(tmp_path, "offload", "none", 1.0, computed_prefill_tokens=800_000),
        make_run(tmp_path, "recompute", "recompute", 0.0),
    ]
    rows = compare(runs)
    assert [Path(row["run"]).name for row in rows] == ["recompute", "offload", "small", "large"]
    ratios = [row["computed_prefill_tokens_to_offload"] for row in rows]
    assert ratios == [None, 1.0, pytest.approx(0.75), None]
    assert rows[2]["makespan_s_to_offload"] == pytest.approx(1.5)


def test_our_offload_run_is_the_base_if_lmcaches_own_is_there_too(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, "a", "none", 1.0, connector="lmcache", computed_prefill_tokens=400),
        make_run(tmp_path, "b", "none", 1.0, computed_prefill_tokens=200),
    ]
    rows = {row["connector"]: row for row in compare(runs)}
    assert rows["lmcache"]["computed_prefill_tokens_to_offload"] == 2.0


@pytest.mark.parametrize(
    "changed",
    [
        {"status": "interrupted"},
        {"options": {"active_pool": 8}},
        {"options": {"chunk_tokens": 256}},
    ],
)
def test_a_partial_run_or_one_under_other_options_has_no_ratio_and_is_no_base(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    runs = [make_run(tmp_path, "a", "none", 1.0, **changed), make_run(tmp_path, "b", "fixed", 1.0)]
    ratios = {row["admission"]: row["makespan_s_to_offload"] for row in compare(runs)}
    assert ratios["fixed"] is None
    runs = [make_run(tmp_path, "c", "none", 1.0), make_run(tmp_path, "d", "fixed", 1.0, **changed)]
    ratios = {row["admission"]: row["makespan_s_to_offload"] for row in compare(runs)}
    assert ratios == {"none": 1.0, "fixed": None}


def test_runs_from_before_an_option_existed_compare_with_later_ones(tmp_path: Path) -> None:
    earlier = make_run(tmp_path, "a", "none", 1.0)
    later = make_run(tmp_path, "b", "fixed", 1.0)
    record = json.loads((later / "run.json").read_text())
    record["options"].update({"mode": "in_process", "lazy_offload": False, "engines": 1, "route": "load"})
    (later / "run.json").write_text(json.dumps(record))
    assert compare([earlier, later])[1]["makespan_s_to_offload"] == 1.0


def test_a_run_with_an_lmcache_server_says_so_and_is_no_base_for_others(tmp_path: Path) -> None:
    modes = {"mode": "server", "lazy_offload": True}
    served = make_run(tmp_path, "a", "none", 1.0, mode="server", options=modes)
    rows = compare([served, make_run(tmp_path, "b", "fixed", 1.0)])
    assert rows[1]["makespan_s_to_offload"] is None
    assert "none (server, lazy)" in render(rows, "table")


def test_a_run_whose_trace_could_not_be_opened_is_refused_among_others(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, "a", "none", 1.0),
        make_run(tmp_path, "b", "none", 1.0, trace={"sha256": None, "name": "some"}, error="some: truncated"),
    ]
    with pytest.raises(CompareError, match="b has nothing to compare: some: truncated"):
        compare(runs)


def test_a_directory_of_runs_and_a_sweeps_stand_for_their_runs(tmp_path: Path) -> None:
    for parent in ("many", "sweep/runs"):
        (tmp_path / parent).mkdir(parents=True)
        for name in ("a", "b"):
            make_run(tmp_path / parent, name, "none", 1.0)
    assert len(compare([tmp_path / "many", tmp_path / "sweep", tmp_path / "many" / "a"])) == 5
    with pytest.raises(RunDirectoryError, match=r"run\.json: .* expected a directory made by `replay run`"):
        compare([tmp_path])


def test_no_two_columns_share_a_heading_and_skipped_calls_are_told_from_errors(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", "none", 1.0, errors=1, skipped=3)
    heading, _, cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in render(compare([run]), "markdown").split("\n")
    )
    assert len(set(heading)) == len(heading)
    assert cells[heading.index("errors")] == "1 + 3 skipped"


def test_runs_of_different_traces_are_refused(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, "a", "none", 1.0),
        make_run(tmp_path, "b", "none", 1.0, trace={"sha256": "b" * 64, "name": "other"}),
    ]
    with pytest.raises(CompareError, match=r"replayed other .* replayed some .*only runs of one trace compare"):
        compare(runs)


def test_a_partial_run_is_shown_as_such(tmp_path: Path) -> None:
    unknown = {"computed_prefill_tokens": None, "makespan_s": None, "outputs_exact": 3}
    run = make_run(tmp_path, "a", "none", 1.0, status="interrupted", **unknown)
    for format_ in ("table", "markdown"):
        text = render(compare([run]), format_)
        assert "[interrupted]" in text
        assert "3/10" in text


def test_every_format_shows_every_run(tmp_path: Path) -> None:
    rows = compare([make_run(tmp_path, f"run-{i}", "fixed", 1.0 + i) for i in range(3)])
    assert json.loads(render(rows, "json")) == rows
    assert len(render(rows, "table").splitlines()) == 2 + 3
    markdown = render(rows, "markdown").splitlines()
    assert len({line.count("|") for line in markdown}) == 1


def test_an_unknown_format_or_a_record_without_a_key_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", "none", 1.0)
    with pytest.raises(CompareError, match="format is 'xml'; allowed: table, markdown, json"):
        render(compare([run]), "xml")
    record = json.loads((run / "run.json").read_text())
    for key in ("calls", "trace"):
        (run / "run.json").write_text(json.dumps({name: value for name, value in record.items() if name != key}))
        with pytest.raises(RunDirectoryError, match=rf"run\.json: lacks {key}"):
            compare([run])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trace": {"sha256": 7}}, "trace: sha256 is 7: Input should be a valid string"),
        ({"options": {"chunk_tokens": "many"}}, "options: chunk_tokens is 'many': Input should be a valid integer"),
        ({"admission": "some"}, "admission is 'some': allowed are recompute, none, fixed, conditioned"),
        ({"status": "done"}, "status is 'done': allowed are running, complete, interrupted, failed"),
        ({"connector": None}, "connector is None: Input should be a valid string"),
        ({"host_gib_per_rank": float("nan")}, "host_gib_per_rank is nan: Input should be a finite number"),
        ({"makespan_s": "20"}, "makespan_s is '20': Input should be a valid number"),
        ({"computed_prefill_tokens": -1}, "computed_prefill_tokens is -1: Input should be greater than or equal to 0"),
        ({"decisions": {"declined": 0.5, "total": 0}}, "decisions.declined is 0.5: Input should be a valid integer"),
        ({"working_set": {"pool": 1}}, "lacks working_set.mean_prompt_tokens, working_set.bytes"),
    ],
)
def test_a_value_of_another_kind_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", "none", 1.0)
    record = json.loads((run / "run.json").read_text())
    nested = {key: {**record[key], **value} for key, value in changed.items() if key in ("options", "trace")}
    (run / "run.json").write_text(json.dumps({**record, **changed, **nested}))
    with pytest.raises(RunDirectoryError, match=re.escape(f"{run / 'run.json'}: {message}")):
        compare([run])


def test_the_command_line_prints_a_table_and_reports_errors_in_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", "none", 1.0)
    shown = CliRunner().invoke(app, ["compare", str(run), "--format", "json"])
    assert shown.exit_code == 0
    assert json.loads(shown.output)[0]["admission"] == "none"
    absent = CliRunner().invoke(app, ["compare", str(tmp_path / "absent")])
    assert absent.exit_code == 2
    assert absent.output.startswith("error: ")
    assert len(absent.output.splitlines()) == 1
