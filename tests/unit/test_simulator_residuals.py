"""How far the simulator is off, pinned: a change that moves a residual changes docs/simulator.md, too.

Runs of the demonstration (real vLLM and LMCache, two cores; scripts/write_demo_runs.py) and rows of the paper's tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="needs the extra sizing")

from efficient_lmcache.replay.demo import DemoOptions
from efficient_lmcache.replay.synthesize import synthesize
from efficient_lmcache.replay.trace import TraceReader
from efficient_lmcache.simulate.against_run import compare_run
from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.deployment import simulate
from efficient_lmcache.simulate.paper import FITTED_SEED, MODELS, h20_deployment, published_row, table_rows, workload_of
from efficient_lmcache.simulate.profiles import load_profile
from efficient_lmcache.sizing.workload import Workload, open_workload

RUNS: dict[str, Any] = json.loads((Path(__file__).parent / "golden/demo-runs.json").read_text())
#: The demonstration's model (`replay.model`): 1 KiB of KV per token.
MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("demo") / "trace"
    synthesize(file, DemoOptions().workload)
    with TraceReader(file) as reader:
        assert {run["record"]["trace"]["sha256"] for run in RUNS.values()} == {reader.sha256}
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(MODEL))
    return file


@pytest.fixture(scope="module")
def workload(trace: Path) -> Workload:
    return open_workload(trace, DemoOptions().chunk_tokens, gpu_block_tokens=128)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run's directory, as far as it was kept."""
    kept = RUNS[request.param]
    path = tmp_path / request.param
    path.mkdir()
    paths = {"trace": "agents.trace", "model": "model"}
    record = {**kept["record"], "options": {**kept["record"]["options"], **paths}}
    (path / "run.json").write_text(json.dumps(record))
    calls = [
        {"task": task, "call": call, "dispatched_s": sent_s, "cached_tokens": cached}
        for task, call, sent_s, cached in kept["calls"]
    ]
    decisions = [{"task": task, "host_match_tokens": matched} for task, matched in kept["decisions"]]
    for name, rows in (("calls.jsonl", calls), ("decisions.jsonl", decisions)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("run", "in_order", "closed_loop", "equal_cached"),
    [
        ("recompute", 1.017, 1.042, 0.929),
        ("small-fixed", 1.012, 1.124, 0.953),
        ("small-conditioned", 1.016, 1.347, 0.780),
        ("large-none", 1.000, 1.001, 1.000),
        ("large-fixed", 1.002, 1.204, 0.961),
    ],
    indirect=["run"],
)
def test_a_real_run_is_as_far_off_as_documented(run, in_order, closed_loop, equal_cached, workload, model):
    made = costs(load_profile("cpu"), ModelShape.of(MODELS["moe"]), 1)
    compared = compare_run(run, workload, model, made).to_json()
    found = {name: round(compared[name], 3) for name in ("computed_ratio_in_order", "computed_ratio", "equal_cached")}
    assert found == {
        "computed_ratio_in_order": pytest.approx(in_order, abs=0.01),
        "computed_ratio": pytest.approx(closed_loop, abs=0.01),
        "equal_cached": pytest.approx(equal_cached, abs=0.01),
    }


@pytest.mark.parametrize(("row", "computed", "makespan"), [(4, 1.00, 0.99), (12, 1.29, 0.98)])
def test_a_row_of_table_3_is_as_far_off_as_documented(row, computed, makespan):
    pool, configuration = table_rows("table3")[row]
    made, paper = simulate(workload_of(FITTED_SEED), h20_deployment(pool), configuration), published_row("table3", row)
    assert made.computed_prefill_tokens / paper["computed_prefill_tokens"] == pytest.approx(computed, abs=0.02)
    assert made.makespan_s / paper["makespan_s"] == pytest.approx(makespan, abs=0.02)
