"""What telemetry over Redis costs an engine: `python benchmarks/telemetry_cost.py [--pairs 40] [--others 63]`.

One real vLLM engine with LMCache and our connector, scheduler and worker in one process as in `vllm serve` with one
rank, serves the same amount of work again and again, in pairs of segments: one with `telemetry.transport: redis` at
the default intervals (a report a second), one with it off, the two in alternating order. Telemetry is put on and off
in the running engine, so that nothing else differs. Meanwhile another process publishes what further engines would.

Two answers. The ratio of throughputs, on over off, median of the pairs with a 95 % bootstrap interval: a machine's
noise hits both sides, and is still in the interval. And the processor time that telemetry's own threads take on their
thread clocks per second of serving, which other processes' noise hardly touches: what they could at most take from an
engine that never waits. Exit status 1 if either says more than 0.5 %.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiet import QUIET

ALLOWED = 0.005
CHUNK_TOKENS, VOCABULARY = 256, 4096
AGENTS, CALLS, FIRST_TOKENS, GROWTH_TOKENS, OUTPUT_TOKENS = 4, 6, 1024, 512, 4
SETTLE_S = 1.5
THREADS = "efficient-lmcache"
OTHERS_TASKS = 75


@dataclass(frozen=True, slots=True)
class Segment:
    """What serving the same work took.

    Attributes:
        cpu_s: of the whole process.
        threads_s: processor time of each of telemetry's threads, by name.
        engines: that the pool's estimate counted in the end.
    """

    wall_s: float
    cpu_s: float
    threads_s: dict[str, float]
    engines: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--segment-s", type=float, default=5.0, help="about how long a segment serves")
    parser.add_argument("--others", type=int, default=63, help="engines whose messages are heard")
    parser.add_argument("--publish", metavar="SOCKET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(options.publish, options.others)
        return 0
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        socket = Path(directory) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", directory]
        _until_the_end(stack, subprocess.Popen(command, stdout=subprocess.DEVNULL))
        while not socket.exists():
            time.sleep(0.05)
        if options.others:
            here = [sys.executable, __file__, "--others", str(options.others), "--publish", str(socket)]
            _until_the_end(stack, subprocess.Popen(here))
        engine = start_engine(Path(directory), f"unix://{socket}")
        pairs = measure(Work(engine, options.segment_s), Telemetry(engine), options.pairs)
        return report(pairs)


def _until_the_end(stack: ExitStack, process: subprocess.Popen[bytes]) -> None:
    stack.callback(process.wait)
    stack.callback(process.kill)


def start_engine(directory: Path, url: str) -> Any:
    os.environ.update(
        QUIET,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, sorted(os.sched_getaffinity(0)))),
        LMCACHE_CHUNK_SIZE=str(CHUNK_TOKENS),
        LMCACHE_MAX_LOCAL_CPU_SIZE="0.008",
        PYTHONHASHSEED="0",
    )
    from vllm import LLM

    from efficient_lmcache.replay.model import create_model

    return LLM(
        str(create_model(directory / "model", vocab_size=VOCABULARY)),
        skip_tokenizer_init=True,
        block_size=128,
        max_model_len=8192,
        num_gpu_blocks_override=80,
        max_num_seqs=AGENTS,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "EfficientLMCacheConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "efficient.admission": "none",  # else other decisions without reports would make other work
                "efficient.telemetry.transport": "redis",
                "efficient.telemetry.redis_url": url,
            },
        },
    )


class Work:
    """The same number of rounds, each of agents whose prompts grow, in every segment."""

    def __init__(self, engine: Any, segment_s: float) -> None:
        self._engine = engine
        self._generator = random.Random(0)
        self._task = 0
        self._round()  # compiles what is compiled at first use, and fills the tier
        start_s = time.perf_counter()
        self._round()
        self._rounds = max(1, round(segment_s / (time.perf_counter() - start_s)))

    def serve(self) -> tuple[float, float]:
        """Seconds on the clock, and of the process on all processors."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(self._rounds):
            self._round()
        return time.perf_counter() - start_s, time.process_time() - start_cpu_s

    def _round(self) -> None:
        from vllm import SamplingParams

        prompts = [self._tokens(FIRST_TOKENS) for _ in range(AGENTS)]
        tasks = [f"task-{self._task + agent}" for agent in range(AGENTS)]
        self._task += AGENTS
        params = [
            SamplingParams(
                max_tokens=OUTPUT_TOKENS,
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"efficient_lmcache.task_id": task}},
            )
            for task in tasks
        ]
        for _ in range(CALLS):
            self._engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            prompts = [prompt + self._tokens(GROWTH_TOKENS) for prompt in prompts]

    def _tokens(self, count: int) -> list[int]:
        return [self._generator.randrange(VOCABULARY) for _ in range(count)]


class Telemetry:
    """Puts the telemetry of the engine in this process on and off, as the connector does at start and at shutdown."""

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._scheduler = engine.llm_engine.engine_core.engine_core.scheduler.connector
        self._worker = get_kv_transfer_group()
        self._starts = 0

    def off(self) -> None:
        from efficient_lmcache.connector.admission import NoReports

        self._scheduler._telemetry.close()
        self._worker._offload._publisher.close()
        self._scheduler._admission._reports = NoReports()
        self._scheduler._admission._pool_lookups = None
        assert not own_threads(), own_threads()

    def on(self) -> None:
        from efficient_lmcache.connector.telemetry import SchedulerTelemetry, worker_sink
        from efficient_lmcache.telemetry.publisher import ReportPublisher

        self._starts += 1
        options, offload = self._scheduler._options, self._worker._offload
        # An engine id names one start.
        offload._engine_id = engine_id = f"{self._scheduler._engine_id}/{self._starts}"
        telemetry = SchedulerTelemetry(options, engine_id, self._scheduler._stats)
        self._scheduler._telemetry = telemetry
        self._scheduler._admission._reports = telemetry.reports
        self._scheduler._admission._pool_lookups = telemetry.lookups
        sink = worker_sink(options, engine_id)
        assert sink is not None
        offload._publisher = ReportPublisher(offload.probe, sink, options.report_interval_s)

    @property
    def engines(self) -> int:
        """That the scheduler's process hears, itself included."""
        estimate = self._scheduler._telemetry._pool.estimate
        return estimate.engines if estimate is not None else 0


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


