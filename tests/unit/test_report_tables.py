"""Tables 3 to 5 and Figures 2 to 4: rows, series, ratios, and predictions held against measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import edit_record, make_run, write_sweep, write_trace

from efficient_lmcache.report.analyses import analyse
from efficient_lmcache.report.predictions import held_against, predicted_runs
from efficient_lmcache.report.runs import Absent, ReportError, Unavailable, read_inputs
from efficient_lmcache.report.table import runs_table

CREATED_AT = "2026-11-29T19:00:00+00:00"
_ADMISSIONS = {"Recompute": "recompute", "Offload": "none", "Fixed": "fixed", "Conditioned": "conditioned"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.trace", [[9, 6, 5, 7], [5, 12, 3], [20, 2, 4, 9, 6]])


@pytest.fixture
def paper_runs(tmp_path: Path, trace: Path, data_dir: Path) -> Path:
    """The paper's 17 runs as run directories that say what Table 3 does."""
    paper = json.loads((data_dir / "paper" / "efficientagent.json").read_text())
    for number, row in enumerate(paper["table3_h20_replay"]):
        admission = _ADMISSIONS[row["configuration"].split(",")[0].split()[0]]
        path = make_run(tmp_path / "paper", f"run-{number}", trace, admission, 8).path
        bytes_ = (row["active_pool"] - 1) * 33_234 * 24_576
        host_gib = row["host_gib_per_rank"]
        edit_record(
            path,
            active_pool=row["active_pool"],
            host_gib_per_rank=host_gib,
            makespan_s=row["makespan_min"] * 60,
            computed_prefill_tokens=round(row["computed_prefill_mtok"] * 1e6),
            restored_tokens_per_rank=round(row["retrieved_mtok_per_rank"] * 1e6),
            stored_tokens_per_rank=round(row["stored_mtok_per_rank"] * 1e6),
            working_set={
                "pool": row["active_pool"],
                "mean_prompt_tokens": 33_234,
                "bytes": bytes_,
                "gamma_h": bytes_ / (host_gib * (1 << 30)) if host_gib else None,
                "gamma_g": row["active_pool"] * 33_234 / 343_408,
            },
            started_at=f"2026-11-29T{number:02}:00:00+00:00",
            options={"admission": admission, "active_pool": row["active_pool"], "host_gib": host_gib, "trace": "t"}
            | {"chunk_tokens": 1024, "model": "m", "time_scale": 1.0, "out": str(number)},
        )
    return tmp_path / "paper"


def test_the_papers_runs_make_the_papers_figures(paper_runs: Path) -> None:
    analyses = analyse(read_inputs([paper_runs]))
    rows = [run.row for run in analyses.runs]
    assert [row.active_pool for row in rows] == [16] * 14 + [8] * 3
    assert [row.configuration for row in rows[:3]] == ["Recompute", "Recompute", "Offload"]
    fixed, conditioned = (
        next(row for row in rows if row.admission == admission and row.host_gib_per_rank == 5)
        for admission in ("fixed", "conditioned")
    )
    assert fixed.makespan_to_offload == pytest.approx(1 - 0.108, abs=5e-4)  # Section 5.5
    assert conditioned.makespan_to_offload == pytest.approx(1 - 0.104, abs=5e-4)
    assert conditioned.gamma_h == pytest.approx(2.3, abs=0.05)
    (figure,) = analyses.capacity
    assert figure.working_set_gib_per_rank == pytest.approx({16: 11.4, 8: 5.3}, abs=0.05)
    offload = next(series for series in figure.series if (series.admission, series.active_pool) == ("none", 16))
    assert [row.host_gib_per_rank for row in offload.line] == [5, 10, 20, 40, 80]
    assert [row.host_gib_per_rank for row in offload.repeats] == [40, 40]
    assert not isinstance(analyses.pools, Absent)
    assert [pool.active_pool for pool in analyses.pools] == [16, 8]
    assert analyses.pools[1].makespan == pytest.approx(0.75, abs=5e-3)  # Figure 2d
    assert analyses.pools[1].computed_prefill == pytest.approx(0.46, abs=5e-3)


@pytest.mark.parametrize(
    ("measured", "inside", "off"),
    [(23_530_000, False, -0.1487), (27_640_000, True, 0.0), (31_200_000, True, 0.0), (46_800_000, False, 0.5)],
)
def test_a_measurement_is_inside_or_off_by_a_share_of_the_nearest_end(measured: int, inside: bool, off: float) -> None:
    held = held_against(
        "computed_prefill_tokens", {"expected": 30_000_000, "low": 27_640_000, "high": 31_200_000}, measured
    )
    assert held.inside is inside
    assert held.off == pytest.approx(off, abs=1e-4)
    assert held.to_expected == pytest.approx(measured / 3e7 - 1)


@given(st.tuples(*[st.integers(0, 1000)] * 3), st.integers(0, 1000))
def test_off_says_the_side_on_which_a_measurement_lies(span: tuple[int, int, int], measured: int) -> None:
    low, expected, high = sorted(span)
    held = held_against("x", {"expected": expected, "low": low, "high": high}, measured)
    assert held.inside == (low <= measured <= high)
    if held.off is not None:
        assert (held.off > 0) - (held.off < 0) == (measured > high) - (measured < low)
    else:
        assert high == 0 < measured


def prediction(**changed: Any) -> dict[str, Any]:
    span = {"expected": 100, "low": 90, "high": 120}
    return {
        "created_at": CREATED_AT,
        "active_pool": 3,
        "admission": "none",
        "host_gib": 1.0,
        "capacity_chunks": 8,
        "computed_prefill_tokens": span,
        "restored_tokens_per_rank": {"expected": 0, "low": 0, "high": 0},
        **changed,
    }


