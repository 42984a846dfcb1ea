"""Import of SWE-agent's trajectories beyond the golden ones: attempts, what is malformed, and sizing's view of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from imported_traces import calls_of

from efficient_lmcache.replay.importers.importing import import_recording
from efficient_lmcache.replay.importers.records import RecordError
from efficient_lmcache.replay.importers.swe_agent import tasks
from efficient_lmcache.replay.trace import TraceReader
from efficient_lmcache.sizing.lint_sources import lint_recording
from efficient_lmcache.sizing.profile import profile
from efficient_lmcache.sizing.streams import open_stream

BPE = "bpe:300"
GOLDEN = Path(__file__).parent / "golden"
NEW = json.loads((GOLDEN / "swe-agent" / "repo__bug-1.traj").read_text())
OLD = json.loads((GOLDEN / "swe-agent-0.7" / "repo__bug-1.traj").read_text())
Row = dict[str, Any]


def changed(record: Row, field: str, index: int, **more: Any) -> Row:
    rows = list(record[field])
    rows[index] = {**rows[index], **more}
    return {**record, field: rows}


def written(path: Path, record: Any) -> Path:
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return path


def test_a_step_that_did_not_ask_the_model_is_no_call() -> None:
    (task,) = tasks(GOLDEN / "swe-agent" / "repo__bug-1.traj")
    assert [len(call.messages) for call in task.calls] == [2, 4, 6, 6]


def test_a_response_has_the_tool_calls_that_later_messages_show(tmp_path: Path) -> None:
    (task,) = tasks(GOLDEN / "swe-agent" / "repo__bug-1.traj")
    assert ["<tool_call>" in call.response for call in task.calls] == [True, False, True, True]
    # Cut off before the end, nothing shows the last response again.
    (cut,) = tasks(written(tmp_path / "cut.traj", {**NEW, "history": NEW["history"][:4]}))
    assert "<tool_call>" not in cut.calls[-1].response


def test_each_attempt_is_a_task(tmp_path: Path) -> None:
    written(tmp_path / "bug-1.traj", {**NEW, "attempts": [NEW, OLD]})
    written(tmp_path / "bug-2.traj", NEW)
    import_recording(tmp_path, tmp_path / "t", tokenizer="bpe:300")
    calls = calls_of(tmp_path / "t")
    assert {name: len(each) for name, each in calls.items()} == {
        "bug-1/attempt-1": 4,
        "bug-1/attempt-2": 2,
        "bug-2": 4,
    }


def test_a_history_alone_tells_prompts_and_no_pauses(tmp_path: Path) -> None:
    (task,) = tasks(written(tmp_path / "demo.traj", {"history": OLD["history"]}))
    (whole,) = tasks(written(tmp_path / "whole.traj", OLD))
    assert [call.messages for call in task.calls] == [call.messages for call in whole.calls]
    assert [math.isnan(call.interval_s) for call in task.calls] == [False, True]


def test_an_execution_time_that_is_not_recorded_is_no_pause(tmp_path: Path) -> None:
    untimed = [{name: value for name, value in step.items() if name != "execution_time"} for step in OLD["trajectory"]]
    import_recording(written(tmp_path / "a.traj", {**OLD, "trajectory": untimed}), tmp_path / "t", tokenizer=BPE)
    assert [call.interval_s for call in calls_of(tmp_path / "t")["a"]] == [0.0, 0.0]


def test_sizing_profiles_the_files_as_their_imported_trace(tmp_path: Path) -> None:
    source = GOLDEN / "swe-agent" / "repo__bug-1.traj"
    import_recording(source, tmp_path / "t", tokenizer=BPE)
    left = profile(open_stream(source, 4, tokenizer=BPE)).facts()
    right = profile(open_stream(tmp_path / "t", 4)).facts()
    for facts in (left, right):
        del facts["name"], facts["notes"]
    assert left == right


MALFORMED: list[tuple[Any, str]] = [
    ("[]", r"a\.traj must be a JSON object, not \[\]"),
    ("{", r"a\.traj: not JSON"),
    ({**NEW, "trajectory": None}, r"a\.traj: trajectory must be a list of objects, not None"),
    ({**NEW, "history": [3]}, r"a\.traj: history\[0\] must be a JSON object, not 3"),
    (changed(NEW, "trajectory", 1, query="x"), r"trajectory\[1\]: query must be a list of objects, not 'x'"),
    (
        changed(NEW, "trajectory", 1, query=[{"role": ""}]),
        r"trajectory\[1\]: query\[0\]: role must be a non-empty text",
    ),
    (changed(NEW, "trajectory", 1, query=[{"role": "user"}]), r"query\[0\].content must be text or a list of text"),
    (changed(NEW, "trajectory", 1, response=None), r"trajectory\[1\]: response must be a text, not NoneType"),
    (changed(NEW, "trajectory", 0, execution_time=-1), r"trajectory\[0\]: execution_time must be a finite number >= 0"),
    (changed(NEW, "history", -2, tool_calls=[{}]), r"history\[6\].tool_calls\[0\].function must be an object"),
    ({**OLD, "history": OLD["history"][3:]}, r"history\[0\]: is the assistant's; a call needs a prompt before it"),
    ({**NEW, "attempts": [{}]}, r"a\.traj: attempts\[0\]: trajectory must be a list of objects"),
    (changed(NEW, "trajectory", 1, response="\ud800"), r"trajectory\[1\]: its text is not Unicode"),
]


@pytest.mark.parametrize(("record", "message"), MALFORMED)
def test_malformed_files_are_named_with_their_field(record: Any, message: str, tmp_path: Path) -> None:
    written(tmp_path / "a.traj", record)
    written(tmp_path / "b.traj", NEW)
    with pytest.raises(RecordError, match=message):
        import_recording(tmp_path, tmp_path / "t", tokenizer=BPE)
    skipped: list[RecordError] = []
    assert [task.task_id for task in tasks(tmp_path, skipped.append)] == ["b"]
    assert len(skipped) == 1


def test_attempts_of_one_name_are_numbered_and_counted(tmp_path: Path) -> None:
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        written(tmp_path / run / "a.traj", NEW if run == "two" else OLD)
    written(tmp_path / "two" / "a#2.traj", OLD)
    import_recording(tmp_path, tmp_path / "t", tokenizer=BPE)
    expected = {"a": 2, "a#2": 2, "a#3": 4}
    assert {name: len(calls) for name, calls in calls_of(tmp_path / "t").items()} == expected
    with TraceReader(tmp_path / "t") as reader:
        assert reader.manifest.history[0]["repeated_names"] == 1
    for seed in range(3):  # a sample's names are the whole recording's
        import_recording(tmp_path, tmp_path / "u", tokenizer=BPE, tasks=1, seed=seed)
        ((name, calls),) = calls_of(tmp_path / "u").items()
        assert len(calls) == expected[name]


def test_attempts_of_one_name_are_linted_apart(tmp_path: Path) -> None:
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        written(tmp_path / run / "a.traj", OLD)
    report, _ = lint_recording(tmp_path, tokenizer=BPE)
    assert [(lane.task, len(lane.findings)) for lane in report.lanes] == [("a", 0), ("a#2", 0)]
    stream = open_stream(tmp_path, tokenizer=BPE)
    assert [len(list(stream)), stream.lanes] == [1, ["a", "a#2"]]
