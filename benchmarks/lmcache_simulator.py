"""LMCache's own capacity sweep against our whole curve, on one lookup-hash log.

    python benchmarks/lmcache_simulator.py [LOG] [--lookups 4000] [--agents 200] [--points 30] [--json]

LOG is a file or directory that an LMCache server wrote. Without one, a log of the same format is synthesized: agents
that take turns and resend growing prompts of about 100 chunks. Both sides start from records in memory, and must agree
at every capacity of the sweep. LMCache simulates the tier once for each capacity; the curve has all of them. Times are
CPU seconds, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from lmcache.tools.cache_simulator.plot_hit_rate import capacity_range_bytes
from lmcache.tools.cache_simulator.simulator import load_lookup_events, simulate

from efficient_lmcache.core.coverage import capacity_curve
from efficient_lmcache.core.references import References
from efficient_lmcache.core.stackdistance import PromotionOrder
from efficient_lmcache.sizing.streams import open_stream

CHUNK_TOKENS = 256
BYTES_PER_CHUNK = CHUNK_TOKENS * 48 * 1024  # 48 KiB per token: the default sweep is from 42 to 42,666 chunks
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="?", type=Path, help="a real lookup-hash log")
    parser.add_argument("--lookups", type=int, default=4000, help="of a synthesized log")
    parser.add_argument("--agents", type=int, default=200, help="of a synthesized log")
    parser.add_argument("--points", type=int, default=30, help="capacities of LMCache's sweep, 0.5 to 500 GiB")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = arguments.log or Path(directory) / "lookup_hashes_00000000_000000_000000.jsonl"
        if arguments.log is None:
            synthesize(log, arguments.lookups, arguments.agents)
        result = compare(log, arguments.points)
    result["log"] = "synthesized" if arguments.log is None else arguments.log.name
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"{result['log']} log: {result['lookups']:,} lookups, {result['references']:,} chunk references, "
        f"{result['distinct_chunks']:,} distinct chunks\n"
        f"LMCache, {result['points']} capacities   {result['lmcache_seconds']:8.2f} s\n"
        f"our curve, every capacity {result['seconds']:8.4f} s   {result['speedup']:,.0f} times faster\n"
        f"including the reading of the log: {result['speedup_with_reading']:,.1f} times\n"
        f"token hit rates equal at all capacities: {result['lowest_rate']:.1%} to {result['highest_rate']:.1%}"
    )


def compare(log: Path, points: int) -> dict[str, object]:
    """Time both, and check that they agree."""
    begin_s = time.process_time()
    events = load_lookup_events([log])
    their_reading_s = time.process_time() - begin_s
    capacities = capacity_range_bytes(0.5, 500.0, points)
    begin_s = time.process_time()
    theirs = [simulate(events, capacity, BYTES_PER_CHUNK, fast=True)["token_hit_rate"] for capacity in capacities]
    their_s = time.process_time() - begin_s

    begin_s = time.process_time()
    references = References.concatenate(open_stream(log))
    reading_s = time.process_time() - begin_s
    capacity_curve(references, order=PromotionOrder.HEAD_FIRST)  # compiles, or loads what was compiled before
    samples_s = []
    for _ in range(REPEATS):
        begin_s = time.process_time()
        curve = capacity_curve(references, order=PromotionOrder.HEAD_FIRST)
        samples_s.append(time.process_time() - begin_s)
    seconds = min(samples_s)
    ours = [curve.at(max(1, capacity // BYTES_PER_CHUNK))[0] / curve.prompt_tokens for capacity in capacities]
    if ours != theirs:
        raise SystemExit(f"hit rates differ: {list(zip(capacities, ours, theirs, strict=True))}")
    return {
        "lookups": len(references),
        "references": len(references.keys),
        "distinct_chunks": int(references.keys.max()) + 1,
        "points": len(capacities),
        "lmcache_seconds": their_s,
        "seconds": seconds,
        "speedup": their_s / seconds,
        "speedup_with_reading": (their_s + their_reading_s) / (seconds + reading_s),
        "lowest_rate": min(theirs),
        "highest_rate": max(theirs),
    }


def synthesize(log: Path, lookups: int, agents: int, seed: int = 0) -> None:
    """Agents with a common system prompt of 8 chunks; a turn adds 1 to 4 chunks, and one in 50 rewrites the prompt."""
    generator = random.Random(seed)

    def hashes(count: int) -> list[str]:
        return [f"0x{generator.getrandbits(256):064x}" for _ in range(count)]

    system = hashes(8)
    prompts = [system + hashes(generator.randrange(5, 150)) for _ in range(agents)]
    with log.open("w") as out:
        for number in range(lookups):
            agent = generator.randrange(agents)
            kept = len(prompts[agent]) if generator.random() < 0.98 else generator.randrange(8, len(prompts[agent]))
            prompts[agent] = prompts[agent][:kept] + hashes(generator.randrange(1, 5))
            record = {
                "timestamp": float(number),
                "request_id": f"request-{number}",
                "model_name": "synthesized",
                "chunk_size": CHUNK_TOKENS,
                "seq_len": len(prompts[agent]) * CHUNK_TOKENS + generator.randrange(CHUNK_TOKENS),
                "dtypes": ["bfloat16"],
                "shapes": [[48, CHUNK_TOKENS, 512]],
                "chunk_hashes": prompts[agent],
            }
            out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
