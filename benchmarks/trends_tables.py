"""The sources' values beside the simulator's, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import trends_one_gpu as one_gpu

Row = dict[str, Any]

# Seed 000, Tables 17, 18, 21, 26, 28 and 43: hit rates by agents, of the synthetic traffic's first seed.
CLIFFS: dict[tuple[str, str], dict[int, float]] = {
    ("Qwen3-8B", "synthetic"): {12: 0.93, 16: 0.84, 24: 0.59, 32: 0.55, 48: 0.52},
    ("Qwen3-8B", "AgentX"): {4: 0.93, 8: 0.42, 12: 0.0, 24: 0.0},
    ("Qwen3.5-9B", "synthetic"): {32: 0.91, 48: 0.66},
    ("Qwen3.5-9B", "AgentX"): {12: 0.94, 16: 0.72},
}
NAPKINS = {
    ("Qwen3-8B", "synthetic"): 13.2,
    ("Qwen3-8B", "AgentX"): 6.6,
    ("Qwen3.5-9B", "synthetic"): 31.4,
    ("Qwen3.5-9B", "AgentX"): 15.0,
}
WAITS_S = {("Qwen3-8B", "AgentX", 12): 86.0, ("Qwen3-8B", "AgentX", 24): 238.0, ("Qwen3-8B", "synthetic", 24): 41.0}
RUNNING = {("Qwen3-8B", "AgentX", 12): 5.1, ("Qwen3-8B", "AgentX", 24): 5.2, ("Qwen3-8B", "synthetic", 24): 14.7}
SHARING = {0.0: (0.0, 186.0), 0.5: (0.24, 133.0), 1.0: (0.59, 42.0)}  # Table 28: hit rate, median wait
SALT = {(1, 1.0): 13.2, (2, 1.0): 12.1, (4, 1.0): 10.0, (1, 0.0): 6.9}  # Table 30, and Table 28's first row
_SMALL, _SLOTS = "Qwen3-8B", "Qwen3.5-9B, 256 state slots"
TIERS: dict[tuple[str, float, str], dict[int, float]] = {  # Tables 43 and 44
    (_SMALL, 0.0, "write-through"): {16: 0.87, 32: 0.55, 48: 0.52, 64: 0.59},
    (_SMALL, 1.0, "write-through"): {16: 0.88, 32: 0.57, 48: 0.53, 64: 0.61},
    (_SMALL, 2.0, "write-through"): {16: 0.94, 32: 0.91, 48: 0.71, 64: 0.65},
    (_SMALL, 1.0, "write-back"): {},
    (_SMALL, 2.0, "write-back"): {48: 0.90},
    (_SMALL, 1.0, "LMCache"): {},
    (_SMALL, 2.0, "LMCache"): {},
    (_SLOTS, 0.0, "write-through"): {48: 0.79, 64: 0.56},
    (_SLOTS, 1.0, "write-through"): {16: 0.93, 32: 0.94, 48: 0.88, 64: 0.68, 96: 0.59},
    (_SLOTS, 2.0, "write-through"): {16: 0.93, 32: 0.94, 48: 0.94, 64: 0.94, 96: 0.93},
}
_FALL = 0.95


def select(rows: Iterable[Row], study: str, **fields: Any) -> list[Row]:
    """A study's rows with these fields, in their order."""
    wanted = {"study": study, **fields}
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def cliff(sweep: Iterable[Row]) -> float:
    """At how many agents the hit rate is 5 % below what few agents have, between two points of the sweep."""
    rows = sorted(sweep, key=lambda row: row["agents"])
    edge = _FALL * rows[0]["hit_rate"]
    for before, after in pairwise(rows):
        if after["hit_rate"] < edge:
            share = (before["hit_rate"] - edge) / (before["hit_rate"] - after["hit_rate"])
            return float(before["agents"] + share * (after["agents"] - before["agents"]))
    return float("inf")


def tables(rows: list[Row]) -> Iterator[str]:
    """Those of the studies that are there."""
    for study, table in {
        "cliff": _cliff_table,
        "sharing": _sharing_table,
        "salt": _salt_table,
        "tier": _tier_table,
        "retention": _retention_table,
        "routing": _routing_table,
        "link": _link_table,
    }.items():
        if select(rows, study):
            yield from table(rows)
            yield ""


