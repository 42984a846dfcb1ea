"""Does anything grow? Memory, descriptors and threads of every process of a deployment under steady load.

    python benchmarks/soak.py --minutes 120 [--mode server] [--samples soak.jsonl]

Real parts: vLLM on whatever device is there, with our connector and LMCache, telemetry over a Redis, the exporter,
and with `--mode server` one `lmcache server`. Agents in a closed loop, each with a task of ten growing prompts, then
the next task, fill a host tier that is smaller than their working set, so that it evicts all the time. Metrics are
scraped as Prometheus would. After the warm-up, medians of the first and the last fifth of the samples are compared:
exit status 1 if a process holds more than 2 % (and 1 MiB) more memory, more descriptors or threads, if one came or
went, or if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from process_watch import Sample, come_and_gone, sample, trends

from efficient_lmcache.replay.lmcache_server import lmcache_command, lmcache_environment, lmcache_is_ready
from efficient_lmcache.replay.model import create_model
from efficient_lmcache.replay.redis_server import redis_command, redis_is_ready
from efficient_lmcache.replay.server import (
    LMCachePorts,
    Server,
    ServerOptions,
    answers_http,
    environment,
    free_ports,
    is_cpu_build,
    serve_command,
)

VOCABULARY, BLOCK_TOKENS, CHUNK_TOKENS, BYTES_PER_TOKEN = 4096, 128, 256, 1024
CALLS, FIRST_TOKENS, GROWTH_TOKENS, OUTPUT_TOKENS, PAUSE_S = 10, 1024, 512, 4, 0.2
MAX_TOKENS = FIRST_TOKENS + CALLS * GROWTH_TOKENS + OUTPUT_TOKENS
#: Of the agents' mean contexts: what one engine's GPU and its host tier hold.
GPU_SHARE, TIER_SHARE = 0.5, 0.6
ALLOWED_DRIFT = 0.02
_START_S, _REPORT_S, _CALL_S = 900.0, 60.0, 300.0
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass
class Load:
    """What the agents did, and for how long they were watched after the warm-up."""

    answered: int = 0
    prompt_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    watched_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A deployment.

    Attributes:
        roots: process ids by what runs there.
        engines: base URLs.
        scraped: URLs of metrics.
    """

    roots: dict[str, int]
    engines: list[str]
    scraped: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="after the warm-up")
    parser.add_argument("--warm-up-minutes", type=float, default=10.0)
    parser.add_argument("--interval-s", type=float, default=10.0, help="between two samples")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--agents", type=int, default=6, help="of each engine")
    parser.add_argument("--mode", choices=("in_process", "server"), default="in_process", help="where LMCache runs")
    parser.add_argument("--samples", type=Path, help="receives every sample, a line of JSON each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, ExitStack() as stack:
        samples = stack.enter_context(open(options.samples or os.devnull, "w"))
        running = stack.enter_context(started(options, Path(directory)))
        load = Load()
        moments = asyncio.run(soak(options, running, load, samples))
    return report(options, moments, load)


@contextmanager
def started(options: argparse.Namespace, directory: Path) -> Iterator[Running]:
    """Every process of the deployment, ready."""
    model = create_model(directory / "model", vocab_size=VOCABULARY, max_model_len=16_384)
    redis_port, exporter_port, *lmcache_ports = free_ports(4)
    lmcache, ports = LMCachePorts(*lmcache_ports), free_ports(options.engines)
    tier_gib = TIER_SHARE * options.agents * MAX_TOKENS / 2 * BYTES_PER_TOKEN / _GIB
    redis_url = f"redis://127.0.0.1:{redis_port}"
    with ExitStack() as stack:

        def start(name: str, command: list[str], variables: dict[str, str], port: int, is_ready: Any) -> int:
            server = Server(command, variables, port, directory / f"{name}.log", name, is_ready)
            stack.enter_context(server).wait_until_ready(_START_S)
            assert server._process is not None
            return server._process.pid

        plain = dict(os.environ)
        roots = {"redis": start("redis", redis_command(redis_port, directory), plain, redis_port, redis_is_ready)}
        if options.mode == "server":
            command = lmcache_command(tier_gib * options.engines, 1, CHUNK_TOKENS, lmcache)
            roots["LMCache"] = start("LMCache", command, lmcache_environment(plain), lmcache.http, lmcache_is_ready)
        for number, port in enumerate(ports):
            engine = _engine_options(options, directory, model, number, tier_gib, redis_url, lmcache)
            engine.metrics_dir.mkdir()
            name = f"engine{number}"
            roots[name] = start(name, serve_command(engine, port), environment(engine, plain), port, _is_healthy)
        command = [sys.executable, "-m", "efficient_lmcache.cli", "telemetry", "export", "--redis", redis_url]
        command += ["--port", str(exporter_port), "--address", "127.0.0.1"]
        roots["exporter"] = start("exporter", command, plain, exporter_port, _shows_metrics)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        yield Running(roots, urls, [f"{url}/metrics" for url in (*urls, f"http://127.0.0.1:{exporter_port}")])


def _engine_options(
    options: argparse.Namespace,
    directory: Path,
    model: Path,
    number: int,
    tier_gib: float,
    redis_url: str,
    lmcache: LMCachePorts,
) -> ServerOptions:
    cpus = sorted(os.sched_getaffinity(0))
    return ServerOptions(
        model=model,
        vocab_size=VOCABULARY,
        connector="efficient",
        admission="conditioned",
        host_gib=tier_gib,
        chunk_tokens=CHUNK_TOKENS,
        max_model_len_tokens=MAX_TOKENS,
        bytes_per_token=BYTES_PER_TOKEN,
        decision_log=Path(os.devnull),
        metrics_dir=directory / f"metrics{number}",
        block_tokens=BLOCK_TOKENS,
        gpu_kv_tokens=max(MAX_TOKENS + 2 * BLOCK_TOKENS, int(GPU_SHARE * options.agents * MAX_TOKENS / 2)),
        max_num_seqs=options.agents,
        compile_model=not is_cpu_build(),
        lmcache_server=lmcache if options.mode == "server" else None,
        redis_url=redis_url,
        cpus=tuple(cpus[number % len(cpus) :: options.engines]),
    )


def _is_healthy(port: int) -> bool:
    return answers_http(port, "/health")


def _shows_metrics(port: int) -> bool:
    return answers_http(port, "/metrics")


async def soak(options: argparse.Namespace, running: Running, load: Load, samples: Any) -> list[list[Sample]]:
    """The samples after the warm-up, as many as there are when the time is over or Ctrl-C is pressed."""
    moments: list[list[Sample]] = []
    # A connection that is kept may be closed by the server just as the next call is sent.
    connections = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(_CALL_S)) as session:
        agents = [
            asyncio.create_task(agent(session, url, number, load))
            for number, url in enumerate(url for url in running.engines for _ in range(options.agents))
        ]
        start_s = time.monotonic()
        warm_s = start_s + 60 * options.warm_up_minutes
        report_s = start_s
        try:
            while time.monotonic() < warm_s + 60 * options.minutes:
                await asyncio.sleep(options.interval_s)
                await asyncio.gather(*(scrape(session, url, load) for url in running.scraped))
                moment = await asyncio.to_thread(sample, running.roots)
                now_s = time.monotonic()
                for seen in moment:
                    samples.write(json.dumps({"s": round(now_s - start_s, 1), **asdict(seen)}) + "\n")
                if now_s >= warm_s:
                    moments.append(moment)
                    load.watched_s = now_s - warm_s
                if now_s >= report_s:
                    report_s += _REPORT_S
                    say(now_s - start_s, now_s < warm_s, moment, load)
        except asyncio.CancelledError:
            print("interrupted: what follows is about less time than asked for")
        for task in agents:
            task.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
    return moments


