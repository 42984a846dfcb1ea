"""`trace …` on the command line: what it writes and shows, and that user errors are one line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from efficient_lmcache.replay.cli_trace import app

SMALL = ["--tasks", "3", "--calls-per-task", "5", "--vocab", "500", "--system-tokens", "50"]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    result = run("synthesize", "--out", tmp_path / "t.trace", *SMALL)
    assert result.exit_code == 0, result.output
    return tmp_path / "t.trace"


def test_info_reports_the_trace_as_json(trace: Path) -> None:
    facts = json.loads(run("info", trace, "--json", "--verify").stdout)
    assert facts["tasks"] == 3
    assert facts["manifest"]["vocab_size"] == 500
    assert set(facts["distributions"]) == {
        "calls_per_task",
        "prompt_tokens_per_call",
        "output_tokens_per_call",
        "interval_s",
    }
    shared = facts["shared_prefix"]
    assert 0 < shared["previous_prompt_tokens"] < shared["cache_stable_tokens"] < facts["prompt_tokens"]


def test_a_reader_of_the_output_that_has_gone_is_no_error(trace: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "efficient_lmcache.cli", "trace", "info", str(trace), "--json"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, b"")


def test_info_shows_a_table(trace: Path) -> None:
    output = run("info", trace).stdout
    assert "cache-stable" in output
    assert "p50" in output


def test_trim_writes_a_smaller_trace(trace: Path, tmp_path: Path) -> None:
    assert run("trim", trace, "--out", tmp_path / "u", "--tasks", "2", "--calls", "1").exit_code == 0
    facts = json.loads(run("info", tmp_path / "u", "--json").stdout)
    assert (facts["tasks"], facts["calls"]) == (2, 2)
    assert facts["distributions"]["interval_s"] == {}


def test_import_reads_a_trajectory(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the package tokenizers, from the extras cpu and gpu")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    source = tmp_path / "one.traj.json"
    source.write_text(json.dumps({"messages": messages}))
    result = run("import", source, "--format", "mini-swe-agent", "--tokenizer", "bpe:300", "--out", tmp_path / "t")
    assert result.exit_code == 0
    assert "1 tasks, 1 calls" in result.stdout


def test_an_existing_output_is_replaced_only_by_force(trace: Path) -> None:
    before = trace.read_bytes()
    refused = run("synthesize", "--out", trace, *SMALL, "--seed", "1")
    assert refused.exit_code == 2
    assert refused.stderr == f"error: {trace}: exists already; name another file or pass --force\n"
    assert trace.read_bytes() == before
    assert run("synthesize", "--out", trace, *SMALL, "--seed", "1", "--force").exit_code == 0
    assert trace.read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "absent"], "error: absent: no such trace"),
        (["trim", "absent", "--out", "u", "--calls", "1"], "error: absent: no such trace"),
        (["synthesize", "--out", "no/folder/t"], "error: --out no/folder/t: there is no directory no/folder; make it"),
        (["synthesize", "--out", ".", "--force"], "error: --out .: is a directory; name a file"),
        (["synthesize", "--out", "t", "--tasks", "0"], "error: --tasks is 0; it must be from 1"),
        (["synthesize", "--out", "t", "--calls-per-task", "inf"], "error: --calls-per-task is inf; it must be from 1"),
        (["synthesize", "--out", "t", "--issue-tokens", "inf"], "error: --issue-tokens is inf; it must be from 1"),
        (["synthesize", "--out", "t", "--vocab", "9" * 20], "error: --vocab is 99999999999999999999; it must be"),
        (
            ["import", "x.jsonl", "--tokenizer", "tekken", "--out", "no/t"],
            "error: --out no/t: there is no directory no;",
        ),
        (["import", "x.jsonl", "--format", "other", "--tokenizer", "tekken", "--out", "t"], "error: --format 'other'"),
        (["import", "x.jsonl", "--tokenizer", "tekken", "--out", "t"], "error: x.jsonl: no such file"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
