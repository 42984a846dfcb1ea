"""Formats are told from files, and each says on the command line which arguments it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_import_golden import BLOCKS, FILES, GOLDEN, TEXT
from typer.testing import CliRunner, Result

from efficient_lmcache.replay.cli_trace import app
from efficient_lmcache.replay.importers.formats import IMPORTERS, detect
from efficient_lmcache.replay.importers.importing import import_recording
from efficient_lmcache.replay.importers.openhands import completions_tasks, history_tasks
from efficient_lmcache.replay.trace import TraceReader

NAMES = {"swe-agent-0.7": "swe-agent"}


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
    (tmp_path / "run" / "metadata.json").write_text("{}")
    assert detect(tmp_path / "run") == "openhands-completions"
    assert [task.task_id for task in completions_tasks(tmp_path / "run")] == ["repo__bug-1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"x": 1}\n', "is of an unknown format; --format may be mini-swe-agent, swe-agent, openhands-completions"),
        ("", "is of an unknown format; --format may be"),
        ("hello\n", "line 1: not JSON"),
        (None, "no such file or directory"),
    ],
)
def test_files_of_no_format_are_refused_with_those_there_are(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "f.jsonl").write_text(content)
    result = run_import(tmp_path / "f.jsonl", tmp_path / "t")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'f.jsonl'}: {message}")


def test_a_directory_without_a_recording_is_refused(tmp_path: Path) -> None:
    assert "is a directory without a recording; --format may be" in run_import(tmp_path, tmp_path / "t").stderr


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


def test_a_history_that_does_not_tell_its_prompts_is_refused(tmp_path: Path) -> None:
    record = json.loads(source_of("openhands-history").read_text())
    record["history"].insert(5, {"source": "agent", "action": "condensation"})
    (tmp_path / "output.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"output\.jsonl: line 1: history\[5\]: is a condensation"):
        list(history_tasks(tmp_path / "output.jsonl"))
