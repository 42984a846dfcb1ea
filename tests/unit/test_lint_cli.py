"""`trace lint`: what it prints, in text, JSON and as a picture, and what it says of bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from click.testing import Result
from lint_agents import Agent, append_only
from test_lint_habits import clock_at_the_top
from typer.testing import CliRunner

from efficient_lmcache.replay.trace import Call, Manifest, TraceWriter
from efficient_lmcache.sizing.cli_lint import lint

REQUEST = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
Run = Callable[..., Result]

app = typer.Typer()
app.command()(lint)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One task that only appends, one with a clock."""
    path = tmp_path / "agents.trace"
    agent = Agent.random()
    with TraceWriter(path, Manifest(1 << 16, "synthetic", "test")) as writer:
        for name, render in (("clean", append_only), ("clocked", clock_at_the_top)):
            prompts = [np.concatenate([tokens for _, tokens in render(agent, turn)]) for turn in range(6)]
            replies = [reply for reply, _ in agent.turns]
            writer.write_task(name, [Call(*each, 0.0) for each in zip(prompts, replies, strict=False)])
    return path


def completions(folder: Path) -> Path:
    """OpenHands' files of two calls of one task, with the time in the system prompt."""
    task = folder / "task-1"
    task.mkdir(parents=True)
    history = [{"role": "user", "content": "Please mend the parser. " * 20}]
    for call in range(2):
        system = {"role": "system", "content": f"You fix bugs. It is 18:0{call} now. " + "Be careful with files. " * 30}
        reply = {"role": "assistant", "content": f"I look at file {call}. " * 9}
        record = {"messages": [system, *history], "response": {"choices": [{"message": reply}]}, "timestamp": call}
        (task / f"{call}.json").write_text(json.dumps(record))
        history += [reply, {"role": "user", "content": f"contents of file {call}"}]
    return folder


def test_names_the_habit_its_cost_and_what_to_do(run: Run, trace: Path) -> None:
    result = run(trace)
    assert result.exit_code == 0
    for expected in ("2 tasks, 12 calls", "volatile_head", "Move what changes on every call", "clocked, 5", "token 20"):
        assert expected in result.stdout
    assert "clean" not in result.stdout


def test_json_has_totals_worst_tasks_and_worst_calls(run: Run, trace: Path) -> None:
    facts = json.loads(run(trace, "--json", "--top", 2).stdout)
    assert (facts["tasks"], facts["calls"], facts["breaks"], facts["unit_tokens"]) == (2, 12, 5, 1)
    (habit,) = facts["habits"]
    assert (habit["habit"], habit["breaks"], habit["tasks"]) == ("volatile_head", 5, 1)
    assert habit["lost_tokens"] == facts["lost_tokens"] > 0
    assert [(each["task"], each["call"]) for each in facts["worst_calls"]] == [("clocked", 5), ("clocked", 4)]
    assert [each["task"] for each in facts["worst_tasks"]] == ["clocked"]


def test_shows_the_text_that_changed(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the package tokenizers, which the extras cpu and gpu bring")
    result = run(completions(tmp_path / "run"), "--tokenizer", "bpe:300", "--json")
    assert result.exit_code == 0, result.stderr
    (worst,) = json.loads(result.stdout)["worst_calls"]
    assert worst["habit"] == "volatile_head"
    assert "18:00 now" in worst["old_text"]
    assert "18:01 now" in worst["new_text"]


def test_mooncake_says_that_breaks_cannot_be_seen(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(REQUEST)
    assert "cannot be seen" in run(path).stdout
    assert json.loads(run(path, "--json").stdout)["breaks"] is None


def test_draws(run: Run, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the package matplotlib, which the extra sizing brings")
    figure = tmp_path / "lint.png"
    assert run(trace, "--figure", figure).exit_code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_skips_bad_records_and_counts_them(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n{"timestamp": 1}\n'
    )
    assert run(path).exit_code == 2
    result = run(path, "--skip-bad")
    assert result.exit_code == 0
    assert "1 bad record" in result.stdout


def test_a_recording_without_calls_is_not_praised(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Please mend the parser."}]}) + "\n")
    result = run(path, "--tokenizer", "bpe:300")
    assert result.exit_code == 2
    assert result.stderr == f"error: {path}: has no calls to read\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{trace}", "--figure", "{folder}/lint.txt"], "must end in .png, .svg, .pdf"),
        (["{trace}", "--figure", "{folder}/absent/lint.png"], "make it first"),
        (["{trace}", "--tokenizer", "bpe:300"], "no text to train it on"),
        (["{trace}", "--tokenizer", "nonsense"], "no such tokenizer"),
        (["{folder}/absent.trace"], "no such file"),
    ],
)
def test_bad_input_is_one_line(run: Run, trace: Path, arguments: list[str], reason: str) -> None:
    result = run(*(each.format(trace=trace, folder=trace.parent) for each in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
