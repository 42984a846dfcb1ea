"""The dry runs of deploy/reproduce's plans: vLLM's own argument parser reads every command. Nothing is served."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
from paper_models import paper_model
from serve_arguments import Parse, serve_parser

from efficient_lmcache.connector.serve import with_connector
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.sweep.cli_sweep import dry_run_lines
from efficient_lmcache.sweep.expand import PlannedRun
from efficient_lmcache.sweep.plan import load_plan
from efficient_lmcache.sweep.sweep import SweepOptions, prepare

pytestmark = pytest.mark.integration

PLANS = sorted((Path(__file__).parents[2] / "deploy" / "reproduce").glob("[28]x*.yaml"))
every_plan = pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def parse() -> Parse:
    return serve_parser()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "agents.trace"
    synthesize(path, Workload(tasks=16, calls_per_task=2, vocab_size=151_936, max_prompt_tokens=40_000))
    return path


def server_arguments(lines: list[str]) -> list[list[str]]:
    """Of each `efficient-lmcache serve` of a dry run, what it hands to vLLM."""
    commands = [shlex.split(line.lstrip("# ")) for line in lines if " serve " in line]
    return [with_connector(command[command.index("serve") + 1 :]) for command in commands]


def asked_for(run: PlannedRun) -> dict[str, object]:
    options = run.options
    return {
        "model": str(options.model),
        "max_model_len": run.context_tokens,
        "tensor_parallel_size": options.tensor_parallel,
        "block_size": options.block_tokens,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": options.prefix_caching,
        "num_gpu_blocks_override": options.gpu_kv_tokens and options.gpu_kv_tokens // options.block_tokens,
        **({"gpu_memory_utilization": options.gpu_memory_utilization} if options.gpu_memory_utilization else {}),
    }


@every_plan
def test_vllm_accepts_every_command_of_the_dry_run(path: Path, parse: Parse, trace: Path, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = load_plan(path).model
    assert model is not None
    options = SweepOptions(path, tmp_path / "out", trace=trace, model=paper_model(tmp_path, model.name))
    with ExitStack() as closing:
        prepared = prepare(options, closing)
        commands = server_arguments(list(dry_run_lines(prepared, options.out)))
    assert len(commands) == len(prepared.runs)
    for run, command in zip(prepared.runs, commands, strict=True):
        args = parse(command)
        assert asked_for(run).items() <= vars(args).items()
        assert (args.kv_transfer_config is None) == (run.options.admission == "recompute")
    # Whether the model takes the context is vLLM's to say. Slow, and the same for all runs of a plan.
    assert AsyncEngineArgs.from_cli_args(args).create_model_config().max_model_len == run.context_tokens
    assert not options.out.exists()
