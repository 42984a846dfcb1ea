"""A thousand agents on one core: the replay's driver against one blocking thread per agent, in the same run.

    python benchmarks/driver_scale.py [--agents 1000] [--seconds 75] [--rows short paper]

Both clients replay the same synthesized trace on CPU 0 against a stub of vLLM's completions on CPU 1, each in a process
of its own. The stub returns the forced output after a log-normal time (median 6 s, mean 7.2 s); the agents' own pauses
are the paper's (median 0.64 s), so that a thousand agents make about 120 calls a second, several times what the
paper's servers answer to so many. `short`: tasks from their first call on. `paper`: prompts of the paper's mean, 33 K.

Dispatch delay: from the moment the agent would send a call until its body is handed to the open connection, of every
call of the run. Of a task's first call it begins when its agent is free (agents start 5 ms apart), so that it includes
reading the task wherever that is not done ahead. Memory is the client process's peak. The machine's own jitter is
printed first: how long the same small computation takes on CPU 0, 130 times a second. On a busy machine run all of it
under `chrt -f 5`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from efficient_lmcache.replay.driver import CallRow, Driver, DriverOptions
from efficient_lmcache.replay.protocol import FORCED_TOKENS_KEY, TASK_ID_KEY
from efficient_lmcache.replay.routing import Router
from efficient_lmcache.replay.server import free_port
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import Call, TraceReader

HOST = "127.0.0.1"
CLIENT_CPU, SERVER_CPU = 0, 1
MEDIAN_S, SIGMA = 6.0, 0.6
ISSUE_TOKENS = {"short": 600.0, "paper": 24_500.0}
CALLS_PER_TASK = 12.0  # what an agent gets done in the run; further tasks follow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=75.0, help="of each run")
    parser.add_argument("--rows", nargs="+", choices=ISSUE_TOKENS, default=list(ISSUE_TOKENS))
    parser.add_argument("--role", choices=("stub", "driver", "threads"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "stub":
        os.sched_setaffinity(0, {SERVER_CPU})
        asyncio.run(serve(arguments.port))
    elif arguments.role:
        os.sched_setaffinity(0, {CLIENT_CPU})
        client = {"driver": drive, "threads": drive_with_threads}[arguments.role]
        client(arguments.trace, arguments.port, arguments.agents, arguments.seconds)
    else:
        compare(arguments.agents, arguments.seconds, arguments.rows)


def compare(agents: int, seconds: float, rows: list[str]) -> None:
    p50_ms, p99_ms, max_ms = np.quantile(measure_jitter_s(), (0.5, 0.99, 1.0)) * 1e3
    print(f"load {os.getloadavg()[0]:.1f}; fixed work p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms, max {max_ms:.1f} ms")
    print(f"{agents} agents, {seconds:g} s a run")
    print(
        f"{'row':<7}{'client':<9}{'calls':>7}{'calls/s':>9}{'prompt':>9}{'p50':>11}{'p99':>11}{'max':>11}"
        f"{'memory':>11}{'CPU':>7}"
    )
    for row in rows:
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory) / "trace"
            workload = Workload(tasks=2 * agents, calls_per_task=CALLS_PER_TASK, issue_tokens=ISSUE_TOKENS[row])
            synthesize(trace, workload)
            ours, theirs = (measure(role, trace, agents, seconds) for role in ("driver", "threads"))
        for name, facts in (("driver", ours), ("threads", theirs)):
            print(
                f"{row:<7}{name:<9}{facts['calls']:>7,}{facts['calls'] / seconds:>9.1f}{facts['prompt_tokens']:>9,.0f}"
                f"{facts['p50_ms']:>8.2f} ms{facts['p99_ms']:>8.2f} ms{facts['max_ms']:>8.1f} ms"
                f"{facts['memory_mib']:>7.0f} MiB{facts['cpu_share']:>7.0%}"
            )
        print(
            f"{row:<7}threads/driver: p50 {theirs['p50_ms'] / ours['p50_ms']:.0f} x, "
            f"p99 {theirs['p99_ms'] / ours['p99_ms']:.0f} x, memory {theirs['memory_mib'] / ours['memory_mib']:.2f} x",
            flush=True,
        )


def measure_jitter_s(seconds: float = 10.0) -> list[float]:
    """Of the same pure computation, again and again as often as a client has something to do."""
    os.sched_setaffinity(0, {CLIENT_CPU})
    taken_s, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        start_s = time.perf_counter()
        sum(range(20_000))
        taken_s.append(time.perf_counter() - start_s)
        time.sleep(1 / 130)
    os.sched_setaffinity(0, {CLIENT_CPU, SERVER_CPU})
    return taken_s


def measure(role: str, trace: Path, agents: int, seconds: float) -> dict[str, Any]:
    """Run one client against a fresh stub."""
    port = str(free_port())
    here = [sys.executable, __file__, "--port", port]
    with subprocess.Popen([*here, "--role", "stub"], stdout=subprocess.PIPE) as stub:
        assert stub.stdout is not None
        stub.stdout.readline()
        options = ["--trace", str(trace), "--agents", str(agents), "--seconds", str(seconds)]
        client = subprocess.run([*here, "--role", role, *options], stdout=subprocess.PIPE, check=True)
        stub.terminate()
    facts: dict[str, Any] = json.loads(client.stdout)
    return facts


# The clients


def drive(trace_path: Path, port: int, agents: int, seconds: float) -> None:
    """The replay's driver, with a row written and flushed per call as `replay run` does."""
    rows: list[CallRow] = []

    async def run(trace: TraceReader, log: Any) -> None:
        def on_row(row: CallRow) -> None:
            log.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            log.flush()
            rows.append(row)

        driver = Driver(trace, Router([f"http://{HOST}:{port}"]), DriverOptions(agents), on_row)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(driver.run(), seconds)

    with TraceReader(trace_path) as trace, tempfile.TemporaryFile() as log:
        asyncio.run(run(trace, log))
    sent = [row for row in rows if row.eligible_s is not None and row.dispatched_s is not None]
    report(
        [row.dispatched_s - row.eligible_s for row in sent],  # type: ignore[operator]
        [row.prompt_tokens for row in sent],
        sum(row.status == "failed" or (row.status == "answered" and not row.exact) for row in rows),
        seconds,
    )


