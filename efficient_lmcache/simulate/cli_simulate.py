"""`efficient-lmcache simulate`: what would engines, tiers and admissions do with this work?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress as Bars
from rich.table import Table

from efficient_lmcache.replay.cli_common import user_errors

if TYPE_CHECKING:
    from efficient_lmcache.simulate.options import SimulateOptions
    from efficient_lmcache.simulate.profiles import Profile

_COLUMNS = (
    *("γ_H", "GiB", "GB/s", "admission", "computed", "restored", "stored", "preempted"),
    *("makespan s", "queue s", "wall s"),
)
_COMPARED = ("run", "computed", "simulated", "in order", "makespan s", "simulated", "equal cached", "equal match")
_WIDTH = 150
# What each of these goes with: it says itself what engines, tiers and agents there are.
_COMPANIONS = {
    "compare": {
        "trace",
        "model",
        "profile",
        "kv_cache_dtype",
        "hardware",
        "profiles",
        "tokenizer",
        "skip_bad",
        "fit_to",
    },
    "paper": {"seed"},
}


def simulate(
    context: typer.Context,
    trace: Annotated[
        Path | None, typer.Option(help="A recording: a trace, Weka sessions, Mooncake requests, trajectories, …")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face config.json, or the directory it is in.")] = None,
    profile: Annotated[str, typer.Option(help="Hardware: h20, h800, rtx3090, h100, h200, rtxpro6000, cpu.")] = "h20",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of each engine.")] = 1,
    gpu_kv_tokens: Annotated[
        int | None, typer.Option(help="K_G: tokens that an engine's KV cache holds (vLLM logs it at start-up).")
    ] = None,
    host_gib: Annotated[str, typer.Option(help="Host tiers per rank, with commas: 5,10,20. 0 recomputes.")] = "0",
    admission: Annotated[str, typer.Option(help="With commas: none, fixed, conditioned.")] = "none",
    active_pool: Annotated[int | None, typer.Option(help="A: agents (sessions) in progress at the same time.")] = None,
    engines: Annotated[int, typer.Option(min=1, max=1024, help="Engines that serve the pool.")] = 1,
    route: Annotated[str, typer.Option(help="Which engine takes a call: load, session or prefix.")] = "load",
    shared_tier: Annotated[
        bool, typer.Option("--shared-tier", help="One tier for all engines, as of an LMCache server.")
    ] = False,
    link_gb_s: Annotated[
        str,
        typer.Option(help="Behind the host tiers, a store for all engines over a link of so many GB/s; with commas."),
    ] = "0",
    max_num_seqs: Annotated[int, typer.Option(min=1, max=65_536, help="Of vLLM.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Of vLLM.")] = 8192,
    chunk_tokens: Annotated[int, typer.Option(help="b: LMCache's chunk size.")] = 1024,
    gpu_block_tokens: Annotated[int, typer.Option(min=1, help="vLLM's block size: 16 on GPUs, 128 on CPUs.")] = 16,
    write_threshold_chunks: Annotated[int, typer.Option(min=0, help="κ.")] = 8,
    occupancy_threshold: Annotated[float, typer.Option(min=0, max=1, help="θ.")] = 0.95,
    activity_window_s: Annotated[float, typer.Option(help="A task is active for so long.")] = 60.0,
    time_scale: Annotated[float, typer.Option(help="Multiplies the recorded pauses.")] = 1.0,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or fp8…")] = "auto",
    hardware: Annotated[Path | None, typer.Option(help="A YAML file with peaks of other GPUs (as for plan).")] = None,
    profiles: Annotated[Path | None, typer.Option(help="A YAML file with profiles of your own.")] = None,
    fit_to: Annotated[
        list[Path] | None,
        typer.Option(help="First fit the profile to this run or sweep of the same trace; may be repeated."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="For trajectories of text: tekken, bpe:VOCAB, a path.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad records instead of stopping.")] = False,
    out: Annotated[Path | None, typer.Option(help="Leave a run directory for each configuration, as a replay.")] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Simulate this run or sweep instead, and compare; may be repeated."),
    ] = None,
    paper: Annotated[str | None, typer.Option(help="table3: the paper's 17 runs on a workload fitted to it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the paper's workload; 6 is the one whose order was fitted.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Simulate engines and their KV tiers on recorded work: no GPU, seconds per configuration."""
    with user_errors():
        from efficient_lmcache.simulate.options import SimulateOptions

        for name, companions in _COMPANIONS.items():
            if _is_given(context, name):
                _require_only(context, name, {name, "as_json"} | companions)
        if paper is None and _is_given(context, "seed"):
            raise ValueError("--seed is of the workload of --paper; a recording has none")
        options = SimulateOptions(
            trace=trace,
            model=model,
            profile=profile,
            ranks=tp,
            gpu_kv_tokens=gpu_kv_tokens,
            host_gib=host_gib,
            admission=admission,
            active_pool=active_pool,
            engines=engines,
            route=route,
            shared_tier=shared_tier,
            link_gb_s=link_gb_s,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunk_tokens=chunk_tokens,
            gpu_block_tokens=gpu_block_tokens,
            write_threshold_chunks=write_threshold_chunks,
            occupancy_threshold=occupancy_threshold,
            activity_window_s=activity_window_s,
            time_scale=time_scale,
            kv_cache_dtype=kv_cache_dtype,
            hardware=hardware,
            profiles=profiles,
            tokenizer=tokenizer,
            skip_bad=skip_bad,
            fit_to=tuple(fit_to or ()),
        )
        if paper is not None:
            _paper(paper, seed, as_json)
        elif compare:
            _compare(options, compare, as_json)
        else:
            _simulate(options, out, as_json)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _require_only(context: typer.Context, name: str, allowed: set[str]) -> None:
    """ValueError for options on the command line that `name` would leave without a meaning."""
    spelled = {each.name or "": each.opts[0] for each in context.command.params}
    if others := [spelled[each] for each in spelled if each not in allowed and _is_given(context, each)]:
        whose = "the run" if name == "compare" else "the paper"
        raise ValueError(f"{spelled[name]} does not go with {', '.join(others)}: {whose} says what is simulated")


