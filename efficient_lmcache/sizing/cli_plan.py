"""`efficient-lmcache plan`: how much host memory do these agents need, and is it worth it?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from efficient_lmcache.replay.cli_common import user_errors
from efficient_lmcache.sizing.cli_common import check_figure

if TYPE_CHECKING:
    from efficient_lmcache.sizing.inputs import PlanOptions


_VLLM_SLOTS = 256


def plan(
    model: Annotated[Path, typer.Option(help="A Hugging Face config.json, or the directory it is in.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks: GPUs of the node that serve the model.")],
    gpu: Annotated[str, typer.Option(help="H20, H800, RTX3090, H100, H200, RTXPRO6000, or one of --hardware.")],
    trace: Annotated[
        Path | None, typer.Option(help="A recording: a trace, Weka sessions, Mooncake requests, trajectories, …")
    ] = None,
    without_trace: Annotated[
        bool, typer.Option("--without-trace", help="No recording: needs --mean-prompt-tokens and --active-pool.")
    ] = False,
    from_metrics: Annotated[
        str | None, typer.Option(help="URL of a live engine: pool, prompts, tier and GPU cache as it counts them.")
    ] = None,
    active_pool: Annotated[int | None, typer.Option(help="A: agents (sessions) in progress at the same time.")] = None,
    mean_prompt_tokens: Annotated[float | None, typer.Option(help="N, where there is no trace.")] = None,
    gpu_kv_tokens: Annotated[
        int | None, typer.Option(help="K_G: tokens that the GPUs' KV cache holds (vLLM logs it at start-up).")
    ] = None,
    host_gib: Annotated[list[float] | None, typer.Option(help="Host tier per rank to judge; may be repeated.")] = None,
    slots: Annotated[int, typer.Option(help="R: vLLM's --max-num-seqs.")] = _VLLM_SLOTS,
    chunk_tokens: Annotated[int, typer.Option(help="b: LMCache's chunk size.")] = 1024,
    gpu_block_tokens: Annotated[int, typer.Option(min=1, help="vLLM's block size: 16 on GPUs, 128 on CPUs.")] = 16,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or fp8…")] = "auto",
    activated_params: Annotated[
        float | None, typer.Option(help="Parameters that a token activates; from the configuration if absent.")
    ] = None,
    hardware: Annotated[Path | None, typer.Option(help="A YAML file with profiles of other GPUs.")] = None,
    ttl_s: Annotated[float | None, typer.Option(help="The tier forgets what nobody used for so long.")] = None,
    salt_per_session: Annotated[
        bool, typer.Option("--salt-per-session", help="Sessions share nothing, as with a cache salt for each.")
    ] = False,
    time_scale: Annotated[float, typer.Option(help="Multiplies the recorded pauses.")] = 1.0,
    prefill_tokens_per_s: Annotated[
        tuple[float, float] | None, typer.Option(help="Prefill of the whole engine, from and to.")
    ] = None,
    output_s_per_token: Annotated[
        tuple[float, float] | None, typer.Option(help="Seconds that a call waits for each output token, from and to.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="For trajectories of text: tekken, bpe:VOCAB, a path.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad records instead of stopping.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw the curve: a .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Size a host tier: working set, pressure, predicted curve, recommendation and advice."""
    with user_errors():
        from efficient_lmcache.sizing.inputs import PlanOptions

        options = PlanOptions(
            model=model,
            ranks=tp,
            gpu=gpu,
            trace=trace,
            without_trace=without_trace,
            from_metrics=from_metrics,
            active_pool=active_pool,
            mean_prompt_tokens=mean_prompt_tokens,
            gpu_kv_tokens=gpu_kv_tokens,
            host_gib=tuple(host_gib or ()),
            slots=slots,
            chunk_tokens=chunk_tokens,
            gpu_block_tokens=gpu_block_tokens,
            kv_cache_dtype=kv_cache_dtype,
            activated_parameters=activated_params,
            hardware=hardware,
            ttl_s=ttl_s,
            salt_per_session=salt_per_session,
            time_scale=time_scale,
            prefill_tokens_per_s=prefill_tokens_per_s,
            output_s_per_token=output_s_per_token,
            tokenizer=tokenizer,
            skip_bad=skip_bad,
        )
        _run(options, figure, as_json)


def _run(options: PlanOptions, figure: Path | None, as_json: bool) -> None:
    from efficient_lmcache.sizing.figure import draw
    from efficient_lmcache.sizing.inputs import prepare
    from efficient_lmcache.sizing.plan import make_plan
    from efficient_lmcache.sizing.plan_text import show

    check_figure(figure)
    created_utc = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _progress() as say:
        say("reading")
        inputs = prepare(options)
        calls = len(inputs.workload.chunks)
        made = make_plan(
            inputs.workload,
            inputs.deployment,
            recorded=inputs.recorded,
            mean_prompt_tokens=inputs.mean_prompt_tokens,
            progress=lambda done: say(f"{calls:,} calls: {done} capacities predicted"),
        )
    if figure is not None:
        draw(made, figure)
    if as_json:
        typer.echo(json.dumps({"created_utc": created_utc, **made.to_json(), "options": options.to_json()}, indent=2))
    else:
        show(made, Console())
        if figure is not None:
            typer.echo(f"figure: {figure}")


@contextmanager
def _progress() -> Iterator[Callable[[str], Any]]:
    """What is going on, on stderr while the block runs; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update
