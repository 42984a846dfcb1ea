"""A recorder between a client and the fake upstream, in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from recorder_upstream import Upstream

from efficient_lmcache.replay.recorder.finish import write_trace
from efficient_lmcache.replay.recorder.proxy import Proxy
from efficient_lmcache.replay.recorder.recorder import Recorder, RecordOptions
from efficient_lmcache.replay.trace import Call, TraceReader


@dataclass
class Harness:
    upstream: Upstream
    recorder: Recorder
    direct: str
    url: str
    client: aiohttp.ClientSession

    async def post(self, base: str, path: str, body: dict[str, object], **headers: str) -> tuple[int, bytes]:
        async with self.client.post(base + path, json=body, headers=headers) as response:
            return response.status, await response.read()


@asynccontextmanager
async def recording(options: RecordOptions) -> AsyncIterator[Harness]:
    upstream = Upstream()
    recorder = Recorder(options)
    async with (
        serving(upstream.application()) as direct,
        running(Proxy(direct, recorder).runner(grace_s=0.2)) as url,
        aiohttp.ClientSession() as client,
    ):
        yield Harness(upstream, recorder, direct, url, client)
    recorder.close()


@asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    async with running(web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.2)) as url:
        yield url


@asynccontextmanager
async def running(runner: web.AppRunner) -> AsyncIterator[str]:
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def finished_trace(out: Path) -> dict[str, list[Call]]:
    """The trace of the journal beside `out`, task by task."""
    write_trace(out)
    with TraceReader(out) as reader:
        reader.verify()
        return {task.task_id: list(reader.calls(number)) for number, task in enumerate(reader.tasks)}
