"""How fast the simulator is: time on one core, as a ratio to the time that it models.

    python benchmarks/simulate_speed.py [--weka shared/traces/agentic-weka.jsonl.gz] [--sessions 300] [--json]

The paper's replay (4,427 calls, 147 M prompt tokens) under four of Table 3's configurations, and with --weka real
sessions with sub-agents on eight engines routed by load behind one tier. Compilation is not counted: a first small run
does it. The ratio is to processor time, which is what an undisturbed core would take.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.deployment import Configuration, Deployment, Simulated, simulate
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.paper import MODELS, h20_deployment, table_rows, workload_of
from efficient_lmcache.simulate.paper_order import FITTED_SEED
from efficient_lmcache.simulate.paper_workload import paper_workload
from efficient_lmcache.simulate.profiles import load_profile
from efficient_lmcache.simulate.simulation import Pool
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload, open_workload

Run = Callable[[], Simulated]
_ROWS = (0, 3, 4, 11)
_ENGINES, _POOL, _TP, _GPU_KV_TOKENS, _HOST_GIB = 8, 64, 8, 1_000_000, 200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weka", type=Path)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name, run in _runs(arguments):
        started_s = time.process_time()
        made = run()
        cpu_s = time.process_time() - started_s
        row = {
            "name": name,
            "calls": made.calls,
            "prompt_tokens": made.prompt_tokens,
            "cpu_s": cpu_s,
            "wall_s": made.wall_s,
            "makespan_s": made.makespan_s,
            "speedup": made.makespan_s / cpu_s,
        }
        rows.append(row)
        if not arguments.json:
            print(
                f"{name:<44}{made.calls:>7,} calls{made.prompt_tokens / 1e6:>9,.0f} M tokens"
                f"{cpu_s:>8.1f} s ({made.wall_s:.1f} with waits) for {made.makespan_s / 60:>7.0f} min:"
                f"{row['speedup']:>9,.0f} x",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))


def _runs(arguments: argparse.Namespace) -> Iterator[tuple[str, Run]]:
    yield from _paper()
    if arguments.weka:
        yield _weka(arguments.weka, arguments.sessions)


def _paper() -> Iterator[tuple[str, Run]]:
    workload = workload_of(FITTED_SEED)
    _compile()
    for number in _ROWS:
        pool, configuration = table_rows("table3")[number]
        yield (
            f"paper, A = {pool}, {_named(configuration)}",
            partial(simulate, workload, h20_deployment(pool), configuration),
        )


def _weka(path: Path, sessions: int) -> tuple[str, Run]:
    print("reading sessions", file=sys.stderr)
    whole = open_workload(path, 1024, gpu_block_tokens=64, most_block_references=10**9)
    workload = _first_sessions(whole, sessions)
    deployment = Deployment(
        EngineSettings(_GPU_KV_TOKENS, 64, 8192),
        costs(load_profile("h20"), ModelShape.of(MODELS["moe"]), _TP),
        ModelShape.of(MODELS["moe"]).footprint.bytes_per_token_per_rank(_TP),
        Pool(_POOL),
        engines=_ENGINES,
        shared_tier=True,
    )
    configuration = Configuration(_HOST_GIB, Admission("conditioned"))
    name = f"Weka, {sessions} sessions, A = {_POOL}, {_ENGINES} engines"
    return name, partial(simulate, workload, deployment, configuration)


def _first_sessions(workload: Workload, sessions: int) -> Workload:
    """The calls up to the first one of a later session."""
    later = (workload.chunks.session >= sessions).nonzero()[0]
    end = int(later[0]) if len(later) else len(workload.chunks)
    return Workload(workload.chunks.between(0, end), workload.blocks.between(0, end), workload.name, workload.notes)


def _named(configuration: Configuration) -> str:
    return f"{configuration.name} {configuration.host_gib:g} GiB" if configuration.host_gib else configuration.name


def _compile() -> None:
    small = Workload.of(paper_workload(0, 1024).between(0, 40), 1024, gpu_block_tokens=1024)
    simulate(small, h20_deployment(2), Configuration(1.0))


if __name__ == "__main__":
    main()
