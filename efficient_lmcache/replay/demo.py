"""The demonstration: a pool of agents on real vLLM + LMCache, in a tier that thrashes and in one that does not.

It makes a small model and synthesizes a trace, replays the trace once without a host tier and then under plain
offload, fixed and conditioned admission, in a tier below the pool's working set and in one above it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from efficient_lmcache.core.footprint import KVFootprint
from efficient_lmcache.core.workingset import reuse_working_set_bytes
from efficient_lmcache.replay.compare import compare, render
from efficient_lmcache.replay.model import create_model
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import TraceReader

_GIB = 1 << 30
_VOCAB_SIZE = 16_384
_ADMISSIONS = ("none", "fixed", "conditioned")


class DemoError(ValueError):
    """The demonstration cannot start, or one of its runs did not end well."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What is replayed, and in how large a tier.

    Attributes:
        workload: as many tasks as slots, so that the pool is what its size says. First prompts are below kappa
            chunks, so that they are written under pressure too; some tool outputs are above, so that a task can fall
            out of the tier.
        gamma_h_small, gamma_h_large: working set over host tier; above 1 the tier is too small.
        gamma_g: A N over the GPU's KV tokens.
        chunk_tokens: kappa = 8 chunks are then 1,024 tokens.
    """

    workload: Workload = field(
        default_factory=lambda: Workload(
            tasks=10,
            calls_per_task=28.0,
            vocab_size=_VOCAB_SIZE,
            system_tokens=512,
            issue_tokens=300.0,
            output_tokens=40.0,
            observation_tokens=320.0,
            max_output_tokens=12,
            max_prompt_tokens=14_000,
            median_gap_s=0.3,
        )
    )
    active_pool: int = 10
    gamma_h_small: float = 2.3
    gamma_h_large: float = 0.55
    gamma_g: float = 1.5
    chunk_tokens: int = 128


def run_demo(out: Path, options: DemoOptions | None = None, console: Console | None = None) -> list[dict[str, Any]]:
    """Run it all in a new directory, `out` or `out` with a number; print and save the comparison; return its rows.

    Raises:
        DemoError: a run failed, or returned an output that was not exact.
        KeyboardInterrupt: a run was interrupted; its record is written.
    """
    options, console = options or DemoOptions(), console or Console()
    out = _new_directory(out)
    console.print(f"demonstration in {out}: a model, a trace and {1 + 2 * len(_ADMISSIONS)} replays", highlight=False)
    model, trace = create_model(out / "model", vocab_size=_VOCAB_SIZE), out / "trace"
    synthesize(trace, options.workload)
    runs = _plan(options, model, trace, out)
    for number, run in enumerate(runs, 1):
        console.rule(f"{number}/{len(runs)} {run.out.name}")
        record = run_replay(run, console)
        if record.status == "interrupted":
            raise KeyboardInterrupt
        if record.status != "complete" or record.outputs_exact != record.calls:
            reason = record.error or f"{record.calls - record.outputs_exact} outputs are not exact"
            raise DemoError(f"{run.out}: {record.status}: {reason}")
    rows = compare([run.out for run in runs])
    for name, format_ in (("comparison.txt", "table"), ("comparison.md", "markdown"), ("comparison.json", "json")):
        (out / name).write_text(f"{render(rows, format_)}\n" + ("" if format_ == "json" else f"\n{reading(rows)}\n"))
    console.rule("comparison")
    print((out / "comparison.txt").read_text())
    console.print(f"saved in {out} as comparison.txt, .md and .json", highlight=False)
    return rows


def _plan(options: DemoOptions, model: Path, trace: Path, out: Path) -> list[RunOptions]:
    with TraceReader(trace) as reader:
        mean_prompt_tokens = reader.totals.prompt_tokens / reader.totals.calls
    bytes_per_token = KVFootprint.from_config_file(model).bytes_per_token_per_rank()
    working_set_bytes = reuse_working_set_bytes(options.active_pool, mean_prompt_tokens, bytes_per_token)
    gpu_kv_tokens = int(options.active_pool * mean_prompt_tokens / options.gamma_g)

    def run(name: str, admission: str, host_gib: float) -> RunOptions:
        return RunOptions(
            trace=trace,
            model=model,
            admission=admission,
            host_gib=host_gib,
            active_pool=options.active_pool,
            out=out / name,
            gpu_kv_tokens=gpu_kv_tokens,
            chunk_tokens=options.chunk_tokens,
        )

    tiers = {"small": options.gamma_h_small, "large": options.gamma_h_large}
    return [
        run("recompute", "recompute", 0.0),
        *(
            run(f"{tier}-{admission}", admission, working_set_bytes / gamma / _GIB)
            for tier, gamma in tiers.items()
            for admission in _ADMISSIONS
        ),
    ]


def reading(rows: Sequence[dict[str, Any]]) -> str:
    """The comparison in a paragraph."""
    by_run = {Path(row["run"]).name: row for row in rows}

    def ratio(name: str) -> float:
        return float(by_run[name]["computed_prefill_tokens_to_offload"])

    small, large = by_run["small-none"], by_run["large-none"]
    recomputed = small["computed_prefill_tokens"] / by_run["recompute"]["computed_prefill_tokens"]
    return (
        f"All {small['calls']} outputs of every run are exact, so all policies did the same work. In the small tier "
        f"(the working set is {small['gamma_h']:.2f} of it) plain offload computes {recomputed:.2f} of what it takes "
        "without any tier: chunks are evicted before anyone reads them. Conditioned admission computes "
        f"{ratio('small-conditioned'):.2f} of offload's prefill there, fixed admission {ratio('small-fixed'):.2f}. "
        f"In the large tier (working set {large['gamma_h']:.2f} of it) there is nothing to protect: conditioned "
        f"admission steps aside and computes {ratio('large-conditioned'):.2f} of offload's prefill, while fixed "
        f"admission still declines writes and computes {ratio('large-fixed'):.2f} of it."
    )


def _new_directory(out: Path) -> Path:
    for number in itertools.count(1):
        candidate = out if number == 1 else out.with_name(f"{out.name}-{number}")
        if not candidate.exists() or (candidate.is_dir() and not any(candidate.iterdir())):
            try:
                candidate.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DemoError(f"--out {candidate}: cannot be created: {error.strerror}") from error
            return candidate
    raise AssertionError("unreachable")