def thread_seconds() -> dict[str, float]:
    """Processor time that telemetry's threads have taken, by name."""
    seconds: dict[str, float] = defaultdict(float)
    for thread in own_threads():
        assert thread.ident is not None
        name = thread.name.removeprefix(THREADS).strip("-")
        seconds[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return seconds


def measure(work: Work, telemetry: Telemetry, pairs: int) -> list[tuple[Segment, Segment]]:
    """Pairs of segments, on and off; which one is served first changes from pair to pair. Ctrl-C ends it early."""
    telemetry.off()
    measured: list[tuple[Segment, Segment]] = []
    try:
        while len(measured) < pairs:
            order = (True, False) if len(measured) % 2 else (False, True)
            segments = {is_on: _segment(work, telemetry, is_on) for is_on in order}
            measured.append((segments[True], segments[False]))
            print(f"{len(measured)} of {pairs} pairs", file=sys.stderr, end="\r", flush=True)
    except KeyboardInterrupt:
        if not measured:
            raise
    return measured


def _segment(work: Work, telemetry: Telemetry, is_on: bool) -> Segment:
    if is_on:
        telemetry.on()
    time.sleep(SETTLE_S)  # connections, subscription, last values
    before = thread_seconds()
    wall_s, cpu_s = work.serve()
    threads_s = {name: seconds - before[name] for name, seconds in thread_seconds().items()}
    engines = telemetry.engines if is_on else 0
    if is_on:
        telemetry.off()
    return Segment(wall_s, cpu_s, threads_s, engines)


def report(pairs: list[tuple[Segment, Segment]]) -> int:
    """Prints the two answers; the exit status."""
    serving_s = sum(on.wall_s for on, _ in pairs)
    heard = sorted(on.engines for on, _ in pairs)
    segment_s = statistics.median(on.wall_s for on, _ in pairs)
    print(f"{len(pairs)} pairs of segments of about {segment_s:.1f} s; {heard[0]} to {heard[-1]} engines heard")
    throughput = _show_ratio("throughput, on ÷ off", [off.wall_s / on.wall_s for on, off in pairs])
    _show_ratio("processor time of the engine, on ÷ off", [on.cpu_s / off.cpu_s for on, off in pairs])
    by_thread = {name: sum(on.threads_s[name] for on, _ in pairs) for name in pairs[0][0].threads_s}
    for name, seconds in sorted(by_thread.items(), key=lambda item: -item[1]):
        print(f"  thread {name:<12}{1e3 * seconds / serving_s:>7.3f} ms of processor time per second of serving")
    share = sum(by_thread.values()) / serving_s
    print(f"telemetry's threads: {share:.3%} of a core")
    costs = share > ALLOWED or throughput[1] < 1 - ALLOWED
    print(f"more than {ALLOWED:.1%}" if costs else f"at most {ALLOWED:.1%}, as far as {len(pairs)} pairs can tell")
    return 1 if costs else 0


def _show_ratio(name: str, ratios: list[float]) -> tuple[float, float]:
    """Returns the interval."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(4000))
    low, high = medians[len(medians) // 40], medians[-len(medians) // 40]
    print(f"{name}: {statistics.median(ratios):.4f} (95 % interval {low:.4f} to {high:.4f})")
    return low, high


def publish(socket: str, engines: int) -> None:
    """What `engines` others would say, spread over time: of each a report a second and an observation every three."""
    import redis

    from efficient_lmcache.core.observation import HASH_RANGE, Observation
    from efficient_lmcache.core.tier import TierReport
    from efficient_lmcache.telemetry import observation, redis_keys
    from efficient_lmcache.telemetry import report as tier_report

    generator = random.Random(0)
    client = redis.Redis(unix_socket_path=socket)
    names = [f"other-{number:03}/simulated" for number in range(engines)]
    pools = {name: sorted(generator.randrange(HASH_RANGE) for _ in range(OTHERS_TASKS)) for name in names}
    start_s = time.monotonic()
    for sent in range(sys.maxsize):
        sequence, number = divmod(sent, engines)
        name = names[number]
        report = TierReport(name, sequence, CHUNK_TOKENS, 6_291_456, 850, 853, 120, 40_000)
        messages = {redis_keys.tier_key("default", name, 0): tier_report.encode(report)}
        if (sequence + number) % 3 == 0:
            tasks = tuple(pools[name])
            seen = Observation(name, sequence, 60.0, tasks, HASH_RANGE, 120, 256, 256 * 33_000, pressure=False)
            messages[redis_keys.pool_key("default", name)] = observation.encode(seen)
        pipeline = client.pipeline(transaction=False)
        for key, payload in messages.items():
            pipeline.publish(key, payload)
            pipeline.set(key, payload, px=30_000)
            pipeline.sadd(redis_keys.prefix("default") + "index", key)
        pipeline.execute()
        time.sleep(max(0.0, start_s + (sent + 1) / engines - time.monotonic()))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # LMCache's threads would keep the interpreter from ending
