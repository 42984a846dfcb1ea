"""The whole capacity curve of a long recording, against other ways to get it, as ratios from one run.

    python benchmarks/stack_distance.py [--data DIR] [--order start|file] [--stride 256] [--json] [--only-exact]

The stream is traces/agentic-weka.jsonl.gz in blocks of 64 tokens, promoted tail first. The file has a clock per
session; by default all sessions begin together and their calls are sorted by it (`start`), so that distances are those
of a busy server; `file` leaves the sessions one after another. Decoding is not timed, nor is numba's compiler.

    seconds                     exact, best of five; one thread
    speedup_vs_python           a Fenwick tree in plain Python, by its rate over the last half million of the
                                first three million references
    speedup_vs_numba_fenwick    the same tree compiled, over the whole stream and to the same curve
    speedup_vs_libcachesim_8    its LRU at eight capacities, reading 8-byte numbers from a file; hits are compared
    speedup_vs_kvcache_simulator_8    the C++ core of kvcache-simulator at the same capacities, without its reading of
                                JSON; it measures the last half of the calls, whose coverage is compared
                                where the tier is larger than a call
    sampled_speedup, sampled_max_error    one block in `stride`: exact seconds to its own, and the largest difference
                                of covered tokens from the exact curve's, as a share of prompt tokens

Packages that are not installed are skipped, and null in JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache.core.coverage import CapacityCurve, capacity_curve, covered_tokens_at
from efficient_lmcache.core.references import References
from efficient_lmcache.core.sampling import SampledCurve, fixed_rate_curve
from efficient_lmcache.core.stackdistance import PromotionOrder, reference_distances
from efficient_lmcache.sizing.streams import open_stream

PYTHON_REFERENCES = 3_000_000
PYTHON_TIMED = 500_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("EFFICIENT_LMCACHE_DATA", Path(__file__).parents[2] / "shared")
    parser.add_argument("--data", type=Path, default=Path(default), help="folder with traces/agentic-weka.jsonl.gz")
    parser.add_argument("--order", choices=["start", "file"], default="start")
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-exact", action="store_true", help="time neither peers nor slower methods of our own")
    arguments = parser.parse_args()
    path = arguments.data / "traces" / "agentic-weka.jsonl.gz"
    if not path.is_file():
        print(f"error: no recording at {path}; --data or EFFICIENT_LMCACHE_DATA names its folder", file=sys.stderr)
        sys.exit(2)
    references = _stream(path, arguments.order)
    results = _measure(references, arguments.stride, arguments.only_exact)
    print(json.dumps(results) if arguments.json else _table(results))


def _stream(path: Path, order: str) -> References:
    references = References.concatenate(open_stream(path, 64))
    return references if order == "file" else references.reordered(np.argsort(references.start_s, kind="stable"))


def _measure(references: References, stride: int, only_exact: bool) -> dict[str, Any]:
    capacity_curve(references.reordered(np.arange(10)))
    fixed_rate_curve(references.reordered(np.arange(10)), stride)
    seconds, curve = _best(lambda: capacity_curve(references), 5)
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sampled_seconds, sampled = _best(lambda: fixed_rate_curve(references, stride), 5)
    results: dict[str, Any] = {
        "references": len(references.keys),
        "calls": len(references),
        "blocks": len(np.unique(references.keys)),
        "seconds": seconds,
        "peak_rss_bytes": peak_rss_bytes,
        "speedup_vs_python": None,
        "speedup_vs_numba_fenwick": None,
        "speedup_vs_libcachesim_8": None,
        "libcachesim_hits_equal": None,
        "speedup_vs_kvcache_simulator_8": None,
        "kvcache_simulator_hits_equal": None,
        "sampled_speedup": seconds / sampled_seconds,
        "sampled_seconds": sampled_seconds,
        "sampled_max_error": _largest_error(sampled, curve),
        "sampled_reported_error": sampled.max_error,
        "largest_effect_of_order": _effect_of_order(references, curve),
    }
    if not only_exact:
        results["speedup_vs_python"] = _python_seconds(references) / seconds
        results["speedup_vs_numba_fenwick"] = _fenwick_seconds(references, curve) / seconds
        capacities = [int(k) for k in np.geomspace(results["blocks"] / 256, results["blocks"] / 2, 8)]
        for name, measure in (("libcachesim", _libcachesim), ("kvcache_simulator", _kvcache_simulator)):
            peer = measure(references, capacities)
            if peer is not None:
                results[f"speedup_vs_{name}_8"] = peer[0] / seconds
                results[f"{name}_hits_equal"] = peer[1]
    return results


def _best(measured: Callable[[], Any], times: int) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(times):
        begin = time.perf_counter()
        result = measured()
        best = min(best, time.perf_counter() - begin)
    return best, result


def _largest_error(sampled: SampledCurve, curve: CapacityCurve) -> float:
    capacities = np.arange(len(curve.covered_tokens) + sampled.stride)
    entries = np.arange(len(sampled.covered_tokens))
    estimated = np.interp(capacities / sampled.stride, entries, sampled.covered_tokens)
    exact = curve.covered_tokens[np.minimum(capacities, len(curve.covered_tokens) - 1)]
    return float(np.abs(estimated - exact).max() / curve.prompt_tokens)


def _effect_of_order(references: References, curve: CapacityCurve) -> dict[str, float]:
    """Where covering differs most between the two orders of promotion, as a share of prompt tokens."""
    other = capacity_curve(references, order=PromotionOrder.HEAD_FIRST).covered_tokens
    capacities = np.arange(max(len(other), len(curve.covered_tokens)))
    tail_first, head_first = (
        tokens[np.minimum(capacities, len(tokens) - 1)] / curve.prompt_tokens
        for tokens in (curve.covered_tokens, other)
    )
    where = int(np.abs(tail_first - head_first).argmax())
    return {"blocks": where, "tail_first": float(tail_first[where]), "head_first": float(head_first[where])}


def _python_seconds(references: References) -> float:
    """Bennett and Kruskal (1975) for the whole stream, at its rate over the last of the first references.

    The first calls are of no use: their references are new, which costs least. So is the longer tree of the whole.
    """
    keys = references.keys[:PYTHON_REFERENCES].tolist()
    size = len(keys)
    tree = [0] * (size + 1)
    last: dict[int, int] = {}
    distances = []
    begin = time.perf_counter()
    for time_, key in enumerate(keys, start=1):
        if time_ == size - PYTHON_TIMED:
            begin = time.perf_counter()
        before = last.get(key)
        distance = 0
        if before is not None:
            node = time_ - 1
            while node > 0:
                distance += tree[node]
                node -= node & -node
            node = before
            while node > 0:
                distance -= tree[node]
                node -= node & -node
            node = before
            while node <= size:
                tree[node] -= 1
                node += node & -node
        node = time_
        while node <= size:
            tree[node] += 1
            node += node & -node
        last[key] = time_
        distances.append(distance)
    return (time.perf_counter() - begin) / PYTHON_TIMED * len(references.keys)


def _fenwick_seconds(references: References, curve: CapacityCurve) -> float:
    capacity_curve(references.reordered(np.arange(10)), by_reference=True)
    seconds, same = _best(lambda: capacity_curve(references, by_reference=True), 1)
    assert np.array_equal(same.covered_tokens, curve.covered_tokens)
    return seconds


def _libcachesim(references: References, capacities: list[int]) -> tuple[float, bool] | None:
    if importlib.util.find_spec("libcachesim") is None:
        return None
    import libcachesim

    distances = reference_distances(references)
    hits = [int((distances < capacity).sum()) for capacity in capacities]
    del distances
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "promotions.bin"
        # Tail first is the reverse of the calls' reverse order.
        calls = np.arange(len(references))[::-1]
        references.reordered(calls).keys[::-1].astype(np.uint64).tofile(path)
        options = libcachesim.ReaderInitParam(binary_fmt_str="<Q", ignore_obj_size=True)
        options.obj_id_field = 1
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.BIN_TRACE, options)
        begin = time.perf_counter()
        misses = []
        for capacity in capacities:
            reader.reset()
            misses.append(libcachesim.LRU(cache_size=capacity).process_trace(reader)[0])
        seconds = time.perf_counter() - begin
    found = [round((1 - ratio) * len(references.keys)) for ratio in misses]
    return seconds, found == hits


def _kvcache_simulator(references: References, capacities: list[int]) -> tuple[float, bool] | None:
    """It looks calls up head first and evicts the least recent leaf, which is to promote tail first."""
    if importlib.util.find_spec("kvcache_sim") is None:
        return None
    from kvcache_sim.cpp_backend import ensure_cpp_simulator

    simulator = ensure_cpp_simulator()
    warm_up = len(references) // 2
    with tempfile.TemporaryDirectory() as folder:
        ids, tokens, ends = (Path(folder) / name for name in ("ids", "tokens", "ends"))
        references.keys.astype(np.uint32).tofile(ids)
        np.full(len(references.keys), references.chunk_tokens, np.uint16).tofile(tokens)
        references.offsets[1:].astype(np.uint32).tofile(ends)
        command = [str(simulator), "--policy", "batch", "--policies", "lru", "--ids", str(ids), "--tokens", str(tokens)]
        command += ["--request-ends", str(ends), "--request-count", str(len(references))]
        command += ["--total-blocks", str(len(references.keys)), "--warmup-requests", str(warm_up)]
        command += ["--capacities", ",".join(map(str, capacities))]
        begin = time.perf_counter()
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds = time.perf_counter() - begin
    points = {point["cacheBlocks"]: point["lru"] for point in json.loads(output)["points"]}
    expected = {k: int(covered_tokens_at(references, k)[warm_up:].sum()) for k in capacities}
    # A tier that is not full by then is not measured. One smaller than a call loses a block more than LRU would,
    # because the call's own new blocks are not protected from its eviction.
    longest = int(np.diff(references.offsets).max())
    measured = [k for k in capacities if points[k]["measurementStartRequest"] == warm_up and k >= longest]
    return seconds, bool(measured) and all(points[k]["hitTokens"] == expected[k] for k in measured)


def _table(results: dict[str, Any]) -> str:
    rows = []
    for name, value in results.items():
        shown = "not measured" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
        rows.append(f"{name:<34}{shown}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
