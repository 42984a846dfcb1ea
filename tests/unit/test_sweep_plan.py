"""A sweep's plan: what it may say, and which runs it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sweep_files import model_directory

from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.sweep.expand import PlannedRun, expand, read_subject
from efficient_lmcache.sweep.plan import PlanError, load_plan

REPRODUCE = Path(__file__).parents[2] / "deploy" / "reproduce"
RUNS = [{"admission": "none", "active_pool": 2, "host_gib": 1}]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "agents.trace"
    synthesize(path, Workload(tasks=4, calls_per_task=3, vocab_size=64, system_tokens=32, max_prompt_tokens=2_000))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"))


def write(directory: Path, **content: Any) -> Path:
    path = directory / "plan.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", **content}))
    return path


def runs_of(directory: Path, trace: Path, model: Path, **content: Any) -> list[PlannedRun]:
    plan = load_plan(write(directory, **content))
    subject = read_subject(plan, trace, model)
    with subject.trace:
        return expand(plan, subject, directory / "out")


def test_lists_multiply_and_every_run_has_its_own_name(tmp_path: Path, trace: Path, model: Path) -> None:
    runs = runs_of(
        tmp_path,
        trace,
        model,
        server={"chunk_tokens": 128},
        runs=[
            {"admission": "recompute", "active_pool": [4, 2], "repeats": 2},
            {"admission": ["none", "fixed"], "active_pool": 4, "host_gib": [0.5, 1]},
            {"admission": "conditioned", "active_pool": 4, "host_gib": 0.5, "write_threshold_chunks": [4, 8]},
            {"admission": "none", "active_pool": 4, "host_gib": [0.5, 0.50000001], "connector": "lmcache"},
        ],
    )
    assert [run.name for run in runs] == [
        "a4-recompute",
        "a4-recompute-r2",
        "a2-recompute",
        "a2-recompute-r2",
        "a4-none-0.5gib",
        "a4-none-1gib",
        "a4-fixed-0.5gib",
        "a4-fixed-1gib",
        "a4-conditioned-0.5gib-k4",
        "a4-conditioned-0.5gib-k8",
        "a4-none-0.5gib-lmcache",
        "a4-none-0.50000001gib-lmcache",
    ]
    assert {run.options.chunk_tokens for run in runs} == {128}
    assert runs[1].repeat == 2
    assert runs[8].options.write_threshold_chunks == 4


def test_pressure_ratios_become_sizes_of_this_trace(tmp_path: Path, trace: Path, model: Path) -> None:
    matrix = {"admission": "none", "active_pool": [4, 2], "gamma_h": [2.0, 0.5]}
    plan = load_plan(write(tmp_path, server={"gamma_g": 0.5, "chunk_tokens": 128}, runs=[matrix]))
    subject = read_subject(plan, trace, model)
    with subject.trace:
        runs = {run.name: run.options for run in expand(plan, subject, tmp_path / "out")}
        mean = subject.mean_prompt_tokens
        beta = subject.model.bytes_per_token
    assert runs["a4-none-g2"].host_gib == pytest.approx(3 * mean * beta / 2 / 2**30)
    assert runs["a2-none-g0.5"].host_gib == pytest.approx(mean * beta / 0.5 / 2**30)
    assert {options.gpu_kv_tokens for options in runs.values()} == {int(4 * mean / 0.5)}


def test_engines_that_share_a_tier_have_all_of_it_and_others_their_part(
    tmp_path: Path, trace: Path, model: Path
) -> None:
    server = {"engines": 2, "route": "session", "gamma_g": 0.5, "chunk_tokens": 128}
    matrix = {"admission": "none", "active_pool": 4, "gamma_h": 2.0, "mode": ["in_process", "server"]}
    lazy = {**matrix, "mode": "server", "lazy_offload": True}
    runs = {run.name: run.options for run in runs_of(tmp_path, trace, model, server=server, runs=[matrix, lazy])}
    own, shared = runs["a4-none-g2-in_process"], runs["a4-none-g2-server"]
    assert shared.host_gib == pytest.approx(2 * own.host_gib)
    assert own.host_memory_gib == pytest.approx(2 * own.host_gib)
    assert (own.engines, own.route) == (2, "session")
    assert runs["a4-none-g2-server-lazy"].lazy_offload
    alone = runs_of(
        tmp_path, trace, model, server={"gamma_g": 0.5, "chunk_tokens": 128}, runs=[{**matrix, "mode": "server"}]
    )
    assert own.gpu_kv_tokens is not None
    assert alone[0].options.gpu_kv_tokens in (2 * own.gpu_kv_tokens, 2 * own.gpu_kv_tokens + 1)


def test_the_plans_with_an_lmcache_server_can_be_read() -> None:
    alone, three = (load_plan(REPRODUCE / f"{name}.yaml").server for name in ("server-mode", "three-engines"))
    assert (alone.mode, alone.engines, three.mode, three.engines) == ("server", 1, "server", 3)


def test_the_condensers_plan_is_one_machine_whatever_the_trace() -> None:
    plan = load_plan(REPRODUCE / "condensers.yaml")
    assert (plan.server.gpu_kv_tokens or 0) % plan.server.block_tokens == 0
    assert plan.server.gamma_g is None
    assert all(matrix.gamma_h is None for matrix in plan.runs)
    assert [name for matrix in plan.runs for name in matrix.admission] == ["none", "conditioned", "recompute"]


def test_paths_of_a_plan_are_relative_to_it(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path, trace="agents.trace", model="../model", runs=RUNS))
    assert (plan.trace, plan.model) == (tmp_path / "agents.trace", tmp_path / "../model")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"runs": []}, "runs is .*at least 1"),
        ({"runs": None}, "runs is None: input should be a valid list"),
        ({"runs": [{**RUNS[0], "active_pool": True}]}, r"runs\[0\]\.active_pool\[0\] is True: .*valid integer"),
        ({"speed": 1}, "speed is not a key of a plan; allowed there: name, trace"),
        ({"server": {"chunks": 1}}, r"server\.chunks is not a key of a plan; allowed there: gpu_kv_tokens, gamma_g"),
        ({"server": {"chunk_tokens": "many"}}, r"server\.chunk_tokens is 'many': input should be a valid integer"),
        ({"server": {"gpu_kv_tokens": 1, "gamma_g": 1}}, "server: give gpu_kv_tokens or gamma_g, not both"),
        ({"predict": {"output_s_per_token": [2, 1]}}, "the first must not exceed the second"),
        ({"runs": [{"admission": "some", "active_pool": 1}]}, r"runs\[0\]\.admission\[0\] is 'some': input should be"),
        ({"runs": [{"active_pool": 1}]}, r"runs\[0\]\.admission is missing"),
        ({"runs": [{"admission": "none", "active_pool": 1}]}, "host_gib or gamma_h is required for every admission"),
        ({"runs": [{**RUNS[0], "gamma_h": 1}]}, "give host_gib or gamma_h, not both"),
        ({"runs": [{**RUNS[0], "admission": ["recompute", "none"]}]}, "recompute has no host tier"),
        ({"runs": [{**RUNS[0], "kappa": 1}]}, r"runs\[0\]\.kappa is not a key of a plan; allowed there: admission,"),
    ],
)
def test_what_a_plan_may_not_say_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        load_plan(write(tmp_path, **{"runs": RUNS, **changed}))
    assert str(raised.value).startswith(str(tmp_path / "plan.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "a plan is a mapping"),
        ("a: [", "not YAML"),
        ("[" * 5000, "not a plan: nested too deep"),
        ("name: &a [*a]", "not a plan: nested too deep"),
        ("name: a\nruns: []\nruns: []", "runs is given 2 times"),
        (None, "No such"),
    ],
)
def test_a_file_that_is_no_plan_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_plan(path)


def test_a_run_planned_twice_and_an_impossible_one_are_refused(tmp_path: Path, trace: Path, model: Path) -> None:
    with pytest.raises(PlanError, match=r"runs\[1\]: a2-none-1gib is planned already; use repeats"):
        runs_of(tmp_path, trace, model, runs=RUNS * 2)
    alone = {"admission": "none", "active_pool": 1, "gamma_h": 2}
    with pytest.raises(PlanError, match=r"runs\[0\], a1-none-g2: gamma_h sizes no tier for a single agent"):
        runs_of(tmp_path, trace, model, runs=[alone])
    impossible = {**RUNS[0], "admission": "fixed", "connector": "lmcache"}
    with pytest.raises(PlanError, match=r"runs\[0\], a2-fixed-lmcache-1gib.*no write admission|no write admission"):
        runs_of(tmp_path, trace, model, runs=[impossible])


def test_a_plan_without_a_trace_says_how_to_name_one(tmp_path: Path, model: Path) -> None:
    with pytest.raises(PlanError, match="the plan names no trace; pass --trace"):
        read_subject(load_plan(write(tmp_path, runs=RUNS)), None, model)
