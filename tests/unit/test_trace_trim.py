"""Trimming keeps what it does not cut exactly as recorded, and says in the manifest what it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import Call, Manifest, TraceError, TraceReader, TraceWriter
from efficient_lmcache.replay.trim import trim


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "full"
    synthesize(path, Workload(tasks=5, calls_per_task=10, vocab_size=500, system_tokens=50, observation_tokens=40))
    return path


def recorded(path: Path) -> list[list[Call]]:
    with TraceReader(path) as reader:
        return [list(reader.calls(number)) for number in range(len(reader.tasks))]


def test_fewer_tasks_and_calls_are_the_first_ones(full: Path, tmp_path: Path) -> None:
    trim(full, tmp_path / "t", tasks=2, calls=3)
    before, after = recorded(full), recorded(tmp_path / "t")
    assert [len(calls) for calls in after] == [3, 3]
    for old_calls, new_calls in zip(before[:2], after, strict=True):
        for old, new in zip(old_calls[:3], new_calls, strict=True):
            assert old.prompt_tokens.tolist() == new.prompt_tokens.tolist()
            assert old.output_tokens.tolist() == new.output_tokens.tolist()
            assert old.interval_s == new.interval_s


def test_shorter_outputs_leave_prompts_as_recorded(full: Path, tmp_path: Path) -> None:
    trim(full, tmp_path / "t", max_output=4)
    for old_calls, new_calls in zip(recorded(full), recorded(tmp_path / "t"), strict=True):
        assert [c.prompt_tokens.tolist() for c in old_calls] == [c.prompt_tokens.tolist() for c in new_calls]
        assert [c.output_tokens.tolist()[:4] for c in old_calls] == [c.output_tokens.tolist() for c in new_calls]


def test_a_task_ends_before_its_first_too_long_prompt(full: Path, tmp_path: Path) -> None:
    limit = 3_000
    trim(full, tmp_path / "t", max_prompt=limit)
    for old_calls, new_calls in zip(recorded(full), recorded(tmp_path / "t"), strict=True):
        kept = len(new_calls)
        assert all(len(c.prompt_tokens) <= limit for c in new_calls)
        assert kept == len(old_calls) or len(old_calls[kept].prompt_tokens) > limit


def test_the_manifest_records_every_step(full: Path, tmp_path: Path) -> None:
    trim(full, tmp_path / "t", tasks=3)
    trim(tmp_path / "t", tmp_path / "u", calls=2, max_output=8)
    with TraceReader(tmp_path / "u") as reader:
        assert [step["step"] for step in reader.manifest.history] == ["synthesize", "trim", "trim"]
        assert reader.manifest.history[1:] == (
            {"step": "trim", "tasks": 3},
            {"step": "trim", "calls": 2, "max_output": 8},
        )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "nothing to trim; give at least one of --tasks, --calls, --max-prompt, --max-output"),
        ({"calls": 0}, "--calls is 0; it must be at least 1"),
        ({"tasks": 6}, "cannot keep 6 tasks; it has 5"),
        ({"max_prompt": 1}, "nothing is left"),
    ],
)
def test_a_useless_trim_is_refused(full: Path, tmp_path: Path, limits: dict[str, int], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trim(full, tmp_path / "t", **limits)
    assert not (tmp_path / "t").exists()


def test_a_trace_without_tasks_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "empty", Manifest(4, "synthetic", "nothing")):
        pass
    with pytest.raises(TraceError, match="empty: nothing is left: it has no tasks"):
        trim(tmp_path / "empty", tmp_path / "t", calls=1)
