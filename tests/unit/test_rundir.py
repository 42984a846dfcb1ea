"""The run directory's records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from efficient_lmcache.replay.metrics import MetricsError, Snapshot, increase, scrape
from efficient_lmcache.replay.rundir import DecisionCounts, RunDirectory, RunDirectoryError, read_record


def decision(**changed: Any) -> dict[str, Any]:
    row = {
        "save": True,
        "pressure": False,
        "new_full_chunks": 3,
        "estimate_above": False,
        "full_and_evicting": None,
        "report_fresh": True,
    }
    return {**row, **changed}


def test_decisions_are_counted_by_factor() -> None:
    counts = DecisionCounts.of(
        [
            decision(),
            decision(pressure=True, estimate_above=True, full_and_evicting=True),
            decision(save=False, pressure=True, new_full_chunks=9, estimate_above=True, full_and_evicting=True),
            decision(save=False, pressure=True, new_full_chunks=20, estimate_above=True, report_fresh=False),
        ]
    )
    assert counts == DecisionCounts(
        total=4, pressure=3, declined=2, declined_chunks=29, estimate_above=3, full_and_evicting=2, stale_reports=1
    )


def test_a_decision_cut_short_by_a_killed_server_is_left_out(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    assert list(directory.decision_rows()) == []
    directory.decisions.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert [row["a"] for row in directory.decision_rows()] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a directory made by `replay run`"),
        ("{", "not JSON"),
        ("[]", "its schema is None"),
        (json.dumps({"schema": "efficient-lmcache-run/2"}), "only 'efficient-lmcache-run/1' can be read"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=message) as error:
        read_record(tmp_path)
    assert str(tmp_path / "run.json") in str(error.value)


def snapshot(*lines: str) -> Snapshot:
    return Snapshot.parse("\n".join(["# TYPE made counter", *lines]) + "\n")


def test_an_increase_is_summed_over_labels() -> None:
    before = snapshot('made_total{engine="0"} 2', 'made_total{engine="1"} 3')
    after = snapshot('made_total{engine="0"} 10', 'made_total{engine="1"} 4')
    assert increase(before, after, "made_total") == 9


def test_a_counter_that_appeared_during_the_run_counts_from_zero() -> None:
    assert increase(snapshot(), snapshot("made_total 7"), "made_total") == 7


def test_a_missing_metric_is_an_error_that_names_it() -> None:
    with pytest.raises(MetricsError, match="lacks made_total"):
        increase(snapshot("made_total 7"), snapshot(), "made_total")
    with pytest.raises(MetricsError, match="lacks other with the label block_size"):
        snapshot("made_total 7").label("other", "block_size")


def test_a_counter_that_fell_is_an_error() -> None:
    with pytest.raises(MetricsError, match="made_total fell by 3"):
        increase(snapshot("made_total 7"), snapshot("made_total 4"), "made_total")


def test_metrics_of_an_absent_server_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="cannot be read"):
        scrape("http://127.0.0.1:9", tmp_path / "metrics")
