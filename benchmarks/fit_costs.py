"""Fits a hardware profile's constants to makespans, and shows the runs that the fit did not see.

    python benchmarks/fit_costs.py cpu --trace T --model M --fit RUN... --check RUN...     # real runs on this machine
    python benchmarks/fit_costs.py h20                                                    # the paper's Table 3

`cpu` fits the measured profile's costs to real runs; `h20` fits compute efficiency and the costs of a step and of a
call in it to four of Table 3's makespans. Both minimise the squared logarithm of simulated over measured makespan,
from the packaged profile's constants on, and print the fields for `simulate/profiles.yaml`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from efficient_lmcache.simulate.against_run import compare_run
from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.deployment import simulate
from efficient_lmcache.simulate.paper import (
    FITTED_SEED,
    MODELS,
    h20_deployment,
    published_row,
    table_rows,
    workload_of,
)
from efficient_lmcache.simulate.profiles import Profile, load_profile
from efficient_lmcache.sizing.workload import open_workload

_CPU_FIELDS = ("step_s", "sequence_s", "token_s", "pair_s", "restored_token_s", "stored_token_s")
_GPU_FIELDS = ("step_s", "sequence_s", "compute_efficiency")
#: Rows of Table 3: recompute, 10 and 20 GiB at A = 16, recompute at A = 8.
_FITTED_ROWS = (0, 3, 4, 14)
_FIRST_STEP, _LAST_STEP = 0.4, 0.04  # of a constant's logarithm

#: Simulated over measured makespan of each run.
Ratios = Callable[[Profile], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cpu = commands.add_parser("cpu")
    cpu.add_argument("--trace", type=Path, required=True)
    cpu.add_argument("--model", type=Path, required=True)
    cpu.add_argument("--fit", type=Path, nargs="+", required=True)
    cpu.add_argument("--check", type=Path, nargs="*", default=[])
    commands.add_parser("h20")
    arguments = parser.parse_args()
    if arguments.command == "cpu":
        _fit_cpu(arguments)
    else:
        _fit_h20()


def _fit_cpu(arguments: argparse.Namespace) -> None:
    profile = load_profile("cpu")
    shape = ModelShape.of(MODELS["moe"])  # of no effect on a measured profile
    sizes = _sizes(arguments.fit[0])
    workload = open_workload(arguments.trace, sizes[0], gpu_block_tokens=sizes[1], most_block_references=10**9)

    def ratios(runs: Sequence[Path]) -> Ratios:
        def of(candidate: Profile) -> list[float]:
            made = costs(candidate, shape, 1)
            compared = [compare_run(run, workload, arguments.model, made) for run in runs]
            return [row.simulated.makespan_s / row.measured["makespan_s"] for row in compared]

        return of

    def with_values(values: Sequence[float]) -> Profile:
        return replace(profile, measured={**(profile.measured or {}), **dict(zip(_CPU_FIELDS, values, strict=True))})

    start = [max((profile.measured or {}).get(name, 0.0), 1e-9) for name in _CPU_FIELDS]
    found = _minimum(ratios(arguments.fit), with_values, start)
    _show(_CPU_FIELDS, found)
    for title, runs in (("fitted", arguments.fit), ("not seen", arguments.check)):
        for run, ratio in zip(runs, ratios(runs)(with_values(found)), strict=True):
            print(f"{title:<9}{run.name:<36}makespan {ratio - 1:+.1%}")


def _fit_h20() -> None:
    profile, shape, workload = load_profile("h20"), ModelShape.of(MODELS["moe"]), workload_of(FITTED_SEED)
    rows = table_rows("table3")

    def ratio(candidate: Profile, number: int) -> float:
        pool, configuration = rows[number]
        made = simulate(workload, h20_deployment(pool, costs(candidate, shape, 8)), configuration)
        return made.makespan_s / published_row("table3", number)["makespan_s"]

    def with_values(values: Sequence[float]) -> Profile:
        return replace(profile, **dict(zip(_GPU_FIELDS, values, strict=True)))

    start = [max(getattr(profile, name), 1e-4) for name in _GPU_FIELDS]
    found = _minimum(lambda candidate: [ratio(candidate, row) for row in _FITTED_ROWS], with_values, start)
    _show(_GPU_FIELDS, found)
    for number in range(len(rows)):
        title = "fitted" if number in _FITTED_ROWS else "not seen"
        print(f"{title:<9}row {number + 1:<4}makespan {ratio(with_values(found), number) - 1:+.1%}", flush=True)


def _minimum(ratios: Ratios, with_values: Callable[[Sequence[float]], Profile], start: list[float]) -> list[float]:
    """One constant after the other is raised and lowered by a step that shrinks when nothing helps any more."""
    tried = 0

    def error(values: Sequence[float]) -> float:
        nonlocal tried
        tried += 1
        missed = sum(math.log(ratio) ** 2 for ratio in ratios(with_values(values)))
        print(f"\r{tried} tried, root of the sum of squares {math.sqrt(missed):.4f}", end="", flush=True)
        return missed

    best, values, step = error(start), list(start), _FIRST_STEP
    while step > _LAST_STEP:
        before = best
        for place, sign in product(range(len(values)), (1, -1)):
            candidate = [*values[:place], values[place] * math.exp(sign * step), *values[place + 1 :]]
            if (missed := error(candidate)) < best:
                best, values = missed, candidate
        if best == before:
            step /= 2
    print()
    return values


def _show(fields: Sequence[str], values: Sequence[float]) -> None:
    for field, value in zip(fields, values, strict=True):
        print(f"  {field}: {value:.3g}")


def _sizes(run: Path) -> tuple[int, int]:
    options = json.loads((run / "run.json").read_text())["options"]
    return options["chunk_tokens"], options["block_tokens"]


if __name__ == "__main__":
    main()
