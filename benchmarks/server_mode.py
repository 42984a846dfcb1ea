"""Runs in LMCache's server mode side by side, and what several engines shared: from run directories alone.

    python benchmarks/server_mode.py RUN... --trace TRACE

Prints one row per run; then, of every run with several engines, how much of their cached prompts other engines had
computed, and A and N as its decisions saw them against what the driver sent.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from efficient_lmcache.replay.compare import compare
from efficient_lmcache.replay.rundir import RunDirectory, read_record
from efficient_lmcache.replay.trace import TraceReader

PROMPT_WINDOW_LOOKUPS = 256  # Table 7
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--trace", type=Path, required=True)
    arguments = parser.parse_args()
    print_table(arguments.runs)
    for path in arguments.runs:
        record = read_record(path)
        if len(record["engines"]) > 1:
            print(f"\n{path.name}: {len(record['engines'])} engines, route {record['options']['route']}")
            print_engines(record)
            print_cross_engine_hits(path, record, arguments.trace)
            print_pool(path, record)


def print_table(runs: list[Path]) -> None:
    columns = "γ_H|mode|connector|admission|computed prefill, M|÷ offload|stored, M|restored, M|dropped chunks|declined"
    cells = [*columns.split("|"), "makespan s", "exact"]
    print("| " + " | ".join(cells) + " |\n|" + "---|" * len(cells))
    for row in compare(runs):
        record = read_record(Path(row["run"]))
        mode = row["mode"] + (", lazy" if record["options"].get("lazy_offload") else "")
        cells = [
            "–" if row["gamma_h"] is None else f"{row['gamma_h']:.2f}",
            mode if row["admission"] != "recompute" else "–",
            row["connector"],
            row["admission"],
            *(millions(row["computed_prefill_tokens"]), number(row["computed_prefill_tokens_to_offload"], ".2f")),
            *(millions(row["stored_tokens_per_rank"]), millions(row["restored_tokens_per_rank"])),
            number(record["dropped_chunks_per_rank"], "d"),
            f"{row['declined']}/{row['decisions']}" if row["decisions"] else "–",
            number(row["makespan_s"], ".0f"),
            f"{row['outputs_exact']}/{row['calls']}",
        ]
        print("| " + " | ".join(cells) + " |")


def print_engines(record: Row) -> None:
    for name, engine in enumerate(record["engines"]):
        print(
            f"  engine {name}: {engine['answered']} calls, computed {millions(engine['computed_prefill_tokens'])} M, "
            f"restored {millions(engine['restored_tokens_per_rank'])} M"
        )


def print_cross_engine_hits(path: Path, record: Row, trace: Path) -> None:
    """Cached tokens that the engine had never been sent: another one computed and stored them.

    A lower bound, since an engine may also restore from others what it has been sent and has lost.
    """
    block_tokens = record["options"]["block_tokens"]
    seen: dict[int, set[bytes]] = defaultdict(set)
    crossing_tokens = cached_tokens = crossing_calls = calls = 0
    prompts = {(task, call): keys for task, call, keys in block_keys(trace, block_tokens)}
    for row in sorted(answered_calls(path), key=lambda row: float(row["dispatched_s"])):
        keys = prompts[row["task"], row["call"]]
        own = seen[row["engine"]]
        known_tokens = block_tokens * next((i for i, key in enumerate(keys) if key not in own), len(keys))
        crossed = max(0, row["cached_tokens"] - known_tokens)
        crossing_tokens += crossed
        crossing_calls += crossed > 0
        cached_tokens += row["cached_tokens"]
        calls += 1
        own.update(keys)
    print(
        f"  hits across engines: at least {crossing_tokens} tokens in {crossing_calls} of {calls} calls, "
        f"{crossing_tokens / max(1, cached_tokens):.0%} of all cached tokens, "
        f"{crossing_tokens / max(1, record['restored_tokens_per_rank']):.0%} of the restored ones"
    )


def block_keys(trace: Path, block_tokens: int) -> Iterator[tuple[str, int, list[bytes]]]:
    """Of every call, a key for each of its prompt's full blocks, of the whole prefix."""
    with TraceReader(trace) as reader:
        for index, task in enumerate(reader.tasks):
            for number, call in enumerate(reader.calls(index)):
                key, keys = b"", []
                for start in range(0, len(call.prompt_tokens) - block_tokens + 1, block_tokens):
                    block = call.prompt_tokens[start : start + block_tokens]
                    key = hashlib.blake2b(key + block.tobytes(), digest_size=16).digest()
                    keys.append(key)
                yield task.task_id, number, keys


@dataclass(frozen=True, slots=True)
class Seen:
    """A and N at one decision: as it was taken, and as the driver's log has them."""

    at_s: float
    active_pool: int
    true_active_pool: int
    mean_prompt_tokens: float
    true_mean_prompt_tokens: float


def print_pool(path: Path, record: Row) -> None:
    """After the first window: before, the pool is not yet what it will be."""
    window_s = record["options"]["activity_window_s"] or 60.0
    decisions = [each for each in seen_pools(path, window_s) if each.at_s > window_s]
    if not decisions:
        print("  no decisions after the first activity window")
        return
    for name, pairs in (
        ("A", [(each.active_pool, each.true_active_pool) for each in decisions]),
        ("N", [(each.mean_prompt_tokens, each.true_mean_prompt_tokens) for each in decisions]),
    ):
        means = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
        errors = sorted(abs(estimate / true - 1) for estimate, true in pairs)
        print(
            f"  {name} at {len(pairs)} decisions: mean {means[0]:.1f}, true {means[1]:.1f} "
            f"({means[0] / means[1] - 1:+.1%}); error of one decision: mean {fmean(errors):.1%}, "
            f"95th percentile {errors[len(errors) * 95 // 100]:.1%}"
        )


def seen_pools(path: Path, window_s: float) -> Iterator[Seen]:
    """The k-th decision on a task is that on its k-th call, and a call is looked up when it is sent."""
    calls = sorted(answered_calls(path), key=lambda row: float(row["dispatched_s"]))
    estimates: dict[str, deque[Row]] = defaultdict(deque)
    for decision in RunDirectory(path).decision_rows():
        estimates[decision["task"]].append(decision["estimate"])
    sent_s: dict[str, float] = {}
    prompts: deque[int] = deque(maxlen=PROMPT_WINDOW_LOOKUPS)
    for row in calls:
        at_s = float(row["dispatched_s"])
        sent_s[row["task"]] = at_s
        prompts.append(row["prompt_tokens"])
        if not estimates[row["task"]]:
            continue
        estimate = estimates[row["task"]].popleft()
        active = sum(at_s - last_s <= window_s for last_s in sent_s.values())
        yield Seen(at_s, estimate["active_pool"], active, estimate["mean_prompt_tokens"], fmean(prompts))


def answered_calls(path: Path) -> list[Row]:
    rows = [json.loads(line) for line in RunDirectory(path).calls.read_text().splitlines()]
    return [row for row in rows if row["status"] == "answered"]


def millions(tokens: int | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e6:.3f}"


def number(value: float | None, pattern: str) -> str:
    return "–" if value is None else format(value, pattern)


if __name__ == "__main__":
    main()
