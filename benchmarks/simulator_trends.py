"""Does the simulator reproduce what two other studies of agents and KV caches found? Trends, not absolute times.

    python benchmarks/simulator_trends.py --trace WEKA.jsonl.gz [--out trends.json] [--figures docs/images]

    one GPU     session cliffs, inclusive and exclusive host tiers, what a salt costs  (trends_one_gpu)
    cluster     retention, local and shared caches under two routers, the link's bandwidth  (trends_cluster)

Three minutes on two cores. Tables are printed as they stand in docs/simulator-trends.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trends_cluster as cluster
import trends_one_gpu as one_gpu
from trends_tables import tables

from efficient_lmcache.sizing.workload import Workload

_SERVERS = {server.name: server for server in (one_gpu.QWEN3_8B, one_gpu.QWEN35_9B, one_gpu.QWEN35_9B_256)}
_CLUSTER_SESSIONS = 40
_RATE = 8.0  # sessions an hour and engine
_RATES = (4.0, 16.0, 64.0)
#: Of each study. The source has two of the synthetic sweep, and one of the others.
SEEDS = {"cliff": 2, "sharing": 1, "salt": 1, "tier": 1, "retention": 1, "routing": 1, "link": 1}
STUDIES = list(SEEDS)
_LINK_MULTIPLES = (1.0, 1.7, 3.0, 6.4, 12.0)


@dataclass(frozen=True, slots=True)
class GpuPoint:
    """One GPU's configuration; a study of its own on each seed."""

    study: str
    server: str
    traffic: str
    agents: int
    ratio: float = 0.0
    policy: str = "write-through"
    customers: int = 1
    sharing: float = 1.0

    def run(self, trace: Path, seed: int) -> one_gpu.Point:
        """On one seed's sessions."""
        server = _SERVERS[self.server]
        if self.traffic == "synthetic":
            # Two sessions of an agent last longer than the window but for a few; they take half the time of four.
            per_agent = 4 if self.study == "cliff" else 2
            workload = one_gpu.synthetic(
                self.agents, seed, customers=self.customers, sharing=self.sharing, per_agent=per_agent
            )
        else:
            workload = one_gpu.recorded(fitting_sessions(trace), self.agents, seed)
        tier = one_gpu.host_tier(workload, server, self.ratio, self.policy) if self.ratio else None
        return one_gpu.measure(workload, server, self.agents, tier)


@dataclass(frozen=True, slots=True)
class ClusterPoint:
    """The cluster's configuration."""

    study: str
    per_hour_and_node: float = _RATE
    shared: bool = True
    route: str = "load"
    retention_s: float = cluster.HOUR_S
    link_gb_s: float | None = None
    local_bytes: float = 0.0

    def run(self, trace: Path, seed: int) -> cluster.Row:
        """On one seed's arrivals."""
        workload = cluster.arriving(first_sessions(trace), self.per_hour_and_node, seed)
        return cluster.simulate_cluster(
            workload,
            shared=self.shared,
            route=self.route,
            retention_s=self.retention_s,
            link_gb_s=self.link_gb_s or math.inf,
            local_bytes=self.local_bytes,
        )


@cache
def fitting_sessions(trace: Path) -> Workload:
    """Those that one GPU's longest prompt allows."""
    return one_gpu.sessions_of(trace, one_gpu.PAGE_TOKENS, fits=one_gpu.LONGEST_PROMPT_TOKENS)


@cache
def first_sessions(trace: Path) -> Workload:
    """Those that the cluster serves."""
    return one_gpu.sessions_of(trace, cluster.CHUNK_TOKENS, first=_CLUSTER_SESSIONS)


