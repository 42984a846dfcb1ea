"""Formats are told from files, and each says on the command line which arguments it takes."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
from pathlib import Path

import pytest
import zstandard
from test_import_golden import BLOCKS, FILES, GOLDEN, TEXT
from typer.testing import CliRunner, Result

from efficient_lmcache.replay.cli_trace import app
from efficient_lmcache.replay.importers.formats import IMPORTERS, detect
from efficient_lmcache.replay.importers.importing import import_recording
from efficient_lmcache.replay.importers.openhands import completions_tasks, history_tasks
from efficient_lmcache.replay.trace import TraceReader

NAMES = {"swe-agent-0.7": "swe-agent", "mooncake-sessions": "mooncake"}


def source_of(name: str) -> Path:
    return GOLDEN / name / FILES.get(name, "")


def run_import(source: Path, out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["import", str(source), "--out", str(out), *arguments])


@pytest.mark.parametrize("name", [*TEXT, *BLOCKS])
def test_every_format_is_told_from_its_files(name: str) -> None:
    assert detect(source_of(name)) == NAMES.get(name, name)
    assert {NAMES.get(each, each) for each in (*TEXT, *BLOCKS)} == set(IMPORTERS)


def test_directories_are_told_from_what_they_hold(tmp_path: Path) -> None:
    assert detect(GOLDEN / "swe-agent") == "swe-agent"
    assert detect(GOLDEN / "openhands-completions" / "repo__bug-1") == "openhands-completions"
    # An evaluation's output directory, which has JSON files of its own.
    shutil.copytree(GOLDEN / "openhands-completions", tmp_path / "run" / "llm_completions")
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "trace_0001.json").write_bytes((GOLDEN / "weka" / "sessions.jsonl").read_bytes())
    assert detect(tmp_path / "sessions") == "weka"
    import_recording(tmp_path / "sessions", tmp_path / "sessions.trace")
    (tmp_path / "run" / "metadata.json").write_text("{}")
    assert detect(tmp_path / "run") == "openhands-completions"
    assert [task.task_id for task in completions_tasks(tmp_path / "run")] == ["repo__bug-1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"x": 1, "y": 2}\n',
            "line 1: of an unknown format, with the fields x, y; --format may be mini-swe",
        ),
        (
            '{"session_id": "a", "messages": [{"role": "user", "content": "Hi"}], "output_length": 5}',
            "line 1: of an unknown format, with the fields session_id, messages, output_length; --format may be",
        ),
        ("", "has no record to tell its format; --format may be"),
        ("hello\n", "line 1: not JSON: Expecting value"),
        ("notes.txt\0\0\0", "line 1: not JSON but binary; unpack an archive first"),
        (None, "no such file or directory"),
    ],
)
def test_files_of_no_format_are_refused_with_those_there_are(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "f.jsonl").write_text(content)
    result = run_import(tmp_path / "f.jsonl", tmp_path / "t")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'f.jsonl'}: {message}")


@pytest.mark.parametrize(
    ("packed", "name"),
    [
        (zstandard.compress(b'{"requests": []}'), "zstd"),
        (bz2.compress(b"{}"), "bzip2"),
        (lzma.compress(b"{}"), "xz"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
    ],
)
def test_packed_files_that_are_not_read_are_named(packed: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(packed)
    result = run_import(tmp_path / "f.jsonl", tmp_path / "t")
    assert result.exit_code == 2
    assert f"f.jsonl: is a {name} file; plain and gzip ones are read, so unpack it first" in result.stderr


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_what_powershell_writes_says_how_to_make_it_utf_8(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(("\ufeff" + source_of("mooncake").read_text()).encode(encoding))
    result = run_import(tmp_path / "f.jsonl", tmp_path / "t")
    assert result.exit_code == 2
    assert "f.jsonl: is UTF-16; recordings are UTF-8: iconv -f UTF-16 -t UTF-8 makes one" in result.stderr


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_records_says_how_to_take_it_apart(indent: int | None, tmp_path: Path) -> None:
    sessions = [json.loads(line) for line in source_of("weka").read_text().splitlines()]
    (tmp_path / "f.json").write_text(json.dumps(sessions, indent=indent))
    result = run_import(tmp_path / "f.json", tmp_path / "t")
    assert result.exit_code == 2
    assert "f.json: is one JSON array; its records need lines: jq -c '.[]' does that" in result.stderr


def test_a_pipe_is_no_recording(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, source_of("weka").read_bytes())
    os.close(writing)
    result = run_import(Path(f"/dev/fd/{reading}"), tmp_path / "t")
    os.close(reading)
    assert result.exit_code == 2
    assert "is a pipe; a recording is read more than once, so it must be a file" in result.stderr


def test_a_record_may_be_written_over_several_lines(tmp_path: Path) -> None:
    session = json.loads(source_of("weka").read_text().splitlines()[0])
    indented = "\ufeff" + json.dumps(session, indent=1).replace("\n", "\r\n")
    for name, content in (("lines.jsonl", json.dumps(session)), ("indented.json", indented)):
        (tmp_path / name).write_text(content, newline="")
        import_recording(tmp_path / name, tmp_path / f"{name}.trace")
    with TraceReader(tmp_path / "lines.jsonl.trace") as left, TraceReader(tmp_path / "indented.json.trace") as right:
        assert left.tasks == right.tasks
    (tmp_path / "cut.json").write_text(indented[:-9])
    assert "cut.json: not JSON" in run_import(tmp_path / "cut.json", tmp_path / "t").stderr


@pytest.mark.parametrize("name", ["repo__bug-1.traj.gz", "repo__bug-1.json"])
def test_a_swe_agent_trajectory_is_told_from_its_fields(name: str, tmp_path: Path) -> None:
    content = (GOLDEN / "swe-agent" / "repo__bug-1.traj").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert detect(tmp_path / name) == "swe-agent"
    import_recording(tmp_path / name, tmp_path / "t", tokenizer="bpe:300")
    with TraceReader(tmp_path / "t") as reader:
        assert [task.task_id for task in reader.tasks] == ["repo__bug-1"]


@pytest.mark.parametrize("name", ["runs/a.traj.json", "a/a.traj", "llm_completions/a/1.json"])
def test_files_of_a_directory_may_be_compressed(name: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Fix it."}, {"role": "assistant", "content": "Done."}]
    answer = {"choices": [{"message": messages[1]}], "usage": None}
    step = {"response": "Done.", "query": messages[:1]}
    record: dict[str, object] = {"messages": messages}
    if name.endswith(".traj"):
        record = {"trajectory": [step], "history": messages}
    elif name.endswith("1.json"):
        record = {"messages": messages[:1], "response": answer, "timestamp": 1.5}
    file = tmp_path / "runs" / f"{name}.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps(record).encode()))
    import_recording(tmp_path / "runs", tmp_path / "t", tokenizer="bpe:300")
    with TraceReader(tmp_path / "t") as trace:
        assert [(task.task_id, task.calls) for task in trace.tasks] == [("a", 1)]


def test_a_folder_of_other_json_files_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "report.json").write_text('{"resolved": true}')
    result = run_import(tmp_path / "runs", tmp_path / "t", "--tokenizer", "bpe:300")
    assert "runs: is a directory without a recording; --format may be" in result.stderr


@pytest.mark.parametrize(
    ("timestamp", "message"), [(10**400, "is 1000.*no time exceeds 1e.20"), (1e308, r"is 1e.308; no time exceeds")]
)
def test_times_beyond_any_clock_are_refused(timestamp: float, message: str, tmp_path: Path) -> None:
    request = {"timestamp": timestamp, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    (tmp_path / "f.jsonl").write_text(json.dumps(request))
    with pytest.raises(ValueError, match=rf"f\.jsonl: line 1: timestamp {message}"):
        import_recording(tmp_path / "f.jsonl", tmp_path / "t")


def test_a_directory_without_a_recording_is_refused(tmp_path: Path) -> None:
    assert "is a directory without a recording; --format may be" in run_import(tmp_path, tmp_path / "t").stderr
    (tmp_path / "output.jsonl").write_bytes((GOLDEN / "openhands-history" / "output.jsonl").read_bytes())
    assert "a file in it may be a recording: output.jsonl" in run_import(tmp_path, tmp_path / "t").stderr


def test_any_conversation_a_line_is_a_task_named_by_its_line_where_nothing_else_names_it(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Fix it."}, {"role": "assistant", "content": "Done."}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 2)
    assert run_import(tmp_path / "chats.jsonl", tmp_path / "t", "--tokenizer", "bpe:300").exit_code == 0
    with TraceReader(tmp_path / "t") as trace:
        assert [task.task_id for task in trace.tasks] == ["line 1", "line 2"]


def test_events_of_openhands_version_1_say_what_is_read_instead(tmp_path: Path) -> None:
    event = {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": []}}
    (tmp_path / "output.jsonl").write_text(json.dumps({"instance_id": "a", "history": [event]}))
    with pytest.raises(ValueError, match="OpenHands' version 1; read are version 0's, and logged completions"):
        list(history_tasks(tmp_path / "output.jsonl"))


def test_a_trace_needs_no_import(tmp_path: Path) -> None:
    import_recording(source_of("weka"), tmp_path / "a.trace")
    result = run_import(tmp_path / "a.trace", tmp_path / "t")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "a.trace: is a trace already" in result.stderr


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    result = run_import(source_of("weka"), tmp_path / "t", "--format", "vllm")
    assert result.exit_code == 2
    assert "--format 'vllm' is unknown; allowed are auto, mini-swe-agent" in result.stderr


@pytest.mark.parametrize("name", TEXT)
def test_text_needs_a_tokenizer(name: str, tmp_path: Path) -> None:
    result = run_import(source_of(name), tmp_path / "t")
    assert result.exit_code == 2
    assert "is a recording of text" in result.stderr
    assert "needs a --tokenizer; allowed are 'tekken'" in result.stderr


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_refuse_a_tokenizer(name: str, tmp_path: Path) -> None:
    result = run_import(source_of(name), tmp_path / "t", "--tokenizer", "tekken")
    assert result.exit_code == 2
    assert "has ids of blocks" in result.stderr
    assert "leave it out" in result.stderr


@pytest.mark.parametrize("name", [*TEXT, *BLOCKS])
def test_every_format_takes_tasks_seed_and_vocab(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the package tokenizers, which the extras cpu and gpu bring")
    tokenizer = "bpe:300" if name in TEXT else None
    import_recording(source_of(name), tmp_path / "t", tokenizer=tokenizer, tasks=1, seed=3, vocab_size=70)
    with TraceReader(tmp_path / "t") as reader:
        reader.verify()
        assert (len(reader.tasks), reader.manifest.vocab_size) == (1, 70)
        assert reader.manifest.history[0]["seed"] == 3
        assert any("interval_s" in each for each in reader.manifest.assumptions)
    with pytest.raises(ValueError, match=r"cannot take 9 tasks; it has \d with calls"):
        import_recording(source_of(name), tmp_path / "t", tokenizer=tokenizer, tasks=9)
    with pytest.raises(ValueError, match="--vocab is 0; it must be at least 1"):
        import_recording(source_of(name), tmp_path / "t", tokenizer=tokenizer, vocab_size=0)


def test_completions_without_usage_do_not_tell_their_pauses(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "openhands-completions", tmp_path / "llm_completions")
    for file in (tmp_path / "llm_completions").rglob("*.json"):
        record = json.loads(file.read_text())
        del record["response"]["usage"]
        file.write_text(json.dumps(record))
    import_recording(tmp_path, tmp_path / "t", tokenizer="bpe:300")
    with TraceReader(tmp_path / "t") as reader:
        assert [call.interval_s for call in reader.calls(0)] == [0.0, 0.0]


def test_a_completion_that_said_nothing_is_a_call_with_its_end_marker_alone(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "openhands-completions", tmp_path / "c")
    file = tmp_path / "c" / "repo__bug-1" / "m-1735689601.0.json"
    record = json.loads(file.read_text())
    record["response"]["choices"][0]["message"] = {"role": "assistant", "content": None}
    file.write_text(json.dumps(record))
    (task,) = completions_tasks(tmp_path / "c")
    assert "" in [call.response for call in task.calls]
    import_recording(tmp_path / "c", tmp_path / "t", tokenizer="bpe:300")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, r"m-1735689601\.0\.json: messages is empty; a call needs a prompt"),
        ({"timestamp": None}, r"m-1735689601\.0\.json: timestamp must be a finite number >= 0, not None"),
        ({"response": {"choices": []}}, r"m-1735689601\.0\.json: response: message must be a JSON object, not None"),
    ],
)
def test_malformed_completions_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "openhands-completions", tmp_path / "c")
    file = tmp_path / "c" / "repo__bug-1" / "m-1735689601.0.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        list(completions_tasks(tmp_path / "c"))


def test_a_history_without_responses_has_what_its_actions_say(tmp_path: Path) -> None:
    """As OpenHands wrote them before function calling."""

    def event(source: str, **more: object) -> dict[str, object]:
        return {"source": source, "message": "a gloss for people", **more}

    events = [
        event("user", action="message", args={"content": "Fix it."}),
        event("user", action="recall", args={"query": "Fix it."}),
        event("environment", action="change_agent_state", args={"agent_state": "running"}),
        event("agent", action="run", args={"command": "ls", "thought": "I look.", "blocking": False}),
        event("agent", observation="run", content="a.py"),
        event("agent", action="null", args={}),
        event("agent", action="finish", args={"outputs": {}, "thought": ""}),
    ]
    (tmp_path / "output.jsonl").write_text(json.dumps({"instance_id": "a", "history": events}))
    (task,) = history_tasks(tmp_path / "output.jsonl")
    assert [call.response for call in task.calls] == ["I look.\nls", "a gloss for people"]
    assert list(task.calls[0].messages) == [("user", "Fix it.")]


def test_a_model_that_only_thought_has_no_text_in_later_prompts(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "openhands-completions", tmp_path / "c")
    file = tmp_path / "c" / "repo__bug-1" / "m-1735689609.5.json"
    record = json.loads(file.read_text())
    record["messages"].append({"role": "assistant", "content": None, "tool_calls": None})
    file.write_text(json.dumps(record))
    (task,) = completions_tasks(tmp_path / "c")
    assert task.calls[1].messages[-1] == ("assistant", "")


def test_an_instance_that_ended_in_an_error_has_no_calls_and_may_have_a_number(tmp_path: Path) -> None:
    record = json.loads(source_of("openhands-history").read_text())
    failed = {"instance_id": "failed", "history": None, "error": "EvalException"}
    lines = [failed, {**record, "instance_id": 7}]
    (tmp_path / "output.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert [(task.task_id, bool(task.calls)) for task in history_tasks(tmp_path / "output.jsonl")] == [
        ("failed", False),
        ("7", True),
    ]


def test_a_history_that_does_not_tell_its_prompts_is_refused(tmp_path: Path) -> None:
    record = json.loads(source_of("openhands-history").read_text())
    record["history"].insert(5, {"source": "agent", "action": "condensation"})
    (tmp_path / "output.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"output\.jsonl: line 1: history\[5\]: is a condensation"):
        list(history_tasks(tmp_path / "output.jsonl"))


def spoiled(name: str, directory: Path) -> Path:
    """A copy of a golden recording with one more record, which is cut off."""
    copied = directory / "recording"
    shutil.copytree(GOLDEN / name, copied)
    some = next(path for path in sorted(copied.rglob("*")) if path.is_file())
    if some.suffix == ".jsonl":
        with some.open("ab") as file:
            file.write(b'{"cut of')
        return some
    some.with_name(f"0-{some.name}").write_bytes(b'{"cut of')
    return copied


@pytest.mark.parametrize("name", [*TEXT, *BLOCKS])
def test_a_bad_record_ends_an_import_or_is_left_out_and_counted(name: str, tmp_path: Path) -> None:
    source, out, whole = spoiled(name, tmp_path), tmp_path / "out.trace", tmp_path / "whole.trace"
    options = ("--tokenizer", "bpe:300") if name in TEXT else ()
    assert run_import(source_of(name), whole, *options).exit_code == 0

    stopped = run_import(source, out, *options)
    left_out = run_import(source, out, *options, "--skip-bad")

    assert stopped.exit_code == 2
    assert "not JSON" in stopped.output
    assert left_out.exit_code == 0, left_out.output
    assert "bad records left out: 1; the first: " in left_out.output
    with TraceReader(out) as reader, TraceReader(whole) as expected:
        assert reader.manifest.history[0]["bad_records"] == 1
        assert "bad_records" not in expected.manifest.history[0]
        assert reader.tasks == expected.tasks
