"""Holds the simulator's host tier against LMCache's, given the very order of lookups and stores that a run's log has.

    python benchmarks/tier_in_order.py --trace runs/miniature/agents.trace runs/miniature/sweep/runs/*

Takes runs of our connector in front of LMCache's CPU tier, whose server.log has LMCache's lines of level INFO; others
are left out. What is left to differ is the tier alone: no time, no scheduler, no cache of a GPU.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from efficient_lmcache.core.references import Ints
from efficient_lmcache.simulate.recorded_run import RecordedRun, recorded_runs
from efficient_lmcache.sizing.policy_tier import HostTier
from efficient_lmcache.sizing.workload import Workload, open_workload

_LOOKUP = re.compile(r"Reqid: (\S+), Total tokens (\d+), .*LMCache hit tokens: (\d+)")
_STORE = re.compile(r"\[req_id=(\S+)\] Stored (\d+) out of total")


class Event(NamedTuple):
    """A line of the log: a lookup's prompt tokens and those it found, or a store's tokens and -1."""

    request: str
    tokens: int
    found_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--trace", type=Path, required=True)
    arguments = parser.parse_args()
    workloads: dict[int, Workload] = {}
    for run in (each for path in arguments.runs for each in recorded_runs(path)):
        chunk_tokens = run.options.chunk_tokens
        if chunk_tokens not in workloads:
            workloads[chunk_tokens] = open_workload(arguments.trace, chunk_tokens)
        decisions = list(run.decisions(workloads[chunk_tokens]))
        if decisions:
            equal, lookups = replayed(run, decisions, workloads[chunk_tokens])
            print(f"{run.path.name:<28}{equal:>6} of {lookups} host matches are the run's: {equal / lookups:.1%}")


def replayed(run: RecordedRun, decisions: list[tuple[int, dict[str, Any]]], workload: Workload) -> tuple[int, int]:
    """How many first lookups found what LMCache's found, and how many there were."""
    chunks, calls = workload.chunks, {row["request_id"]: call for call, row in decisions}
    _, first = decisions[0]
    capacity_chunks = first["capacity_bytes"] // (chunks.chunk_tokens * first["estimate"]["bytes_per_token"])
    tier = HostTier(capacity_chunks, int(chunks.keys.max()) + 1)
    stored: dict[str, int] = {}
    equal = 0
    for request, tokens, found_tokens in _events(run.path / "server.log"):
        keys = chunks.call_keys(calls[request])
        if found_tokens < 0:
            stored[request] = _store(tier, keys, stored[request], tokens // chunks.chunk_tokens)
        elif request not in stored:
            found = tier.match(keys[: tokens // chunks.chunk_tokens])
            tier.use(keys[:found][::-1])
            stored[request] = found
            equal += found * chunks.chunk_tokens == found_tokens
    return equal, len(stored)


def _store(tier: HostTier, keys: Ints, first: int, count: int) -> int:
    """Store so many absent chunks from `first` on, each looked for once those before it have made room. Returns where
    the next ones begin."""
    place = first
    while count and place < len(keys):
        inserted, _ = tier.store(keys[place : place + 1])
        count -= inserted
        place += 1
    return place


def _events(log: Path) -> Iterator[Event]:
    for line in log.read_text(errors="replace").splitlines():
        if match := _LOOKUP.search(line):
            yield Event(match[1], int(match[2]), int(match[3]))
        elif match := _STORE.search(line):
            yield Event(match[1], int(match[2]), -1)


if __name__ == "__main__":
    main()
