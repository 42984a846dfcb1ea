"""What telemetry over one Redis costs, in Redis and in the engines: `python benchmarks/telemetry_redis.py`.

Every simulated engine runs what a real one runs: a worker's publisher with its local and its Redis channel, and a
scheduler's reports, feed, observer and outbox. Tasks move from engine to engine, so that the pool's A is none of
theirs. Several engines share a process, as 64 interpreters would not fit; their threads share its lock, which those
of real ones do not. Exit status 1 if an engine does not hear all others or counts other active tasks than there are.
What telemetry costs the throughput of a real engine among them: `telemetry_cost.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from efficient_lmcache.connector.options import parse_options
from efficient_lmcache.connector.telemetry import SchedulerTelemetry, worker_sink
from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.pool import Lookup
from efficient_lmcache.telemetry.publisher import ReportPublisher

_SETTLE_S = 10.0


class NoStats:
    """Nobody asks an engine without vLLM for its metrics."""

    def count(self, name: str, amount: int = 1) -> None: ...

    def set_gauges(self, gauges: dict[str, float]) -> None: ...


class Engine:
    def __init__(self, engine_id: str, url: str) -> None:
        options = parse_options({"efficient.telemetry.transport": "redis", "efficient.telemetry.redis_url": url})
        self.telemetry = SchedulerTelemetry(options, engine_id, NoStats())  # type: ignore[arg-type]
        sink = worker_sink(options, engine_id)
        assert sink is not None
        report = TierReport(engine_id, 0, 256, 6_291_456, 850, 853, 120, 40_000)
        self.publisher = ReportPublisher(lambda: report, sink, options.report_interval_s)

    @property
    def estimate(self) -> PoolEstimate:
        assert self.telemetry._pool is not None
        assert self.telemetry._pool.estimate is not None
        return self.telemetry._pool.estimate

    def close(self) -> None:
        self.publisher.close()
        self.telemetry.close()


def engines(
    names: list[str], url: str, tasks: int, lookups_per_s: float, seconds: float, barrier: Barrier, results: Any
) -> None:
    """One process: serve lookups until the time is over, then report the pools that its engines estimate."""
    own = [Engine(name, url) for name in names]
    generator = random.Random(names[0])
    barrier.wait()
    served = serve(own, tasks, lookups_per_s, _SETTLE_S, generator)
    barrier.wait()
    cpu_s = time.process_time()
    served |= serve(own, tasks, lookups_per_s, seconds, generator)
    cpu_s = time.process_time() - cpu_s
    barrier.wait()
    time.sleep(7.0)  # what was looked up last must still travel
    results.put(([engine.estimate for engine in own], cpu_s, served))
    barrier.wait()
    for engine in own:
        engine.close()


def serve(own: list[Engine], tasks: int, lookups_per_s: float, seconds: float, generator: random.Random) -> set[str]:
    """Returns the tasks."""
    served: set[str] = set()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for engine in own:
            lookups = engine.telemetry.lookups
            assert lookups is not None
            task = f"task-{generator.randrange(tasks)}"
            served.add(task)
            lookups.append(Lookup(task, None, True, 33_000, time.monotonic(), False))
        time.sleep(1 / lookups_per_s)
    return served


def info(socket: Path) -> dict[str, float]:
    command = ["redis-cli", "-s", str(socket), "info", "everything"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {}
    for line in output.splitlines():
        name, _, value = line.partition(":calls=" if line.startswith("cmdstat_") else ":")
        value = value.partition(",")[0]
        try:
            numbers[name] = float(value)
        except ValueError:
            continue
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=1024, help="of the pool")
    parser.add_argument("--lookups-per-s", type=float, default=2.0, help="of an engine")
    parser.add_argument("--seconds", type=float, default=30.0, help="at most 40: all tasks must stay active")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", directory]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as redis:
            try:
                while not socket.exists():
                    time.sleep(0.05)
                return measure(options, socket)
            finally:
                redis.kill()


def measure(options: argparse.Namespace, socket: Path) -> int:
    """Prints the table; the exit status."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(options.processes + 1), context.Queue()
    names = [f"engine-{number:03}/simulated" for number in range(options.engines)]
    arguments = (f"unix://{socket}", options.tasks, options.lookups_per_s, options.seconds, barrier, results)
    processes = [
        context.Process(target=engines, args=(names[number :: options.processes], *arguments))
        for number in range(options.processes)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    barrier.wait()
    before, start_s = info(socket), time.monotonic()
    barrier.wait()
    after, elapsed_s = info(socket), time.monotonic() - start_s
    gathered = [results.get() for _ in processes]
    barrier.wait()
    for process in processes:
        process.join()
    gained = {name: (after[name] - before[name]) / elapsed_s for name in after if name in before}
    truth = set[str]().union(*(served for _, _, served in gathered))
    estimates = [estimate for own, _, _ in gathered for estimate in own]
    heard = sorted(estimate.engines for estimate in estimates)
    active = sorted(estimate.active_pool for estimate in estimates)
    redis_share = gained["used_cpu_user"] + gained["used_cpu_sys"]
    engine_share = sum(cpu_s for _, cpu_s, _ in gathered) / elapsed_s / options.engines
    count = options.engines
    print(f"{count} engines at the default intervals, for {elapsed_s:.0f} s")
    print(
        f"published     {gained['cmdstat_publish']:.1f} messages/s, {gained['total_commands_processed']:.0f} commands/s"
    )
    print(f"Redis         {redis_share:.1%} of one core, {after['used_memory'] / 2**20:.1f} MiB of memory")
    print(
        f"network       {gained['total_net_input_bytes'] / 1e6:.2f} MB/s into Redis, "
        f"{gained['total_net_output_bytes'] / 1e6:.2f} MB/s out of it"
    )
    print(f"of an engine  {engine_share:.2%} of one core for both of its processes")
    print(
        f"the pool      {heard[0]} to {heard[-1]} engines heard; A {active[0]} to {active[-1]}, in truth {len(truth)}"
    )
    return 0 if set(heard) == {count} and set(active) == {len(truth)} else 1


if __name__ == "__main__":
    sys.exit(main())
