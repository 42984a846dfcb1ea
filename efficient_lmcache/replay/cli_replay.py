"""`efficient-lmcache replay …`: replay a trace against a fresh server, compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from efficient_lmcache.replay.cli_common import (
    INTERRUPTED_STATUS,
    RUN_FAILED_STATUS,
    USER_ERROR_STATUS,
    failure,
    user_errors,
)
from efficient_lmcache.replay.compare import compare, render
from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.options import DEFAULT_BLOCK_TOKENS, RunOptions
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.rundir import RunDirectoryError
from efficient_lmcache.replay.trace import TraceError

app = typer.Typer(no_args_is_help=True, help="Replay recorded agents token for token, and compare policies.")


@app.command("run")
def run_command(
    trace: Annotated[Path, typer.Option(help="Trace made by `efficient-lmcache trace …`.")],
    model: Annotated[Path, typer.Option(help="Model directory.")],
    admission: Annotated[str, typer.Option(help="recompute | none | fixed | conditioned")],
    active_pool: Annotated[int, typer.Option(help="Agents that run at the same time (A).")],
    out: Annotated[Path, typer.Option(help="New directory for the run's records.")],
    host_gib: Annotated[
        float,
        typer.Option(help="Host tier per rank, in GiB, before it evicts; required unless `recompute`."),
    ] = 0.0,
    time_scale: Annotated[float, typer.Option(help="Multiplies the recorded intervals between calls.")] = 1.0,
    gpu_kv_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that the GPU's KV cache holds; vLLM decides if absent."),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per LMCache chunk, a multiple of --block-tokens.")] = 256,
    block_tokens: Annotated[int, typer.Option(help="Tokens per block of the GPU's KV cache.")] = DEFAULT_BLOCK_TOKENS,
    connector: Annotated[str, typer.Option(help="efficient | lmcache (LMCache's own, unmodified)")] = "efficient",
    write_threshold_chunks: Annotated[
        int | None,
        typer.Option(help="kappa: a request with more new full chunks is a refill; the connector's if absent."),
    ] = None,
    occupancy_threshold: Annotated[
        float | None, typer.Option(help="theta: from this occupancy on the tier is full; the connector's if absent.")
    ] = None,
    activity_window_s: Annotated[
        float | None, typer.Option(help="A task is active, and an eviction counts, so long; the connector's if absent.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that vLLM runs at the same time.")] = 16,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that vLLM computes per step; vLLM decides if absent."),
    ] = None,
    max_model_len_tokens: Annotated[
        int | None, typer.Option(help="The server's context; the trace's longest call if absent.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks.")] = 1,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of each GPU's memory that vLLM may use; vLLM's own if absent.")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Look for prefixes in the GPU's KV cache.")] = True,
    vllm_arg: Annotated[
        list[str] | None, typer.Option(help="One more word for vLLM's command line; repeatable.", metavar="WORD")
    ] = None,
    label_tasks: Annotated[
        bool, typer.Option(help="Name each call's task to the connector; without, it infers the tasks.")
    ] = True,
    call_timeout_s: Annotated[float, typer.Option(help="A call without a response for so long fails.")] = 3600.0,
    start_timeout_s: Annotated[float, typer.Option(help="Every server must be ready within that time.")] = 900.0,
    mode: Annotated[
        str,
        typer.Option(help="in_process: each engine has its host tier. server: an `lmcache server` has the engines'."),
    ] = "in_process",
    lazy_offload: Annotated[
        bool, typer.Option("--lazy-offload", help="Store what the GPU is about to evict; for --mode server.")
    ] = False,
    engines: Annotated[int, typer.Option(help="vLLM servers.")] = 1,
    route: Annotated[
        str,
        typer.Option(help="load: a call goes to the engine with the fewest calls. session: to its task's engine."),
    ] = "load",
    telemetry: Annotated[
        str | None,
        typer.Option(help="local | redis (one of the run's own); redis for several engines of our connector if absent"),
    ] = None,
) -> None:
    """Start fresh servers with a cold cache, replay a trace, and write a run directory."""
    console = Console(stderr=True)
    try:
        options = RunOptions(
            trace=trace,
            model=model,
            admission=admission,
            host_gib=host_gib,
            active_pool=active_pool,
            out=out,
            time_scale=time_scale,
            gpu_kv_tokens=gpu_kv_tokens,
            chunk_tokens=chunk_tokens,
            block_tokens=block_tokens,
            connector=connector,
            write_threshold_chunks=write_threshold_chunks,
            occupancy_threshold=occupancy_threshold,
            activity_window_s=activity_window_s,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len_tokens=max_model_len_tokens,
            tensor_parallel=tensor_parallel,
            gpu_memory_utilization=gpu_memory_utilization,
            prefix_caching=prefix_caching,
            vllm_args=tuple(vllm_arg or ()),
            label_tasks=label_tasks,
            call_timeout_s=call_timeout_s,
            start_timeout_s=start_timeout_s,
            mode=mode,
            lazy_offload=lazy_offload,
            engines=engines,
            route=route,
            telemetry=telemetry,
        )
        record = run_replay(options, console)
    except (ReplayOptionError, RunDirectoryError, TraceError) as error:
        raise failure(error, USER_ERROR_STATUS) from None
    except OSError as error:
        raise failure(error, RUN_FAILED_STATUS) from None
    except KeyboardInterrupt:
        raise failure("interrupted before the run began; nothing was created", INTERRUPTED_STATUS) from None
    if record.answered:
        typer.echo(render(compare([out]), "table"))
    if record.status == "interrupted":
        raise failure(f"{record.error}; partial run in {out}", INTERRUPTED_STATUS)
    if record.status != "complete":
        raise failure(f"{record.error}; partial run in {out}", RUN_FAILED_STATUS)
    if record.outputs_exact != record.calls:
        missing = record.calls - record.outputs_exact
        raise failure(
            f"{missing} of {record.calls} outputs are not exact; see {out / 'calls.jsonl'}", RUN_FAILED_STATUS
        )


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, sweeps, or directories of runs.")],
    format_: Annotated[str, typer.Option("--format", help="table | markdown | json")] = "table",
) -> None:
    """Print runs of one trace side by side."""
    with user_errors():
        typer.echo(render(compare(runs), format_))