def _cliff_table(rows: list[Row]) -> Iterator[str]:
    yield "| Table 17 | napkin: source | simulated context | cliff simulated | agents: hit rate, source → simulated |"
    yield "|---|---|---|---|---|"
    for key, published in CLIFFS.items():
        sweep = select(rows, "cliff", server=key[0], traffic=key[1])
        pool = next(s.pool_tokens for s in (one_gpu.QWEN3_8B, one_gpu.QWEN35_9B) if s.name == key[0])
        shared = one_gpu.SYSTEM_TOKENS if key[1] == "synthetic" else 0
        napkin = one_gpu.napkin(pool, fmean(row["context_tokens"] for row in sweep), shared)
        points = "; ".join(_pair(agents, value, sweep) for agents, value in published.items())
        yield f"| {key[0]}, {key[1]} | {NAPKINS[key]} | {napkin:.1f} | {cliff(sweep):.1f} | {points} |"
    yield ""
    yield "| past the cliff | running: source → simulated | median wait, s: source → simulated |"
    yield "|---|---|---|"
    for (server, traffic, agents), running in RUNNING.items():
        (row,) = select(rows, "cliff", server=server, traffic=traffic, agents=agents)
        waits_s = f"{WAITS_S[server, traffic, agents]:.0f} → {row['wait_p50_s']:.0f}"
        yield f"| {server}, {traffic}, {agents} | {running} → {row['running']:.1f} | {waits_s} |"


def _sharing_table(rows: list[Row]) -> Iterator[str]:
    yield "| agents that share the prompt | hit rate: source → simulated | median wait, s: source → simulated |"
    yield "|---|---|---|"
    for row in select(rows, "sharing"):
        hit, wait_s = SHARING[row["sharing"]]
        yield f"| {row['sharing']:.0%} | {hit:.0%} → {row['hit_rate']:.0%} | {wait_s:.0f} → {row['wait_p50_s']:.0f} |"


def _salt_table(rows: list[Row]) -> Iterator[str]:
    yield "| salt | napkin (Tables 28, 30) | cliff simulated | residual |"
    yield "|---|---|---|---|"
    for (customers, sharing), napkin in SALT.items():
        found = cliff(select(rows, "salt", customers=customers, sharing=sharing))
        name = f"customers: {customers}" if sharing else "each session"
        yield f"| {name} | {napkin} | {found:.1f} | {found / napkin - 1:+.0%} |"


def _tier_table(rows: list[Row]) -> Iterator[str]:
    yield "| host tier | agents: hit rate, source → simulated |"
    yield "|---|---|"
    for (server, ratio, policy), published in TIERS.items():
        sweep = select(rows, "tier", server=server, ratio=ratio, policy=policy)
        name = f"{ratio:.0f} × GPU pool, {policy}" if ratio else "none"
        points = "; ".join(_pair(row["agents"], published.get(row["agents"]), sweep) for row in sweep)
        yield f"| {server}, {name} | {points} |"


def _pair(agents: int, published: float | None, sweep: list[Row]) -> str:
    (row,) = select(sweep, sweep[0]["study"], agents=agents)
    source = "–" if published is None else f"{published:.0%}"
    return f"{agents}: {source} → {row['hit_rate']:.0%}"


def _retention_table(rows: list[Row]) -> Iterator[str]:
    yield "| retention | token hit rate | p99 TTFT, s | p90 latency, s | tokens/s | held a node, TB |"
    yield "|---|---|---|---|---|---|"
    for row in select(rows, "retention"):
        yield (
            f"| {row['retention_s'] / 60:.0f} min | {row['tier_hit_rate']:.1%} | {row['ttft_p99_s']:.1f} "
            f"| {row['latency_p90_s']:.1f} | {row['output_per_s']:.1f} | {row['held_tb']:.2f} |"
        )


def _routing_table(rows: list[Row]) -> Iterator[str]:
    yield "| sessions/h | cache, route | hits, near hits | imbalance | running | p90 latency, s | tok/s | held, TB |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in select(rows, "routing"):
        name = f"{'shared' if row['shared'] else 'local'}, by {row['route']}"
        yield (
            f"| {row['per_hour_and_node']:.1f} | {name} | {row['request_hit_rate']:.0%}, {row['near_hit_rate']:.0%} "
            f"| {row['imbalance']:.2f} | {row['running']:.1f} | {row['latency_p90_s']:.1f} "
            f"| {row['output_per_s']:.1f} | {row['held_tb']:.2f} |"
        )


def _link_table(rows: list[Row]) -> Iterator[str]:
    yield "| link, GB/s | of the mean demand | p99 TTFT, s | mean TTFT, s | p90 latency, s |"
    yield "|---|---|---|---|---|"
    free, *limited = select(rows, "link")
    for row in (*limited, free):
        link_gb_s = row["link_gb_s"]
        link = f"{link_gb_s:.2f} | {link_gb_s / free['read_gb_s']:.1f}" if link_gb_s else "unlimited | –"
        yield f"| {link} | {row['ttft_p99_s']:.2f} | {row['ttft_mean_s']:.2f} | {row['latency_p90_s']:.1f} |"


def by(rows: Iterable[Row], *names: str) -> Mapping[tuple[Any, ...], list[Row]]:
    """Rows in groups of equal fields."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