def _simulate(options: SimulateOptions, out: Path | None, as_json: bool) -> None:
    from efficient_lmcache.simulate.deployment import gamma_h, simulate
    from efficient_lmcache.simulate.options import prepare
    from efficient_lmcache.simulate.run_directory import check_directories, write_run

    with _progress() as bar:
        bar("reading", 0, 1)
        inputs = prepare(options, lambda tried: bar(f"fitting, {tried} tried", 0, 1))
        check_directories(out, inputs.configurations)
        rows = []
        for configuration in inputs.configurations:
            name = f"{configuration.name} {configuration.host_gib:g} GiB {configuration.link_gb_s:g} GB/s"
            made = simulate(
                inputs.workload,
                inputs.deployment,
                configuration,
                lambda done, calls, name=name: bar(name, done, calls),  # type: ignore[misc]
            )
            pressure = gamma_h(inputs.workload, inputs.deployment, configuration.host_gib)
            rows.append({"gamma_h": pressure, **made.to_json()})
            if out is not None:
                write_run(out, made, inputs, options)
    more = {"notes": list(inputs.workload.notes), "options": options.to_json(), **_fitted(inputs.profile, options)}
    _show(rows, more, as_json)


def _compare(options: SimulateOptions, runs: list[Path], as_json: bool) -> None:
    from efficient_lmcache.simulate.options import comparisons

    with _progress() as bar:
        profile, compared = comparisons(
            options, runs, lambda *done: bar("runs", *done), lambda tried: bar(f"fitting, {tried} tried", 0, 1)
        )
        rows = [made.to_json() for made in compared]
    if as_json:
        typer.echo(json.dumps({"runs": rows, **_fitted(profile, options)}, indent=2))
        return
    table = Table(*_COMPARED, box=SIMPLE)
    for row in rows:
        table.add_row(
            row["run"],
            _millions(row["measured"]["computed_prefill_tokens"]),
            f"{row['computed_ratio'] - 1:+.1%}",
            f"{row['computed_ratio_in_order'] - 1:+.1%}",
            f"{row['measured']['makespan_s']:.0f}",
            f"{row['makespan_ratio'] - 1:+.1%}",
            f"{row['equal_cached']:.1%}",
            "–" if row["equal_host_match"] is None else f"{row['equal_host_match']:.1%}",
        )
    Console(width=_WIDTH).print(table)
    _show_fitted(_fitted(profile, options))


def _fitted(profile: Profile, options: SimulateOptions) -> dict[str, Any]:
    """A fitted profile as a file of `--profiles` has it; nothing of one that was not fitted."""
    return {"fitted": {profile.name: profile.entry()}} if options.fit_to else {}


def _show_fitted(more: dict[str, Any]) -> None:
    if "fitted" in more:
        typer.echo(f"The fitted profile, as a file for --profiles has it:\n\n{yaml.safe_dump(more['fitted'])}")


def _paper(table: str, seed: int, as_json: bool) -> None:
    from efficient_lmcache.simulate.paper import simulate_table

    with _progress() as bar:
        rows = simulate_table(table, seed, lambda done, count: bar(table, done, count))
    _show(rows, {}, as_json)


def _show(rows: list[dict[str, Any]], more: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"rows": rows, **more}, indent=2))
        return
    more_columns = ("paper: computed", "paper: makespan s") if "paper" in rows[0] else ()
    table = Table(*_COLUMNS, *more_columns, box=SIMPLE)
    for row in rows:
        cells = [
            "–" if row["gamma_h"] is None else f"{row['gamma_h']:.2f}",
            f"{row['host_gib']:g}",
            f"{row['link_gb_s']:g}" if row["link_gb_s"] else "–",
            row["admission"],
            _millions(row["computed_prefill_tokens"]),
            _millions(row["restored_tokens_per_rank"]),
            _millions(row["stored_tokens_per_rank"]),
            str(row["preemptions"]),
            f"{row['makespan_s']:.0f}",
            f"{row['queue_delay_mean_s']:.2f}",
            f"{row['wall_s']:.2f}",
        ]
        if paper := row.get("paper"):
            cells += [_millions(paper["computed_prefill_tokens"]), f"{paper['makespan_s']:.0f}"]
        table.add_row(*cells)
    Console(width=_WIDTH).print(table)
    for note in more.get("notes", ()):
        typer.echo(f"note: {note}")
    _show_fitted(more)


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.2f} M"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while the block runs; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, count: None
        return
    with Bars(console=console, transient=True) as bars:
        task = bars.add_task("", total=1)
        yield lambda what, done, count: bars.update(task, description=what, completed=done, total=count)
