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
from efficient_lmcache.simulate.costs import ModelShape
from efficient_lmcache.simulate.paper import row_ratios, workload_of
from efficient_lmcache.simulate.paper_order import FITTED_SEED
from efficient_lmcache.simulate.profiles import load_profile
from efficient_lmcache.simulate.recorded_run import recorded_runs
from efficient_lmcache.sizing.workload import Workload, open_workload

RUNS: dict[str, Any] = json.loads((Path(__file__).parent / "golden/demo-runs.json").read_text())
#: The demonstration's model (`replay.model`): 1 KiB of KV per token.
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 16384,
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
        {"task": task, "call": call, "dispatched_s": sent_s, "finished_s": finished_s, "cached_tokens": cached}
        for task, call, sent_s, finished_s, cached in kept["calls"]
    ]
    decisions = [
        {"task": task, "host_match_tokens": matched, "now_s": now_s} for task, matched, now_s in kept["decisions"]
    ]
    for name, rows in (("calls.jsonl", calls), ("decisions.jsonl", decisions)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("run", "in_order", "closed_loop", "makespan", "equal_cached", "equal_host_match"),
    [
        ("recompute", 1.003, 0.935, 0.998, 0.984, None),
        ("small-none", 0.987, 1.042, 1.025, 0.953, 0.996),
        ("small-fixed", 0.978, 1.088, 1.021, 0.969, 0.996),
        ("small-conditioned", 1.004, 1.000, 0.999, 0.976, 0.984),
        ("large-none", 1.000, 1.000, 0.937, 1.000, 1.000),
        ("large-fixed", 0.990, 1.095, 1.023, 0.969, 1.000),
        ("large-conditioned", 1.000, 1.001, 0.968, 1.000, 1.000),
    ],
    indirect=["run"],
)
def test_a_real_run_is_as_far_off_as_documented(
    run, in_order, closed_loop, makespan, equal_cached, equal_host_match, workload
):
    (recorded,) = recorded_runs(run)
    compared = compare_run(recorded, workload, load_profile("cpu"), ModelShape.of(MODEL)).to_json()
    documented = {
        "computed_ratio_in_order": in_order,
        "computed_ratio": closed_loop,
        "makespan_ratio": makespan,
        "equal_cached": equal_cached,
        "equal_host_match": equal_host_match,
    }
    assert {name: compared[name] for name in documented} == {
        name: None if value is None else pytest.approx(value, abs=0.01) for name, value in documented.items()
    }


@pytest.mark.parametrize(
    ("row", "computed", "makespan"), [(4, 0.97, 0.99), (9, 0.95, 0.95), (12, 1.02, 0.93), (14, 0.68, 1.03)]
)
def test_a_row_of_table_3_is_as_far_off_as_documented(row, computed, makespan):
    simulated_computed, simulated_makespan = row_ratios(workload_of(FITTED_SEED), row)
    assert simulated_computed == pytest.approx(computed, abs=0.02)
    assert simulated_makespan == pytest.approx(makespan, abs=0.02)