def test_predictions_stand_beside_their_runs_measured_or_not(tmp_path: Path, trace: Path) -> None:
    sweep = tmp_path / "sweep"
    edit_record(
        make_run(sweep / "runs", "a", trace, "none", 8).path, computed_prefill_tokens=126, restored_tokens_per_rank=0
    )
    make_run(sweep / "runs", "b", trace, "none", 9, status="interrupted")
    entries = [
        {"name": "c", "directory": "runs/c", "prediction": 0, "status": "pending", "started_at": None},
        {"name": "b", "directory": "runs/b", "prediction": 0, "status": "failed"},
        {"name": "a", "directory": "runs/a", "prediction": 1},
        {"name": "r", "directory": "runs/r", "prediction": None},
    ]
    write_sweep(sweep, entries, [prediction(), prediction(created_at="2026-11-29T21:00:00+00:00")])
    found = {of.run: of for of in predicted_runs(read_inputs([sweep]))}
    assert list(found) == ["a", "b", "c"]
    assert found["a"].computed.off == pytest.approx(0.05)
    assert found["a"].older is False
    assert found["a"].restored.inside is True
    assert found["a"].makespan is None
    assert found["b"].older is True
    assert found["b"].computed.measured is found["c"].computed.inside is found["c"].older is None


def test_runs_without_a_sweep_have_no_predictions(tmp_path: Path, trace: Path) -> None:
    inputs = read_inputs([make_run(tmp_path, "a", trace, "none", 8).path])
    with pytest.raises(Unavailable, match="no sweep"):
        predicted_runs(inputs)


def test_what_else_a_sweep_predicts_is_held_against_its_run(tmp_path: Path, trace: Path) -> None:
    sweep = tmp_path / "sweep"
    path = make_run(sweep / "runs", "a", trace, "fixed", 8).path
    record = json.loads((path / "run.json").read_text())
    edit_record(path, makespan_s=33.0, stored_tokens_per_rank=7)
    span = {"expected": 20, "low": 10, "high": 30}
    others = prediction(makespan_s=span, stored_tokens_per_rank=span, declined_calls=span)
    write_sweep(sweep, [{"name": "a", "directory": "runs/a", "prediction": 0}], [others])
    (found,) = predicted_runs(read_inputs([sweep]))
    assert found.makespan is not None
    assert found.stored is not None
    assert found.declined is not None
    assert found.makespan.off == pytest.approx(0.1)
    assert found.stored.off == pytest.approx(-0.3)
    assert found.declined.measured == record["decisions"]["declined"] > 0


@pytest.mark.parametrize(
    ("entry", "change", "said"),
    [
        ({}, {"computed_prefill_tokens": {"low": 1}}, "lacks predictions.0.computed_prefill_tokens.expected"),
        ({}, {"restored_tokens_per_rank": {"expected": 1, "low": [], "high": 2}}, "restored_tokens_per_rank.low is"),
        ({}, {"host_gib": None}, "predictions.0.host_gib is None"),
        ({}, {"created_at": "yesterday"}, "created_at is 'yesterday': it must be a time like"),
        ({}, {"makespan_s": None}, "makespan_s is null"),
        ({"options": None}, {}, "runs.0.options is None"),
        ({"name": []}, {}, "runs.0.name is"),
        ({"prediction": 3}, {}, "runs: a: there is no prediction 3"),
    ],
)
def test_a_garbled_sweep_names_the_field(
    entry: dict[str, Any], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    runs = [{"name": "a", "directory": "runs/a", "prediction": 0, **entry}]
    sweep = write_sweep(tmp_path / "sweep", runs, [{**prediction(), **change}])
    with pytest.raises(ReportError, match=re.escape(said)) as error:
        read_inputs([sweep])
    assert str(sweep / "sweep.json") in str(error.value)


def test_thresholds_of_a_run_are_part_of_its_configuration(tmp_path: Path, trace: Path) -> None:
    plain = make_run(tmp_path / "runs", "a", trace, "none", 8).path
    narrow = make_run(tmp_path / "runs", "b", trace, "conditioned", 8, options={"write_threshold_chunks": 4}).path
    rows = runs_table(read_inputs([narrow, plain]).runs)
    assert [row.configuration for row in rows] == ["Offload", "Conditioned admission, κ = 4"]
    assert rows[1].prefill_to_offload is not None


def test_a_run_with_an_lmcache_server_is_another_configuration(tmp_path: Path, trace: Path) -> None:
    inner = make_run(tmp_path / "runs", "a", trace, "none", 8).path
    served = make_run(tmp_path / "runs", "b", trace, "none", 8, options={"lazy_offload": True}).path
    edit_record(served, mode="server", engines=[{"server_command": []}] * 3)
    rows = {row.name: row.configuration for row in runs_table(read_inputs([inner, served]).runs)}
    assert rows == {"a": "Offload", "b": "Offload, 3 engines, lazy server"}


def test_runs_of_several_traces_share_a_table_but_no_figure(tmp_path: Path, trace: Path) -> None:
    other = write_trace(tmp_path / "other.trace", [[5, 5]])
    paths = [make_run(tmp_path / "runs", at.stem, at, "none", 8).path for at in (trace, other)]
    analyses = analyse(read_inputs(paths))
    assert [run.row.trace_name for run in analyses.runs] == ["other.trace", "small.trace"]
    assert [figure.trace_name for figure in analyses.capacity] == ["other.trace", "small.trace"]
