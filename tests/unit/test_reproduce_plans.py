"""The plans of the paper's deployments against the schema and against its tables; miniatures lie beside them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paper_models import paper_model

from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.sweep.expand import PlannedRun, expand, read_subject
from efficient_lmcache.sweep.plan import Plan, load_plan

DIRECTORY = Path(__file__).parents[2] / "deploy" / "reproduce"
PLANS = sorted(DIRECTORY.glob("[28]x*.yaml"))
every_plan = pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
Planned = Callable[[str], list[PlannedRun]]


def plan_of(name: str) -> Plan:
    return load_plan(DIRECTORY / f"{name}.yaml")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """Expands a plan on a tiny trace of the plan's pool and on its model's configuration."""
    directory = tmp_path_factory.mktemp("reproduce")
    trace = directory / "agents.trace"
    synthesize(trace, Workload(tasks=16, calls_per_task=2, vocab_size=151_936, max_prompt_tokens=4_000))

    def runs(name: str) -> list[PlannedRun]:
        plan = plan_of(name)
        assert plan.model is not None
        subject = read_subject(plan, trace, paper_model(directory, plan.model.name))
        with subject.trace:
            return expand(plan, subject, directory / "out")

    return runs


@pytest.fixture(scope="module")
def paper(data_dir: Path) -> Any:
    return json.loads((data_dir / "paper" / "efficientagent.json").read_text())


@every_plan
def test_a_plan_says_what_it_needs_and_is_named_like_its_file(path: Path) -> None:
    plan = load_plan(path)
    assert plan.name == path.stem
    requires = plan.requires
    count, _, gpu = plan.name.partition("x")
    assert requires.gpus == plan.server.tensor_parallel == int(count)
    assert requires.gpu is not None
    assert gpu.startswith(requires.gpu.lower().replace(" ", ""))
    assert requires.host_memory_gib is not None
    assert requires.link is not None


@every_plan
def test_the_memory_asked_for_holds_the_largest_host_tier_at_the_papers_mean_prompt(path: Path) -> None:
    plan = load_plan(path)
    requires = plan.requires
    kib_per_token = {("Qwen3", 8): 24, ("Qwen3", 2): 48, ("Qwen2.5", 8): 32, ("Qwen2.5", 2): 128}  # Table 6
    assert plan.model is not None
    footprint = kib_per_token[plan.model.name.split("-")[0], plan.server.tensor_parallel]
    working_set_gib = 15 * 33_234 * footprint / (1 << 20)
    tiers = [0.0]
    for matrix in plan.runs:
        tiers += [*(matrix.host_gib or ()), *(working_set_gib / gamma for gamma in matrix.gamma_h or ())]
    assert requires.host_memory_gib is not None
    assert 0 < requires.host_memory_gib - max(tiers) * plan.server.tensor_parallel < 80


@every_plan
def test_a_plan_expands_to_runs(path: Path, planned: Planned) -> None:
    assert planned(path.stem)


def test_the_h20_plan_is_the_papers_17_runs(planned: Planned, paper: Any) -> None:
    admissions = {"Recompute": "recompute", "Offload": "none", "Fixed": "fixed", "Conditioned": "conditioned"}
    rows = []
    for row in paper["table3_h20_replay"]:
        admission = admissions[row["configuration"].split()[0].rstrip(",")]
        unmodified = admission == "none" and "admission runtime" not in row["configuration"]
        rows.append((row["active_pool"], admission, row["host_gib_per_rank"], unmodified))
    runs = [
        (run.options.active_pool, run.options.admission, run.options.host_gib, run.options.connector == "lmcache")
        for run in planned("8xh20-moe")
    ]
    assert len(runs) == 17
    assert Counter(runs) == Counter(rows)


def test_the_h20_server_is_the_papers(planned: Planned, paper: Any) -> None:
    table = paper["table2_serving"]
    for run in planned("8xh20-moe"):
        options = run.options
        assert {
            "max_model_len": options.max_model_len_tokens,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "gpu_prefix_caching": options.prefix_caching,
            "chunk_tokens": options.chunk_tokens,
            "gpu_kv_tokens": options.gpu_kv_tokens,
            "tp": options.tensor_parallel,
        }.items() <= table.items()
        # Left to the connector, whose defaults are Table 7's.
        assert (options.write_threshold_chunks, options.occupancy_threshold) == (None, None)


def test_the_papers_gpu_caches_are_whole_blocks() -> None:
    for path in PLANS:
        server = load_plan(path).server
        assert (server.gpu_kv_tokens or 0) % server.block_tokens == 0


def test_every_deployment_of_table_8_is_a_pair(planned: Planned, paper: Any) -> None:
    names = {"2xH800 full benchmark": "2xh800-moe-full"} | {
        (row["hw"], row["model"]): f"{row['hw'].lower()}-{row['model']}" for row in paper["table8_deployments"]
    }
    names["2xH800", "moe"] = "2xh800-moe-subset"
    names.pop(("2xH800 full benchmark", "moe"))
    for name in names.values():
        assert {"recompute", "none"} <= {run.options.admission for run in planned(name)}


def test_the_memory_fractions_are_table_11s(planned: Planned, paper: Any) -> None:
    runs = planned("8xrtx3090-moe-memory-fraction")
    fractions = [row["fraction"] for row in paper["table11_rtx3090_gpu_fraction"]]
    assert [run.options.gpu_memory_utilization for run in runs] == fractions
    assert {run.options.gpu_kv_tokens for run in runs} == {None}


@pytest.mark.parametrize("name", ["8xrtx3090-moe-prefix-caching", "2xh800-moe-prefix-caching"])
def test_table_9_compares_prefix_caching(planned: Planned, name: str) -> None:
    assert [run.options.prefix_caching for run in planned(name)] == [True, False]
