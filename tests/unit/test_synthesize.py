"""Synthetic agents have the published shape, and are the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efficient_lmcache.replay.describe import describe
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import TraceReader

DEMO = Workload(
    tasks=24,
    calls_per_task=22,
    system_tokens=1_024,
    issue_tokens=400,
    output_tokens=12,
    max_output_tokens=16,
    observation_tokens=550,
    max_prompt_tokens=32_000,
)


def facts_of(path: Path) -> dict[str, Any]:
    with TraceReader(path) as reader:
        return describe(reader)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_has_the_shape_of_the_papers_workload(tmp_path: Path, seed: int) -> None:
    synthesize(tmp_path / "t", Workload(seed=seed))
    facts = facts_of(tmp_path / "t")
    calls, prompts = facts["distributions"]["calls_per_task"], facts["distributions"]["prompt_tokens_per_call"]
    assert facts["tasks"] == 79
    assert calls["mean"] == pytest.approx(56.0, rel=0.06)
    assert calls["p50"] == pytest.approx(51, abs=3)
    assert (calls["min"], calls["max"]) == (pytest.approx(32, abs=1), pytest.approx(100, abs=4))
    assert prompts["mean"] == pytest.approx(33_234, rel=0.06)
    assert prompts["max"] > 3.5 * prompts["mean"]
    assert facts["output_tokens"] / facts["tasks"] == pytest.approx(23_200, rel=0.08)
    assert facts["shared_prefix"]["cache_stable_share"] == pytest.approx(0.981, abs=0.003)
    assert facts["shared_prefix"]["previous_prompt_share"] == pytest.approx(0.969, abs=0.004)
    assert facts["distributions"]["interval_s"]["p50"] == pytest.approx(0.64, rel=0.1)


def test_a_small_workload_keeps_to_its_limits(tmp_path: Path) -> None:
    synthesize(tmp_path / "t", DEMO)
    facts = facts_of(tmp_path / "t")
    prompts, outputs = (facts["distributions"][f"{kind}_tokens_per_call"] for kind in ("prompt", "output"))
    assert 6_000 < prompts["mean"] < 10_000
    assert prompts["max"] <= 32_000
    assert 1 <= outputs["min"] <= outputs["max"] <= 16
    assert facts["manifest"]["vocab_size"] == 16_384


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("one", 5), ("same", 5), ("other", 6)):
        synthesize(tmp_path / name, Workload(tasks=2, calls_per_task=5, seed=seed))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "same").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "other").read_bytes()


def test_more_tasks_start_with_the_tasks_of_fewer(tmp_path: Path) -> None:
    for name, tasks in (("few", 2), ("many", 4)):
        synthesize(tmp_path / name, Workload(tasks=tasks, calls_per_task=5))
    with TraceReader(tmp_path / "few") as few, TraceReader(tmp_path / "many") as many:
        for number in range(2):
            for left, right in zip(few.calls(number), many.calls(number), strict=True):
                assert left.prompt_tokens.tolist() == right.prompt_tokens.tolist()


def test_tasks_share_the_system_prompt_and_nothing_more(tmp_path: Path) -> None:
    synthesize(tmp_path / "t", Workload(tasks=3, calls_per_task=5, system_tokens=100))
    with TraceReader(tmp_path / "t") as reader:
        firsts = [next(reader.calls(number)).prompt_tokens for number in range(3)]
    assert all(np.array_equal(first[:100], firsts[0][:100]) for first in firsts)
    assert len({int(first[100]) for first in firsts} | {int(first[101]) for first in firsts}) > 2


def test_every_prompt_extends_the_previous_prompt_and_output(tmp_path: Path) -> None:
    synthesize(tmp_path / "t", Workload(tasks=2, calls_per_task=5))
    with TraceReader(tmp_path / "t") as reader:
        for number in range(2):
            known: list[int] = []
            for call in reader.calls(number):
                assert call.prompt_tokens.tolist()[: len(known)] == known
                known = [*call.prompt_tokens.tolist(), *call.output_tokens.tolist()]


def test_the_manifest_records_the_parameters(tmp_path: Path) -> None:
    synthesize(tmp_path / "t", Workload(tasks=1, calls_per_task=2, seed=3))
    with TraceReader(tmp_path / "t") as reader:
        (step,) = reader.manifest.history
    assert step["step"] == "synthesize"
    assert Workload(**{name: value for name, value in step.items() if name != "step"}).seed == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": 0}, "--tasks is 0; it must be from 1"),
        ({"output_tokens": 0.5}, "--output-tokens is 0.5"),
        ({"calls_per_task": float("inf")}, "--calls-per-task is inf; it must be from 1 to 10000000"),
        ({"issue_tokens": float("inf")}, "--issue-tokens is inf"),
        ({"observation_tokens": float("nan")}, "--observation-tokens is nan"),
        ({"vocab_size": 1}, "--vocab is 1"),
        ({"vocab_size": (1 << 32) + 1}, "--vocab is 4294967297; it must be from 2 to 4294967296"),
        ({"max_prompt_tokens": 100}, "--max-prompt is 100; it must exceed --system-tokens"),
        ({"median_gap_s": float("nan")}, "--median-gap is nan"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_an_impossible_workload_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**arguments)
