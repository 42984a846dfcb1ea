"""From a user's options to a workload, a deployment and configurations, with one clear error for what does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from efficient_lmcache.core.admission import ADMISSIONS
from efficient_lmcache.core.footprint import load_config
from efficient_lmcache.simulate.against_run import Comparison, compare_run
from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.deployment import Configuration, Deployment
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.fit import Observed, Tried, fit
from efficient_lmcache.simulate.profiles import Profile, load_profile
from efficient_lmcache.simulate.recorded_run import recorded_runs
from efficient_lmcache.simulate.routing import ROUTERS
from efficient_lmcache.simulate.simulation import Pool
from efficient_lmcache.sizing.inputs import require_whole_blocks
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload, open_workload

# References of a block each; 8 bytes: the GPU's cache is modelled in vLLM's own blocks up to here.
_MOST_BLOCK_REFERENCES = 100_000_000
# A byte a second.
_LEAST_LINK_GB_S = 1e-9

#: The trace in chunks and GPU blocks of so many tokens.
Reader = Callable[[int, int], Workload]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What `efficient-lmcache simulate` was asked; the options' own help says what each means."""

    trace: Path | None
    model: Path | None
    profile: str
    ranks: int
    gpu_kv_tokens: int | None
    host_gib: str
    admission: str
    active_pool: int | None
    engines: int
    route: str
    shared_tier: bool
    link_gb_s: str
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    gpu_block_tokens: int
    write_threshold_chunks: int
    occupancy_threshold: float
    activity_window_s: float
    time_scale: float
    kv_cache_dtype: str
    hardware: Path | None
    profiles: Path | None
    tokenizer: str | None
    skip_bad: bool
    fit_to: tuple[Path, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return {name: _jsonable(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What `deployment.simulate` takes, one configuration after the other.

    Attributes:
        profile: the one that was asked for, fitted if it was to be.
    """

    profile: Profile
    workload: Workload
    deployment: Deployment
    configurations: list[Configuration]


def prepare(options: SimulateOptions, tried: Tried = lambda count: None) -> Inputs:
    """Read what the options name.

    Args:
        tried: of `fit`.

    Raises:
        ValueError: naming the option, or the file and its record and field, and what is allowed.
    """
    trace, model = _given(options)
    if options.active_pool is None:
        raise ValueError("--active-pool is missing; give the agents that are in progress at the same time")
    if options.gpu_kv_tokens is None:
        raise ValueError("--gpu-kv-tokens is missing; give the tokens that an engine's KV cache holds")
    _check(options)
    configurations = _configurations(options)
    shape = _shape(model, options.kv_cache_dtype)
    read = _reader(options, trace)
    profile = _profile(options, read, shape, tried)
    deployment = Deployment(
        engine=EngineSettings(
            options.gpu_kv_tokens,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            plans_ahead=profile.async_scheduling,
        ),
        costs=costs(profile, shape, options.ranks),
        bytes_per_token=shape.footprint.bytes_per_token_per_rank(options.ranks),
        pool=Pool(options.active_pool, options.time_scale),
        engines=options.engines,
        route=options.route,
        shared_tier=options.shared_tier,
        ranks=options.ranks,
    )
    workload = read(options.chunk_tokens, options.gpu_block_tokens)
    if workload.sessions < options.active_pool:
        note = f"the recording has {workload.sessions} sessions, fewer than --active-pool: γ_H is that of so many"
        workload = workload.with_notes(note)
    return Inputs(profile, workload, deployment, configurations)


def comparisons(
    options: SimulateOptions,
    runs: Sequence[Path],
    progress: Callable[[int, int], None] = lambda done, count: None,
    tried: Tried = lambda count: None,
) -> tuple[Profile, Iterator[Comparison]]:
    """The profile, and each run against its simulations; engine, tier, pool and admission are the run's own.

    Args:
        runs: run directories, sweeps', or directories of runs.
        progress: called with how many runs are done, and how many there are.
        tried: of `fit`.
    """
    trace, model = _given(options)
    shape = _shape(model, options.kv_cache_dtype)
    read = _reader(options, trace)
    every = _observed(read, runs)
    profile = _profile(options, read, shape, tried)

    def compared() -> Iterator[Comparison]:
        for done, (run, workload) in enumerate(every):
            progress(done, len(every))
            yield compare_run(run, workload, profile, shape)

    return profile, compared()


def _observed(read: Reader, paths: Sequence[Path]) -> list[Observed]:
    """Runs with the trace in their chunks and blocks."""
    return [Observed(run, read(*run.sizes)) for path in paths for run in recorded_runs(path)]


def _given(options: SimulateOptions) -> tuple[Path, Path]:
    if options.trace is None:
        raise ValueError("--trace is missing; give a recording (or --paper table3)")
    if options.model is None:
        raise ValueError("--model is missing; give a config.json or the directory it is in")
    return options.trace, options.model


def _check(options: SimulateOptions) -> None:
    """What deeper layers would refuse, too, under names that no user has seen."""
    for option, given, allowed in (
        ("--route", [options.route], list(ROUTERS)),
        ("--admission", _names(options.admission), list(ADMISSIONS)),
    ):
        for name in given:
            if name not in allowed:
                raise ValueError(f"{option} has {name!r}; it must be one of {', '.join(allowed)}")
    for option, value, holds, wanted in (
        ("--active-pool", options.active_pool, (options.active_pool or 0) >= 1, "at least 1"),
        ("--gpu-kv-tokens", options.gpu_kv_tokens, (options.gpu_kv_tokens or 0) >= 1, "at least 1"),
        ("--time-scale", options.time_scale, 0 <= options.time_scale < math.inf, "a finite number >= 0"),
        (
            "--activity-window-s",
            options.activity_window_s,
            0 < options.activity_window_s < math.inf,
            "a finite number > 0",
        ),
    ):
        if not holds:
            raise ValueError(f"{option} is {value}; it must be {wanted}")
    require_whole_blocks(options.chunk_tokens, options.gpu_block_tokens)
    for link_gb_s in _numbers("--link-gb-s", options.link_gb_s):
        if 0 < link_gb_s < _LEAST_LINK_GB_S:
            raise ValueError(
                f"--link-gb-s has {link_gb_s:g}; a link carries at least {_LEAST_LINK_GB_S:g}, and 0 is none"
            )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _profile(options: SimulateOptions, read: Reader, shape: ModelShape, tried: Tried) -> Profile:
    profile = load_profile(options.profile, options.profiles, options.hardware)
    if not options.fit_to:
        return profile
    if not (observed := _observed(read, options.fit_to)):
        raise ValueError(f"--fit-to {', '.join(map(str, options.fit_to))}: has no complete run")
    return fit(profile, shape, observed, tried)


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _reader(options: SimulateOptions, trace: Path) -> Reader:
    """Reads the trace once for each pair of sizes, whoever asks."""

    @cache
    def read(chunk_tokens: int, gpu_block_tokens: int) -> Workload:
        return open_workload(
            trace,
            chunk_tokens,
            tokenizer=options.tokenizer,
            skip_bad=options.skip_bad,
            gpu_block_tokens=gpu_block_tokens,
            most_block_references=_MOST_BLOCK_REFERENCES,
        )

    return read


def _shape(model: Path, kv_cache_dtype: str) -> ModelShape:
    """Raises ValueError: naming the file and what of it cannot be simulated."""
    try:
        return ModelShape.of(load_config(model), kv_cache_dtype)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if str(model) in text else f"--model {model}: {text}") from error
    except (TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"--model {model}: a field is missing or of another kind than expected: {error}") from error


def _configurations(options: SimulateOptions) -> list[Configuration]:
    """Every admission at every capacity and link; recompute once, as no admission matters there."""
    sizes, links = _numbers("--host-gib", options.host_gib), _numbers("--link-gb-s", options.link_gb_s)
    admissions = [
        Admission(name, options.write_threshold_chunks, options.occupancy_threshold, options.activity_window_s)
        for name in _names(options.admission)
    ]
    if not any(sizes) and not any(links) and any(admission.name != "none" for admission in admissions):
        raise ValueError(f"--admission {options.admission} needs a host tier to admit to; give --host-gib")
    if any(links) and (options.shared_tier or any(admission.name != "none" for admission in admissions)):
        raise ValueError("--link-gb-s goes with engines' own tiers and --admission none; it has no other model here")
    tiers = [
        Configuration(gib, admission, link_gb_s=link)
        for link, gib, admission in product(links, sizes, admissions)
        if gib or link
    ]
    return [Configuration(0.0)] * (0.0 in sizes and 0.0 in links) + tiers


def _numbers(option: str, text: str) -> list[float]:
    return [_number(option, part) for part in text.split(",")]


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{option} has {text.strip()!r}; give numbers >= 0 with commas between them")
    return value
