"""`efficient-lmcache …`: parses, calls, prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from efficient_lmcache import __version__
from efficient_lmcache.replay.cli_common import INTERRUPTED_STATUS, USER_ERROR_STATUS, failure, user_errors
from efficient_lmcache.replay.cli_condense import condense
from efficient_lmcache.replay.cli_replay import app as replay_app
from efficient_lmcache.replay.cli_trace import app as trace_app
from efficient_lmcache.replay.recorder.cli_record import record
from efficient_lmcache.report.cli_report import report
from efficient_lmcache.simulate.cli_simulate import simulate
from efficient_lmcache.sizing.cli_lint import lint
from efficient_lmcache.sizing.cli_plan import plan
from efficient_lmcache.sizing.cli_profile import profile
from efficient_lmcache.sweep.cli_sweep import sweep
from efficient_lmcache.telemetry.cli_telemetry import telemetry_app

app = typer.Typer(
    name="efficient-lmcache",
    help="KV cache offloading for pools of coding agents on vLLM + LMCache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_app = typer.Typer(help="Small random models for tests and demonstrations.", no_args_is_help=True)
trace_app.command()(condense)
trace_app.command()(profile)
trace_app.command()(lint)
replay_app.command()(sweep)
app.add_typer(trace_app, name="trace")
app.add_typer(replay_app, name="replay")
app.add_typer(model_app, name="model")
app.add_typer(telemetry_app, name="telemetry")
app.command()(plan)
app.command()(record)
app.command()(report)
app.command()(simulate)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def serve(context: typer.Context) -> None:
    """`vllm serve` with our connector set; every argument goes to vLLM.

    `--kv-transfer-config` replaces the connector's default configuration; `null` serves without a connector.
    """
    from efficient_lmcache.connector import serve as vllm_serve
    from efficient_lmcache.connector.options import OptionError

    _require("vllm", "cpu")
    try:
        vllm_serve.main(context.args)
    except OptionError as error:
        raise failure(error, USER_ERROR_STATUS) from None


@model_app.command("create")
def model_create(
    directory: Annotated[Path, typer.Argument(help="Where the model goes; must be new, empty, or one of ours.")],
    vocab: Annotated[int, typer.Option(min=16, help="Vocabulary size; more makes every decode step slower.")] = 16384,
    max_model_len: Annotated[int, typer.Option(min=16, help="Longest prompt and output that it takes.")] = 65536,
) -> None:
    """Write a random Qwen3 of 4 layers: 1 KiB of KV per token, no download."""
    from efficient_lmcache.replay.model import create_model

    _require("transformers", "cpu")
    with user_errors():
        create_model(directory, vocab_size=vocab, max_model_len=max_model_len)
    typer.echo(f"{directory}: random Qwen3, vocabulary {vocab}, context {max_model_len}, 1 KiB of KV per token")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Run directories and comparison.")] = Path("runs/demo"),
) -> None:
    """Replay agents on real vLLM + LMCache under every admission, below and above the working set."""
    from efficient_lmcache.replay.demo import run_demo

    _require("vllm", "cpu")
    try:
        with user_errors():
            run_demo(out)
    except KeyboardInterrupt:
        raise failure("interrupted; finished and partial runs are kept", INTERRUPTED_STATUS) from None


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        message = f"{module} is not installed; pip install 'efficient-lmcache[{extra}]' (or [gpu])"
        raise failure(message, USER_ERROR_STATUS)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
