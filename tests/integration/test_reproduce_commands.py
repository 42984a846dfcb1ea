"""The commands of deploy/reproduce's plans, read by vLLM's own argument parser; nothing is served."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paper_models import paper_model

from efficient_lmcache.connector.serve import with_connector
from efficient_lmcache.replay.run import server_options
from efficient_lmcache.replay.rundir import RunDirectory
from efficient_lmcache.replay.server import serve_command
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.sweep.expand import PlannedRun, Subject, expand, read_subject
from efficient_lmcache.sweep.plan import load_plan

pytestmark = pytest.mark.integration

PLANS = sorted((Path(__file__).parents[2] / "deploy" / "reproduce").glob("*.yaml"))
every_plan = pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
Parse = Callable[[PlannedRun, Subject], Namespace]


@pytest.fixture(scope="module")
def parse() -> Parse:
    """A run's command as `vllm serve` would read it; the parser exits for what it does not accept."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

    def parsed(run: PlannedRun, subject: Subject) -> Namespace:
        out = RunDirectory(run.options.out)
        options = server_options(run.options, subject.model, run.context_tokens, out, Path("metrics"))
        command = serve_command(options, 8000)
        args: Namespace = parser.parse_args(with_connector(command[command.index("serve") + 1 :]))
        args.model = args.model_tag  # as `vllm serve` does before it validates
        validate_parsed_serve_args(args)
        return args

    return parsed


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "agents.trace"
    synthesize(path, Workload(tasks=16, calls_per_task=2, vocab_size=151_936, max_prompt_tokens=40_000))
    return path


@every_plan
def test_vllm_accepts_every_command_of_the_plan_for_its_model(
    path: Path, parse: Parse, trace: Path, tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    plan = load_plan(path)
    assert plan.model is not None
    subject = read_subject(plan, trace, paper_model(tmp_path, plan.model.name))
    with subject.trace:
        runs = expand(plan, subject, tmp_path / "out")
    for run in runs:
        options, args = run.options, parse(run, subject)
        seen: dict[str, Any] = {
            "tensor_parallel_size": args.tensor_parallel_size,
            "block_size": args.block_size,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "enable_prefix_caching": args.enable_prefix_caching,
            "num_gpu_blocks_override": args.num_gpu_blocks_override,
        }
        assert seen == {
            "tensor_parallel_size": options.tensor_parallel,
            "block_size": options.block_tokens,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "enable_prefix_caching": options.prefix_caching,
            "num_gpu_blocks_override": options.gpu_kv_tokens and options.gpu_kv_tokens // options.block_tokens,
        }
        if options.gpu_memory_utilization is not None:
            assert args.gpu_memory_utilization == options.gpu_memory_utilization
    model = AsyncEngineArgs.from_cli_args(args).create_model_config()  # slow, and the same for all runs of a plan
    assert model.max_model_len == run.context_tokens
