"""`efficient-lmcache simulate`: its JSON, its run directories, its comparison with runs, and what users get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("numba", reason="needs the extra sizing")

from efficient_lmcache.cli import app
from efficient_lmcache.core.activated import routed_experts
from efficient_lmcache.replay.compare import CompareError, compare
from efficient_lmcache.replay.rundir import RunDirectory, read_record
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.paper import MODELS
from efficient_lmcache.simulate.profiles import load_profile

NAMES = {
    *("computed_prefill_tokens", "restored_tokens_per_rank", "stored_tokens_per_rank", "preemptions", "makespan_s"),
    *("queue_delay_mean_s", "wall_s"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(MODELS["moe"]))
    return file


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "agents.trace"
    synthesize(file, Workload(tasks=6, calls_per_task=8, max_prompt_tokens=9_000))
    return file


@pytest.fixture
def asked(trace: Path, model: Path) -> list[str]:
    given = {"trace": trace, "model": model, "gpu-kv-tokens": 20_000, "active-pool": 4, "chunk-tokens": 256}
    return ["simulate", "--tp", "8", *(part for name, value in given.items() for part in (f"--{name}", str(value)))]


def run(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments)


def rows(arguments: list[str]) -> list[dict[str, Any]]:
    result = run([*arguments, "--json"])
    assert result.exit_code == 0, result.output
    made: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return made


def test_every_admission_meets_every_tier_and_recompute_comes_once(asked):
    made = rows([*asked, "--host-gib", "0,0.2,1", "--admission", "none,fixed,conditioned"])
    assert [(row["admission"], row["host_gib"]) for row in made] == [
        ("recompute", 0.0),
        *((admission, gib) for gib in (0.2, 1.0) for admission in ("none", "fixed", "conditioned")),
    ]
    assert all(set(row) >= NAMES for row in made)
    assert made[0]["gamma_h"] is None
    assert made[1]["gamma_h"] == pytest.approx(5 * made[4]["gamma_h"])
    assert made[4]["computed_prefill_tokens"] <= made[0]["computed_prefill_tokens"]


def test_a_table_says_what_the_json_does(asked):
    result = run([*asked, "--host-gib", "0.2", "--engines", "2", "--route", "session", "--shared-tier"])
    assert result.exit_code == 0, result.output
    assert "makespan s" in result.stdout
    assert "none" in result.stdout


def test_a_store_behind_a_link_is_read_by_all_engines_and_a_narrow_link_is_waited_for(asked):
    crowd = [*asked, "--engines", "2", "--active-pool", "6", "--gpu-kv-tokens", "10000", "--host-gib", "0,1"]
    alone, *made = rows([*crowd, "--link-gb-s", "0,0.001,100"])
    assert [(row["admission"], row["host_gib"], row["link_gb_s"]) for row in (alone, *made)] == [
        ("recompute", 0.0, 0.0),
        *(("none", gib, link) for gib, link in ((1.0, 0.0), (0.0, 0.001), (1.0, 0.001), (0.0, 100.0), (1.0, 100.0))),
    ]
    local, narrow, _, wide, both = made
    assert alone["link_read_bytes"] == local["link_read_bytes"] == 0
    assert 0 < both["link_read_bytes"] < wide["link_read_bytes"]
    assert wide["computed_prefill_tokens"] < local["computed_prefill_tokens"] < alone["computed_prefill_tokens"]
    assert narrow["queue_delay_mean_s"] > wide["queue_delay_mean_s"] + 1


def test_a_configuration_leaves_the_run_directory_of_a_replay(asked, tmp_path):
    out = tmp_path / "runs"
    (row,) = rows([*asked, "--host-gib", "0.2", "--admission", "conditioned", "--out", str(out)])
    directory = RunDirectory(out / "conditioned-0.2gib")
    record = read_record(directory.path)
    assert record["computed_prefill_tokens"] == row["computed_prefill_tokens"]
    assert record["decisions"]["total"] == record["calls"] == record["outputs_exact"] > 20
    assert len(directory.calls.read_text().splitlines()) == record["calls"]
    again = run([*asked, "--host-gib", "0.2", "--admission", "conditioned", "--out", str(out)])
    assert again.exit_code == 2
    assert "exists and is not an empty directory" in again.output


def test_nobody_can_take_a_simulation_for_a_measurement(asked, tmp_path):
    """In `replay compare` and on the report's page, a tier or none."""
    out, page = tmp_path / "runs", tmp_path / "page.html"
    rows([*asked, "--host-gib", "0,0.2", "--out", str(out)])
    compared = run(["replay", "compare", str(out)])
    assert "recompute (simulated)" in compared.output
    assert "none (simulated)" in compared.output
    assert run(["report", str(out), "-o", str(page)]).exit_code == 0
    shown = page.read_text()
    assert "<strong>2</strong> of <strong>2</strong> runs are simulated: no engine ran" in shown
    assert "Recompute (simulated)" in shown
    assert "Offload (simulated)" in shown
    assert "Every output token" not in shown


