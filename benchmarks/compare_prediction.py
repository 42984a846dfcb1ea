"""Holds what `plan --json` predicted against what `replay run` then measured, run by run.

    efficient-lmcache plan --trace T … --host-gib G… --json > prediction.json       # before the runs
    efficient-lmcache replay run --trace T --admission none --host-gib G …          # for every G
    python benchmarks/compare_prediction.py prediction.json --trace T --runs RUN... [--gpu-block-tokens 128]

The last column separates the two halves of the model: it is what the cache model says of the *measured* order of
lookups, so that only the rest of a miss is the pool model's.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache.core.coverage import covered_tokens_at
from efficient_lmcache.core.references import Ints
from efficient_lmcache.replay.trace import TraceReader
from efficient_lmcache.sizing.policy_tier import serve
from efficient_lmcache.sizing.prediction import capacity_chunks
from efficient_lmcache.sizing.workload import Workload, open_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prediction", type=Path)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--gpu-block-tokens", type=int, default=128)
    arguments = parser.parse_args()
    prediction = json.loads(arguments.prediction.read_text())
    rows = {row["host_gib"]: row for row in prediction["curve"]}
    print(f"Predicted {prediction['created_utc']}.\n")
    print(
        "| A | host MiB | γ_H | computed: predicted | measured | | restored: predicted | measured | measured order |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for directory in sorted(arguments.runs, key=lambda path: _run(path)["host_gib_per_rank"]):
        run = _run(directory)
        if run["host_gib_per_rank"] not in rows:
            raise SystemExit(
                f"{directory}: ran with {run['host_gib_per_rank']} GiB, which {arguments.prediction} lacks"
            )
        _print_row(run, rows[run["host_gib_per_rank"]], _in_measured_order(directory, run, arguments))


def _run(directory: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((directory / "run.json").read_text())
    return run


def _print_row(run: dict[str, Any], row: dict[str, Any], in_order: int) -> None:
    computed, restored = run["computed_prefill_tokens"], run["restored_tokens_per_rank"]
    low, high = row["computed_prefill_tokens_range"]
    verdict = "inside" if low <= computed <= high else f"{computed / row['computed_prefill_tokens'] - 1:+.1%}"
    cells = [
        str(run["active_pool"]),
        f"{run['host_gib_per_rank'] * 1024:.0f}",
        f"{run['working_set']['gamma_h']:.2f}",
        _range(row, "computed_prefill_tokens"),
        _millions(computed),
        verdict,
        _range(row, "restored_tokens"),
        _millions(restored),
        _millions(in_order),
    ]
    print("| " + " | ".join(cells) + " |")


def _in_measured_order(directory: Path, run: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Computed prefill of the cache model in the order of the run's lookups."""
    options = run["options"]
    workload = _workload(arguments.trace, options["chunk_tokens"], arguments.gpu_block_tokens)
    order = _order(directory, arguments.trace, workload)
    chunks, blocks = workload.chunks.reordered(order), workload.blocks.reordered(order)
    bytes_per_token = json.loads((directory / "decisions.jsonl").open().readline())["estimate"]["bytes_per_token"]
    capacity = capacity_chunks(run["host_gib_per_rank"], options["chunk_tokens"], bytes_per_token)
    last = chunks.prompt_tokens - 1
    gpu = covered_tokens_at(blocks, options["gpu_kv_tokens"] // blocks.chunk_tokens)
    gpu = np.minimum(gpu, last // blocks.chunk_tokens * blocks.chunk_tokens)
    host = np.minimum(serve(chunks, capacity).covered_tokens, last)
    return int((chunks.prompt_tokens - np.maximum(host, gpu)).sum())


@cache
def _workload(trace: Path, chunk_tokens: int, gpu_block_tokens: int) -> Workload:
    return open_workload(trace, chunk_tokens, gpu_block_tokens=gpu_block_tokens)


def _order(directory: Path, trace: Path, workload: Workload) -> Ints:
    """The stream's calls in the order of their first lookups."""
    with TraceReader(trace) as reader:
        lanes = {task.task_id: lane for lane, task in enumerate(reader.tasks)}
    calls = {lane: deque(np.flatnonzero(workload.chunks.lane == lane).tolist()) for lane in lanes.values()}
    with (directory / "decisions.jsonl").open() as rows:
        return np.array([calls[lanes[json.loads(row)["task"]]].popleft() for row in rows], np.int64)


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:.3f}"


def _range(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_range"]
    return f"{_millions(row[name])} ({_millions(low)} – {_millions(high)})"


if __name__ == "__main__":
    main()
