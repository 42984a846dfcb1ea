"""From a user's options to a workload and a deployment, with one clear error for what does not fit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from efficient_lmcache.core.activated import activated_parameters
from efficient_lmcache.core.footprint import KVFootprint, load_config, text_config
from efficient_lmcache.sizing.hardware import Hardware, load_hardware
from efficient_lmcache.sizing.live import LivePool, read_live_pool
from efficient_lmcache.sizing.plan import Deployment
from efficient_lmcache.sizing.pool import PoolModel, Range
from efficient_lmcache.sizing.synthetic import synthetic_workload
from efficient_lmcache.sizing.workload import VLLM_BLOCK_TOKENS, Workload, open_workload

# Of the peak. The paper's H20 run computes 84 M more tokens at 5 than at 40 GiB and takes 85 minutes longer (Table 3):
# 9 % of its peak; a dense model in large batches comes near half.
_PREFILL_EFFICIENCY = (0.05, 0.4)
_ANY_PREFILL_TOKENS_PER_S = (2_000.0, 50_000.0)
_OUTPUT_S_PER_TOKEN = (0.02, 0.05)
_LARGEST = 1 << 40  # of anything counted, and of any factor or rate: far above any machine's, and no sum overflows


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What `efficient-lmcache plan` was asked; the options' own help says what each means."""

    model: Path
    ranks: int
    gpu: str
    trace: Path | None = None
    without_trace: bool = False
    from_metrics: str | None = None
    active_pool: int | None = None
    mean_prompt_tokens: float | None = None
    gpu_kv_tokens: int | None = None
    host_gib: tuple[float, ...] = ()
    slots: int = 256
    chunk_tokens: int = 1024
    gpu_block_tokens: int = VLLM_BLOCK_TOKENS
    kv_cache_dtype: str = "auto"
    activated_parameters: float | None = None
    hardware: Path | None = None
    ttl_s: float | None = None
    salt_per_session: bool = False
    time_scale: float = 1.0
    prefill_tokens_per_s: Range | None = None
    output_s_per_token: Range | None = None
    tokenizer: str | None = None
    skip_bad: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What `make_plan` takes.

    Attributes:
        recorded: the workload is a recording, not a synthetic one.
        mean_prompt_tokens: N as given or counted by an engine; None to take the workload's.
    """

    workload: Workload
    deployment: Deployment
    recorded: bool
    mean_prompt_tokens: float | None


def prepare(options: PlanOptions) -> PlanInputs:
    """Read what the options name.

    Raises:
        ValueError: naming the option, or the file and its record and field, and what is allowed.
    """
    _check(options)
    live = read_live_pool(options.from_metrics) if options.from_metrics is not None else None
    active_pool = options.active_pool or (live.active_pool if live else None)
    gpu_kv_tokens = options.gpu_kv_tokens or (live.gpu_kv_tokens if live else None)
    if active_pool is None:
        raise ValueError("--active-pool is missing; give the agents that are in progress at the same time")
    if gpu_kv_tokens is None:
        raise ValueError("--gpu-kv-tokens is missing; give the tokens that the GPUs' KV cache holds")
    footprint = KVFootprint.from_config_file(options.model, options.kv_cache_dtype)
    _check_ranks(options)
    deployment = _deployment(
        options,
        load_hardware(options.gpu, options.hardware),
        footprint,
        active_pool,
        gpu_kv_tokens,
        options.host_gib or ((live.tier_gib,) if live and live.tier_gib else ()),
    )
    if options.trace is not None:
        workload = open_workload(
            options.trace,
            options.chunk_tokens,
            tokenizer=options.tokenizer,
            skip_bad=options.skip_bad,
            gpu_block_tokens=options.gpu_block_tokens,
        )
        mean = None
    else:
        mean = options.mean_prompt_tokens or (live.mean_prompt_tokens if live else None)
        if mean is None:
            raise ValueError("--mean-prompt-tokens is missing; --without-trace needs it")
        workload = synthetic_workload(mean, active_pool, options.chunk_tokens)
    workload = workload.with_notes(
        *_live_notes(live, deployment.bytes_per_token), *_state_notes(options.model, footprint.layers)
    )
    return PlanInputs(
        workload.salted() if options.salt_per_session else workload, deployment, options.trace is not None, mean
    )


def _check(options: PlanOptions) -> None:
    sources = (options.trace is not None, options.without_trace, options.from_metrics is not None)
    if sum(sources) != 1:
        raise ValueError("give one of --trace, --without-trace and --from-metrics")
    if options.trace is not None and options.mean_prompt_tokens is not None:
        raise ValueError("--mean-prompt-tokens is for plans without a trace; a trace has its own mean")
    for name, value in (
        ("--active-pool", options.active_pool),
        ("--gpu-kv-tokens", options.gpu_kv_tokens),
        ("--slots", options.slots),
        ("--chunk-tokens", options.chunk_tokens),
        ("--gpu-block-tokens", options.gpu_block_tokens),
    ):
        if value is not None and not 1 <= value <= _LARGEST:
            raise ValueError(f"{name} is {value}; it must be {'at least 1' if value < 1 else f'at most {_LARGEST:,}'}")
    require_whole_blocks(options.chunk_tokens, options.gpu_block_tokens)
    for name, number in (
        ("--activated-params", options.activated_parameters),
        ("--ttl-s", options.ttl_s),
        *(("--host-gib", gib) for gib in options.host_gib),
    ):
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} is {number:g}; it must be a number > 0")
    if not 0 <= options.time_scale <= _LARGEST:
        raise ValueError(f"--time-scale is {options.time_scale:g}; it must be a number from 0 to {_LARGEST:,}")
    for name, limits in (
        ("--prefill-tokens-per-s", options.prefill_tokens_per_s),
        ("--output-s-per-token", options.output_s_per_token),
    ):
        if limits is not None and not 1 / _LARGEST <= limits[0] <= limits[1] <= _LARGEST:
            raise ValueError(
                f"{name} is {limits[0]:g} {limits[1]:g}; it must be two numbers > 0, the smaller one first"
            )


def require_whole_blocks(chunk_tokens: int, gpu_block_tokens: int) -> None:
    """ValueError for chunks that are not made of whole GPU blocks."""
    if chunk_tokens < 1 or chunk_tokens % gpu_block_tokens:
        raise ValueError(
            f"--chunk-tokens is {chunk_tokens}; it must be a multiple of --gpu-block-tokens, {gpu_block_tokens}"
        )


def _check_ranks(options: PlanOptions) -> None:
    config = load_config(options.model)
    heads = text_config(config).get("num_attention_heads")
    if isinstance(heads, int) and heads % options.ranks:
        raise ValueError(
            f"--tp {options.ranks}: vLLM does not serve a model of {heads} attention heads on so many GPUs; it must "
            f"divide {heads}"
        )


def _deployment(
    options: PlanOptions,
    hardware: Hardware,
    footprint: KVFootprint,
    active_pool: int,
    gpu_kv_tokens: int,
    host_gib: tuple[float, ...],
) -> Deployment:
    activated = options.activated_parameters
    if activated is None:
        try:
            activated = float(activated_parameters(load_config(options.model)))
        except (ValueError, TypeError):
            activated = None
    rates = options.prefill_tokens_per_s
    if rates is None and activated is not None:
        peak = 1 / hardware.least_prefill_s_per_token(activated, options.ranks)
        rates = (_PREFILL_EFFICIENCY[0] * peak, _PREFILL_EFFICIENCY[1] * peak)
    pool = PoolModel(
        active_pool=active_pool,
        slots=options.slots,
        prefill_tokens_per_s=rates or _ANY_PREFILL_TOKENS_PER_S,
        output_s_per_token=options.output_s_per_token or _OUTPUT_S_PER_TOKEN,
        gpu_kv_tokens=gpu_kv_tokens,
        time_scale=options.time_scale,
    )
    return Deployment(
        hardware,
        options.ranks,
        footprint.bytes_per_token_per_rank(options.ranks),
        activated,
        gpu_kv_tokens,
        pool,
        host_gib,
        options.ttl_s,
        prefill_measured=options.prefill_tokens_per_s is not None,
        latent=footprint.latent,
    )


def _live_notes(live: LivePool | None, bytes_per_token: int) -> tuple[str, ...]:
    if live is None or not live.footprint_differs(bytes_per_token):
        return ()
    return (
        "the engine's working set does not follow from this model, --tp and --kv-cache-dtype: "
        f"it says {live.working_set_bytes / (1 << 30):.3g} GiB per rank",
    )


def _state_notes(model: Path, counted_layers: int) -> tuple[str, ...]:
    config = load_config(model)
    layers = text_config(config).get("num_hidden_layers")
    if not isinstance(layers, int) or counted_layers >= layers:
        return ()
    return (
        f"{counted_layers} of {layers} layers keep KV for every token; states of the others, stored once a block by "
        "LMCache's server, are not counted: compare with the KiB/token of the engine's line `Efficient-LMCache:`",
    )