@pytest.mark.parametrize("twice", [["--host-gib", "0.2,0.20"], ["--host-gib", "0.2", "--admission", "none,none"]])
def test_two_configurations_of_one_name_are_refused_before_anything_is_written(asked, twice, tmp_path):
    result = run([*asked, *twice, "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert "none-0.2gib: two configurations are called so; give each size and admission once" in result.output
    assert not (tmp_path / "runs").exists()


def test_engines_take_memory_for_the_calls_that_there_are(asked):
    (row,) = rows([*asked, "--engines", "1024", "--max-num-seqs", "65536", "--gpu-kv-tokens", "1000000"])
    assert row["preemptions"] == 0


def test_a_simulated_run_compared_with_itself_is_equal_in_everything(asked, model, trace, tmp_path):
    """A run that the simulator made stands in for a real one."""
    out = tmp_path / "runs"
    rows([*asked, "--host-gib", "0.2", "--admission", "fixed", "--out", str(out)])
    result = run(
        [
            *("simulate", "--trace", str(trace), "--model", str(model), "--json"),
            *("--compare", str(out / "fixed-0.2gib")),
        ]
    )
    assert result.exit_code == 0, result.output
    (made,) = json.loads(result.stdout)["runs"]
    assert made["computed_ratio"] == made["makespan_ratio"] == made["equal_cached"] == made["equal_host_match"] == 1.0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--host-gib", "1,much", "--host-gib has 'much'; give numbers >= 0 with commas between them"),
        ("--admission", "all", "--admission has 'all'; it must be one of none, fixed, conditioned"),
        ("--link-gb-s", "wide", "--link-gb-s has 'wide'; give numbers >= 0 with commas between them"),
        ("--profile", "abacus", "--profile 'abacus' is not known; known are CPU, H100, H20, H200, H800"),
        ("--route", "luck", "--route has 'luck'; it must be one of load, session, prefix"),
        ("--active-pool", "0", "--active-pool is 0; it must be at least 1"),
        ("--gpu-kv-tokens", "0", "--gpu-kv-tokens is 0; it must be at least 1"),
        ("--time-scale", "-1", "--time-scale is -1.0; it must be a finite number >= 0"),
        ("--activity-window-s", "0", "--activity-window-s is 0.0; it must be a finite number > 0"),
        ("--activity-window-s", "inf", "--activity-window-s is inf; it must be a finite number > 0"),
        ("--chunk-tokens", "1001", "--chunk-tokens is 1001; it must be a multiple of --gpu-block-tokens, 16"),
        ("--link-gb-s", "1e-320", "a link carries at least 1e-09, and 0 is none"),
        ("--gpu-kv-tokens", "600", "do not fit into the GPU's"),
        ("--gpu-kv-tokens", "1000000000000000", "Unable to allocate"),
        ("--trace", "absent.trace", "absent.trace: no such file"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(asked, option, value, message):
    result = run([*asked, "--host-gib", "1", option, value])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--admission", "fixed"], "--admission fixed needs a host tier to admit to; give --host-gib"),
        (["--seed", "1"], "--seed is of the workload of --paper; a recording has none"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(asked, given, message):
    result = run([*asked, *given])
    assert (result.exit_code, result.output) == (2, f"error: {message}\n")


@pytest.mark.parametrize("option", ["--shared-tier", "--admission=none,fixed"])
def test_what_is_not_modelled_behind_a_link_is_refused(asked, option):
    result = run([*asked, "--host-gib", "1", "--link-gb-s", "5", option])
    assert result.exit_code == 2
    assert result.output.startswith("error: --link-gb-s goes with engines' own tiers and --admission none")


def test_options_that_would_mean_nothing_beside_a_run_or_the_paper_are_refused(tmp_path):
    given = ["simulate", "--compare", str(tmp_path), "--trace", "t", "--tp", "8", "--link-gb-s", "5"]
    result = run([*given, "--out", str(tmp_path)])
    assert (result.exit_code, result.output) == (
        2,
        "error: --compare does not go with --tp, --link-gb-s, --out: the run says what is simulated\n",
    )
    result = run(["simulate", "--paper", "table3", "--profile", "h100"])
    assert (result.exit_code, result.output) == (
        2,
        "error: --paper does not go with --profile: the paper says what is simulated\n",
    )
    assert "--paper is 'table99'; it must be one of table3" in run(["simulate", "--paper", "table99"]).output


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--link-gb-s", "5", "--engines", "1"], "none-1gib-5gbs: has a store behind a link"),
        (["--engines", "2"], "none-1gib: has 2 engines"),
    ],
)
def test_what_compare_does_not_model_is_refused(asked, model, trace, tmp_path, given, what):
    rows([*asked, "--host-gib", "1", *given, "--out", str(tmp_path / "runs")])
    (made,) = (tmp_path / "runs").iterdir()
    result = run(["simulate", "--trace", str(trace), "--model", str(model), "--compare", str(made)])
    assert result.exit_code == 2
    assert f"{what}; what is simulated again are complete runs of one engine in in-process mode" in result.output


def test_of_a_directory_of_runs_the_complete_ones_are_compared(asked, model, trace, tmp_path):
    rows([*asked, "--host-gib", "0,1", "--out", str(tmp_path / "runs")])
    file = tmp_path / "runs" / "recompute" / "run.json"
    file.write_text(file.read_text().replace('"status": "complete"', '"status": "interrupted"'))
    compare = ["simulate", "--trace", str(trace), "--model", str(model), "--json", "--compare"]
    made = json.loads(run([*compare, str(tmp_path / "runs")]).stdout)["runs"]
    assert [each["run"] for each in made] == ["none-1gib"]
    assert "is interrupted, not complete" in run([*compare, str(file.parent)]).output


def test_a_garbled_row_of_a_compared_run_is_named(asked, model, trace, tmp_path):
    rows([*asked, "--host-gib", "1", "--out", str(tmp_path / "runs")])
    calls = tmp_path / "runs" / "none-1gib" / "calls.jsonl"
    calls.write_text(calls.read_text().replace('"task": "', '"task": "other-', 1))
    compare = ["simulate", "--trace", str(trace), "--model", str(model), "--compare", str(calls.parent)]
    assert "has a call 0 of task 'other-" in run(compare).output
    calls.write_text('{"task": 7}\n')
    assert "calls.jsonl: line 1: lacks call, dispatched_s, finished_s, cached_tokens" in run(compare).output


def test_simulated_runs_are_told_apart_by_link_and_by_trace(asked, tmp_path):
    rows([*asked, "--host-gib", "1", "--link-gb-s", "1,5", "--out", str(tmp_path / "runs")])
    made = compare(sorted((tmp_path / "runs").iterdir()))
    # Neither is the other's base: each is its own.
    assert [row["makespan_s_to_offload"] for row in made] == [1.0, 1.0]
    other = tmp_path / "other.trace"
    synthesize(other, Workload(tasks=2, calls_per_task=3, max_prompt_tokens=9_000))
    again = [str(other) if part.endswith(".trace") else part for part in asked]
    rows([*again, "--host-gib", "1", "--out", str(tmp_path / "others")])
    with pytest.raises(CompareError, match="only runs of one trace compare"):
        compare([*(tmp_path / "runs").iterdir(), *(tmp_path / "others").iterdir()])


def test_a_run_is_compared_on_its_own_trace_only(asked, model, trace, tmp_path):
    out = tmp_path / "runs"
    rows([*asked, "--out", str(out)])
    other = tmp_path / "other.trace"
    synthesize(other, Workload(tasks=2, calls_per_task=3, max_prompt_tokens=9_000))
    result = run(["simulate", "--trace", str(other), "--model", str(model), "--compare", str(out / "recompute")])
    assert result.exit_code == 2
    assert "recompute: is a run of 29 calls with" in result.output
    assert "give the run's own trace" in result.output
    assert len(result.output.splitlines()) == 1


def test_without_a_trace_or_a_model_or_a_pool_the_option_is_named(trace, model):
    for given, missing in (
        (["--model", str(model)], "--trace is missing"),
        (["--trace", str(trace)], "--model is missing"),
        (["--trace", str(trace), "--model", str(model)], "--active-pool is missing"),
        (["--trace", str(trace), "--model", str(model), "--active-pool", "4"], "--gpu-kv-tokens is missing"),
    ):
        result = run(["simulate", *given])
        assert result.exit_code == 2
        assert missing in result.output


def test_a_profile_of_ones_own_is_read_and_its_fields_are_checked(asked, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("Abacus: {measured: {step_s: 1.0}}\n")
    (row,) = rows([*asked, "--profiles", str(mine), "--profile", "abacus"])
    assert row["makespan_s"] > row["calls"]
    mine.write_text("Abacus: {measured: {steps: 1.0}}\n")
    result = run([*asked, "--profiles", str(mine), "--profile", "abacus"])
    assert result.exit_code == 2
    assert "Abacus.measured must have fields of step_s" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "M*M*"}, "layers of several kinds (hybrid_override_pattern) cannot be counted"),
        ({"layer_types": ["mamba"] * 48}, "nothing that a tier could hold"),
        ({"num_attention_heads": 0}, "attention heads is 0"),
        ({"layer_types": 3}, "of another kind than expected"),
    ],
)
def test_a_model_that_cannot_be_simulated_is_named(change, message, trace, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**MODELS["moe"], **change}))
    given = ["--trace", str(trace), "--model", str(file), "--active-pool", "4", "--gpu-kv-tokens", "20000"]
    result = run(["simulate", *given])
    assert result.exit_code == 2
    assert message in result.output
    assert str(file) in result.output


def test_layers_that_attend_to_a_window_keep_kv_and_cost_little_attention():
    windows = {**MODELS["moe"], "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12}
    full, mixed = ModelShape.of(MODELS["moe"]), ModelShape.of(windows)
    assert mixed.footprint == full.footprint
    assert mixed.pair_flop * 4 == full.pair_flop


def test_a_mixture_of_experts_has_30_billion_weights_of_which_a_step_of_one_token_reads_3():
    experts = routed_experts(MODELS["moe"])
    assert experts.parameters == pytest.approx(29e9, rel=0.01)
    assert experts.share == 8 / 128
    step = costs(load_profile("h20"), ModelShape.of(MODELS["moe"]), 8).step
    dense = costs(load_profile("h20"), ModelShape.of(MODELS["dense"]), 8).step
    assert step.experts_s > step.dense_s > 0
    assert dense.experts_s == 0
    assert dense.token_s / step.token_s == pytest.approx(32.8 / 3.3, rel=0.05)
    assert step.restored_token_s == pytest.approx(0.86e-6, rel=0.01)