async def scrape(session: aiohttp.ClientSession, url: str, load: Load) -> None:
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            await response.read()
    except (OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
        load.failures.append(f"{url}: {type(error).__name__}: {error}")


async def agent(session: aiohttp.ClientSession, url: str, number: int, load: Load) -> None:
    """One task after the other, each a conversation that grows."""
    generator = random.Random(number)
    for task in itertools.count():
        prompt = tokens(generator, FIRST_TOKENS)
        for _ in range(CALLS):
            await call(session, url, f"agent-{number}-task-{task}", prompt, load)
            prompt += tokens(generator, GROWTH_TOKENS)
            await asyncio.sleep(PAUSE_S)


async def call(session: aiohttp.ClientSession, url: str, task: str, prompt: list[int], load: Load) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "kv_transfer_params": {"efficient_lmcache.task_id": task},
    }
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise OSError(f"{response.status}: {answer}")
    except (OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
        load.failures.append(f"{task}: {type(error).__name__}: {error}")
        await asyncio.sleep(1.0)
        return
    load.answered += 1
    load.prompt_tokens += len(prompt)


def tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def say(elapsed_s: float, is_warming_up: bool, moment: Sequence[Sample], load: Load) -> None:
    resident = sum(seen.rss_bytes for seen in moment) / _MIB
    print(
        f"{elapsed_s / 60:6.1f} min{' (warming up)' if is_warming_up else ''}: {load.answered:,} answered, "
        f"{load.prompt_tokens / elapsed_s:,.0f} prompt tokens/s, {len(load.failures)} failed; "
        f"{len(moment)} processes, {resident:,.0f} MiB, {sum(seen.descriptors for seen in moment)} descriptors",
        flush=True,
    )


def report(options: argparse.Namespace, moments: list[list[Sample]], load: Load) -> int:
    """Prints a row per process; the exit status."""
    if not moments:
        print("no sample after the warm-up: nothing can be said")
        return 1
    minutes = load.watched_s / 60
    print(f"\n{options.engines} engine(s), LMCache {options.mode}, {len(moments)} samples over {minutes:.1f} min")
    print(f"{'process':<44}{'RSS MiB':>9}{'drift':>8}{'PSS drift':>11}{'descriptors':>14}{'threads':>11}")
    faults = [f"{name} came or went" for name in come_and_gone(moments)]
    for trend in trends(moments):
        descriptors, threads = (f"{first:g} → {last:g}" for first, last in (trend.descriptors, trend.threads))
        print(
            f"{trend.process:<44}{trend.rss_bytes[1] / _MIB:>9,.1f}{trend.rss_drift:>+8.2%}{trend.pss_drift:>+11.2%}"
            f"{descriptors:>14}{threads:>11}"
        )
        faults += [f"{trend.process}: {fault}" for fault in trend.faults(ALLOWED_DRIFT)]
    print(f"{load.answered:,} requests answered, {len(load.failures)} failed")
    faults += load.failures[:3]
    if load.watched_s < 60 * options.minutes - 2 * options.interval_s:
        faults.append(f"{minutes:.1f} of {options.minutes:g} minutes")
    for fault in faults:
        print(f"FAULT {fault}")
    print("not flat" if faults else "flat")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