def gpu_points() -> list[GpuPoint]:
    """Tables 17, 28, 30, 43 and 44."""
    small, large, slots = _SERVERS
    sweeps = {
        (small, "synthetic"): (4, 8, 12, 16, 24, 32, 48),
        (small, "AgentX"): (1, 2, 4, 8, 12, 24),
        (large, "synthetic"): (16, 24, 32, 48, 64),
        (large, "AgentX"): (4, 8, 12, 16, 24),
    }
    points = [GpuPoint("cliff", *key, agents) for key, sweep in sweeps.items() for agents in sweep]
    points += [GpuPoint("sharing", small, "synthetic", 24, sharing=share) for share in (0.0, 0.5, 1.0)]
    salted: list[dict[str, Any]] = [{"customers": 1}, {"customers": 2}, {"customers": 4}, {"sharing": 0.0}]
    points += [GpuPoint("salt", small, "synthetic", agents, **salt) for agents in range(4, 19, 2) for salt in salted]
    tiers = [(0.0, "write-through"), *((ratio, policy) for ratio in (1.0, 2.0) for policy in one_gpu.POLICIES)]
    for ratio, policy in tiers:
        tier: dict[str, Any] = {"ratio": ratio, "policy": policy}
        points += [GpuPoint("tier", small, "synthetic", agents, **tier) for agents in (16, 32, 48)]
        if policy == "write-through":
            points += [GpuPoint("tier", slots, "synthetic", agents, **tier) for agents in (48, 64)]
    return points


def cluster_points() -> list[ClusterPoint]:
    """Figures 4 to 6 and section 5; the links follow from the demand, so they come after the first."""
    points = [ClusterPoint("retention", retention_s=seconds) for seconds in cluster.RETENTIONS_S]
    routes = ((True, "load"), (False, "load"), (False, "session"))
    points += [ClusterPoint("routing", rate, shared, route) for rate in _RATES for shared, route in routes]
    return [*points, ClusterPoint("link", local_bytes=cluster.LOCAL_BYTES)]


def link_points(demand_gb_s: float) -> list[ClusterPoint]:
    """Links of so many times the mean demand."""
    return [
        ClusterPoint("link", link_gb_s=multiple * demand_gb_s, local_bytes=cluster.LOCAL_BYTES)
        for multiple in _LINK_MULTIPLES
    ]


Points = Sequence[GpuPoint | ClusterPoint]


def _read_before_workers(points: Points, trace: Path) -> None:
    """They inherit it."""
    if any(isinstance(point, ClusterPoint) for point in points):
        first_sessions(trace)
    if any(isinstance(point, GpuPoint) and point.traffic != "synthetic" for point in points):
        fitting_sessions(trace)


def run_all(points: Points, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every point's mean over its study's seeds: what was set, and what came out."""
    jobs = [(point, seed) for point in points for seed in range(SEEDS[point.study])]
    _read_before_workers(points, arguments.trace)
    found: dict[Any, list[Any]] = {}
    started_s = time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        futures = {pool.submit(_run, point, arguments.trace, seed): point for point, seed in jobs}
        for done, future in enumerate(as_completed(futures), start=1):
            found.setdefault(futures[future], []).append(future.result())
            elapsed_s = time.monotonic() - started_s
            print(f"\r{done} of {len(jobs)} simulations, {elapsed_s:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [{**asdict(point), **one_gpu.mean_of(found[point])._asdict()} for point in dict.fromkeys(futures.values())]


def _run(point: GpuPoint | ClusterPoint, trace: Path, seed: int) -> Any:
    return point.run(trace, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="agentic Weka sessions")
    parser.add_argument("--out", type=Path, default=Path("simulator-trends.json"))
    parser.add_argument("--figures", type=Path, help="a directory for PNGs")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=STUDIES, help="the others' rows stay in --out")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    rows = [row for row in rows if row["study"] not in arguments.only]
    every: Points = [*gpu_points(), *cluster_points()]
    points = [point for point in every if point.study in arguments.only]
    rows += run_all(points, arguments)
    if "link" in arguments.only:
        rows += run_all(link_points(rows[-1]["read_gb_s"]), arguments)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"wrote {arguments.out}")
    print("\n".join(tables(rows)))
    if arguments.figures:
        from trends_figures import write_figures

        write_figures(rows, arguments.figures)


if __name__ == "__main__":
    main()
