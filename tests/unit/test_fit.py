"""`efficient-lmcache simulate --fit-to`: a profile is fitted to runs, and predicts runs that it was not fitted to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("numba", reason="needs the extra sizing")

from efficient_lmcache.cli import app
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.simulate.paper import MODELS

#: Of machines that made the runs; no packaged profile is near.
MACHINES = {
    "cpu": {
        "measured": {"step_s": 0.02, "sequence_s": 0.002, "token_s": 2e-5, "pair_s": 2e-9, "restored_token_s": 2e-5},
        "async_scheduling": False,
    },
    "h20": {
        "memory_gb_s": 4000,
        "compute_efficiency": 0.2,
        "memory_efficiency": 0.6,
        "step_s": 0.02,
        "sequence_s": 0.001,
        "copy_s": 0.01,
    },
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("inputs")
    (path / "config.json").write_text(json.dumps(MODELS["moe"]))
    synthesize(path / "agents.trace", Workload(tasks=6, calls_per_task=8, max_prompt_tokens=9_000))
    return ["simulate", "--trace", str(path / "agents.trace"), "--model", str(path / "config.json")]


def simulated_runs(inputs: list[str], machine: Path, profile: str, out: Path) -> None:
    """Recompute, plain offload and fixed admission on that machine."""
    options = ("--tp", "8", "--gpu-kv-tokens", "20000", "--active-pool", "4", "--chunk-tokens", "256")
    tiers = ("--host-gib", "0,0.2", "--admission", "none,fixed", "--out", str(out))
    run([*inputs, *options, *tiers, "--profiles", str(machine), "--profile", profile])


def run(arguments: list[str]) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


@pytest.mark.parametrize("profile", MACHINES)
def test_a_profile_fitted_to_two_runs_predicts_a_third_one(profile, inputs, tmp_path):
    machine, runs = tmp_path / "machine.yaml", tmp_path / "runs"
    machine.write_text(yaml.safe_dump({profile: MACHINES[profile]}))
    simulated_runs(inputs, machine, profile, runs)
    compare = [*inputs, "--profile", profile, "--compare", str(runs)]

    packaged = run(compare)["runs"]
    fitted = run([*compare, *(f"--fit-to={runs}/{name}" for name in ("recompute", "none-0.2gib"))])

    assert all(abs(row["makespan_ratio"] - 1) > 0.2 for row in packaged)
    assert {row["run"] for row in fitted["runs"]} == {"recompute", "none-0.2gib", "fixed-0.2gib"}
    assert {row["run"]: row["makespan_ratio"] for row in fitted["runs"]} == {
        row["run"]: pytest.approx(1, abs=0.05) for row in packaged
    }
    # What is printed is a file for --profiles.
    machine.write_text(yaml.safe_dump(fitted["fitted"]))
    again = run([*compare, "--profiles", str(machine)])["runs"]
    assert [row["makespan_ratio"] for row in again] == [row["makespan_ratio"] for row in fitted["runs"]]


def test_a_fit_needs_a_complete_run_and_does_not_go_with_the_paper(inputs, tmp_path):
    for arguments, message in (
        ([*inputs, "--profile", "cpu", "--compare", str(tmp_path), "--fit-to", str(tmp_path)], str(tmp_path)),
        (["simulate", "--paper", "table3", "--fit-to", str(tmp_path)], "--paper does not go with --fit-to"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, "Traceback" in result.output) == (2, False), result.output
        assert message in result.output
