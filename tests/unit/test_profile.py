"""Trace profiles: exact shares of tokens, lower bounds of blocks, sharing across sessions, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from efficient_lmcache.replay.describe import describe
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import Call, Manifest, TraceReader, TraceWriter
from efficient_lmcache.sizing.cli_profile import profile as command
from efficient_lmcache.sizing.profile import profile
from efficient_lmcache.sizing.streams import open_stream

Task = list[tuple[list[int], list[int]]]


def write_trace(path: Path, made: list[Task]) -> Path:
    with TraceWriter(path, Manifest(100, "synthetic", "test")) as writer:
        for number, task in enumerate(made):
            calls = [Call(np.array(prompt), np.array(output), 1.0) for prompt, output in task]
            writer.write_task(f"task-{number}", calls)
    return path


def write_mooncake(path: Path) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7, 8]},
        {"timestamp": 2, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 3, 4]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_shares_and_lengths_are_those_of_trace_info(tmp_path: Path) -> None:
    synthesize(tmp_path / "t.trace", Workload(tasks=4, calls_per_task=6, vocab_size=300, system_tokens=64))
    facts = profile(open_stream(tmp_path / "t.trace", 16)).facts()
    with TraceReader(tmp_path / "t.trace") as reader:
        info = describe(reader)
    assert facts["shared_prefix"] == info["shared_prefix"]
    for name in ("prompt_tokens_per_call", "output_tokens_per_call", "interval_s"):
        assert facts["distributions"][name] == info["distributions"][name]
    assert facts["distributions"]["calls_per_lane"] == info["distributions"]["calls_per_task"]
    assert (facts["calls"], facts["prompt_tokens"]) == (info["calls"], info["prompt_tokens"])
    assert facts["shares_are"] == "exact"


def test_new_kv_is_what_a_call_adds_and_reused_where_the_next_call_extends_it(tmp_path: Path) -> None:
    task: Task = [
        ([1, 2, 3, 4], [5, 6]),  # adds 6 tokens, of which the next call keeps 5
        ([1, 2, 3, 4, 5, 9], [7]),  # adds 9 and 7, both kept
        ([1, 2, 3, 4, 5, 9, 7, 8], [1]),  # nothing follows: not counted
    ]
    measured = profile(open_stream(write_trace(tmp_path / "t.trace", [task, [([1], [1])]]), 2))
    assert measured.cache_stable_tokens.tolist() == [0, 5, 7, 0]
    assert measured.previous_prompt_tokens.tolist() == [0, 4, 6, 0]
    assert measured.new_kv_tokens() == (8, 7)
    assert measured.places().tolist() == [0, 1, 2, 0]


def test_chunks_of_several_sessions_are_counted(tmp_path: Path) -> None:
    made: list[Task] = [[([1, 2, 3, 4], [1]), ([1, 2, 3, 5], [1])], [([1, 2, 9, 9], [1])], [([1, 2, 3, 4], [1])]]
    facts = profile(open_stream(write_trace(tmp_path / "t.trace", made), 2)).facts()
    # [1 2] is everyone's; [.. 3 4] two tasks'; [.. 3 5] and [.. 9 9] are private.
    assert facts["chunks"] == {
        "references": 8,
        "distinct": 4,
        "in_several_sessions": 2,
        "in_several_sessions_share": 0.5,
    }


def test_blocks_give_lower_bounds_and_say_so(tmp_path: Path) -> None:
    measured = profile(open_stream(write_mooncake(tmp_path / "m.jsonl")))
    facts = measured.facts()
    assert measured.cache_stable_tokens.tolist() == [0, 0, 1024]
    assert facts["shares_are"] == "lower bounds, in chunks of 512 tokens"
    assert facts["new_kv"]["of"] == "prompts"
    assert measured.new_kv_tokens() == (1100, 1024)
    assert facts["distributions"]["interval_s"] == {}


def test_sharing_that_a_recording_does_not_tell_is_not_given_as_none(tmp_path: Path) -> None:
    asked = {"t": 0.0, "type": "n", "in": 130, "out": 1, "hash_ids": [1, 2]}
    sessions = [{"id": name, "block_size": 64, "hash_id_scope": "local", "requests": [asked]} for name in "ab"]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sessions))
    assert profile(open_stream(tmp_path / "w.jsonl")).facts()["chunks"]["in_several_sessions"] is None
    assert "not recorded" in run(tmp_path / "w.jsonl").stdout


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "m.jsonl")
    result = run(path, "--chunk-tokens", "1024", "--json")
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    assert (facts["calls"], facts["chunk_tokens"], facts["skipped_records"]) == (3, 1024, 0)
    table = run(path).stdout
    assert "at least 1,024" in table
    assert "cache-stable tokens" in table


def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra sizing")
    synthesize(tmp_path / "t.trace", Workload(tasks=2, calls_per_task=3, vocab_size=300, system_tokens=64))
    for recording in (tmp_path / "t.trace", write_mooncake(tmp_path / "m.jsonl")):
        result = run(recording, "--figure", tmp_path / "p.png")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_user_errors_are_one_line_and_status_2(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "m.jsonl")
    (tmp_path / "bad.jsonl").write_text(path.read_text() + '{"timestamp": 1}\n')
    for arguments, expected in (
        ([tmp_path / "missing"], "no such file"),
        ([path, "--chunk-tokens", "500"], "allowed are multiples of 512"),
        ([path, "--figure", tmp_path / "p.gif"], "must end in .png"),
        ([path, "--figure", tmp_path / "no" / "p.png"], "there is no directory"),
        ([tmp_path / "bad.jsonl"], "line 4: input_length must be an integer >= 1, not None"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert expected in result.stderr
    skipping = run(tmp_path / "bad.jsonl", "--skip-bad", "--json")
    assert json.loads(skipping.stdout)["skipped_records"] == 1