def drive_with_threads(trace_path: Path, port: int, agents: int, seconds: float) -> None:
    """What one would write first: a blocking loop per agent, each in its thread; json and http.client."""
    delays_s: list[float] = []
    prompts: list[int] = []
    wrong: list[str] = []
    reading = threading.Lock()
    with TraceReader(trace_path) as trace:
        waiting = iter(range(len(trace.tasks)))

        def agent() -> None:
            while True:
                with reading:
                    task_index = next(waiting)
                    ready_s = time.monotonic()
                    calls = trace.calls(task_index)
                    call: Call | None = next(calls)
                while call is not None:
                    eligible_s = ready_s + call.interval_s
                    time.sleep(max(0.0, eligible_s - time.monotonic()))
                    body = json.dumps(request_of(call, trace.tasks[task_index].task_id))
                    connection = http.client.HTTPConnection(HOST, port)
                    connection.connect()
                    delays_s.append(time.monotonic() - eligible_s)
                    prompts.append(len(call.prompt_tokens))
                    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                    answer = json.loads(connection.getresponse().read())
                    ready_s = time.monotonic()
                    connection.close()
                    if answer["choices"][0]["token_ids"] != call.output_tokens.tolist():
                        wrong.append(trace.tasks[task_index].task_id)
                    call = next(calls, None)

        for _ in range(agents):
            threading.Thread(target=agent, daemon=True).start()
        time.sleep(seconds)
        report(delays_s[:], prompts[:], len(wrong), seconds)
        sys.stdout.flush()
        os._exit(0)  # a thousand daemons are still waiting


def request_of(call: Call, task_id: str) -> dict[str, Any]:
    """What `TaskRequests` encodes, as Python's own lists."""
    return {
        "prompt": call.prompt_tokens.tolist(),
        "max_tokens": len(call.output_tokens),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": {FORCED_TOKENS_KEY: call.output_tokens.tolist()},
        "kv_transfer_params": {TASK_ID_KEY: task_id},
    }


def report(delays_s: list[float], prompts: list[int], wrong: int, seconds: float) -> None:
    if wrong:
        raise SystemExit(f"{wrong} calls failed or came back with another output")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    p50_ms, p99_ms, max_ms = np.quantile(delays_s, (0.5, 0.99, 1.0)) * 1e3
    facts = {
        "calls": len(delays_s),
        "prompt_tokens": float(np.mean(prompts)),
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "max_ms": max_ms,
        "memory_mib": usage.ru_maxrss / 1024,
        "cpu_share": (usage.ru_utime + usage.ru_stime) / seconds,
    }
    print(json.dumps(facts))


# The stub


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, HOST, port, backlog=4096)
    print("listening", flush=True)
    await server.serve_forever()


class Stub(asyncio.Protocol):
    """Just enough HTTP for one completion at a time per connection. It counts and copies tokens' text, unparsed."""

    latencies_s: Iterator[float] = iter(lambda: random.lognormvariate(np.log(MEDIAN_S), SIGMA), None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = bytearray()
        self.length_bytes: int | None = None

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.length_bytes is None:
            head_bytes = self.received.find(b"\r\n\r\n") + 4
            if head_bytes < 4:
                return
            header = self.received[:head_bytes].lower().split(b"content-length:")[1]
            self.length_bytes = head_bytes + int(header.split(b"\r\n")[0])
        if len(self.received) == self.length_bytes:
            latency_s = next(self.latencies_s)
            asyncio.get_running_loop().call_later(latency_s, self.answer, self.completion())

    def completion(self) -> bytes:
        prompt_tokens = self.tokens(b'"prompt"').count(b",") + 1
        forced = self.tokens(f'"{FORCED_TOKENS_KEY}"'.encode())
        self.received.clear()
        self.length_bytes = None
        return b'{"choices":[{"token_ids":[%s]}],"usage":{"prompt_tokens":%d}}' % (forced, prompt_tokens)

    def tokens(self, key: bytes) -> bytes:
        first = self.received.index(b"[", self.received.index(key)) + 1
        return bytes(self.received[first : self.received.index(b"]", first)])

    def answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)


if __name__ == "__main__":
    main()
