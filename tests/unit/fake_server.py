"""A FAKE of vLLM's HTTP server, for faults that a real one cannot be made to show at will. It computes nothing.

    python fake_server.py PORT [--fault FAULT@N]…

It returns the forced tokens; its N-th completion (from 1) shows the fault: wrong, short, long, status500, garbage,
drop (closes the connection), hang (never answers), die (the process exits), refuse (unhealthy from then on).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web

from efficient_lmcache.replay.server import ServerOptions

METRICS = """# TYPE vllm:request_prefill_kv_computed_tokens histogram
vllm:request_prefill_kv_computed_tokens_bucket{engine="0",le="+Inf"} %(calls)d
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} %(tokens)d
vllm:request_prefill_kv_computed_tokens_count{engine="0"} %(calls)d
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",num_gpu_blocks="8"} 1.0
# TYPE efficient_lmcache:stored_tokens counter
efficient_lmcache:stored_tokens_total 0
# TYPE efficient_lmcache:restored_tokens counter
efficient_lmcache:restored_tokens_total 0
# TYPE efficient_lmcache:evicted_chunks counter
efficient_lmcache:evicted_chunks_total 0
# TYPE efficient_lmcache:deduplicated_chunks counter
efficient_lmcache:deduplicated_chunks_total 0
"""


def fake_command(*faults: str) -> Callable[[ServerOptions, int], list[str]]:
    """Starts it in a real one's place, as `run_replay` takes it."""

    def command_of(_: ServerOptions, port: int) -> list[str]:
        return [sys.executable, __file__, str(port), *[f"--fault={fault}" for fault in faults]]

    return command_of


class FakeServer:
    def __init__(self, faults: dict[int, str]) -> None:
        self.faults = faults
        self.calls = 0
        self.prompt_tokens = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.healthy = True
        self.bodies: list[dict[str, Any]] = []

    def application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post("/v1/completions", self.complete)
        application.router.add_get("/health", self.health)
        application.router.add_get("/metrics", self.metrics)
        return application

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS % {"calls": self.calls, "tokens": self.prompt_tokens})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.calls += 1
        fault = self.faults.get(self.calls, "")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0.01)
            return await self.answer(request, body, fault)
        finally:
            self.in_flight -= 1

    async def answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        tokens = list(body["vllm_xargs"]["efficient_lmcache.forced_tokens"])
        if fault == "die":
            os._exit(3)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "refuse":
            self.healthy = False
            return web.Response(status=500, text="engine dead")
        if fault == "status500":
            return web.Response(status=500, text="no such luck")
        if fault == "garbage":
            return web.json_response({"choices": []})
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        tokens = {"wrong": [*tokens[:-1], tokens[-1] + 1], "short": tokens[:-1], "long": [*tokens, 0]}.get(
            fault, tokens
        )
        self.prompt_tokens += len(body["prompt"])
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 1}}
        return web.json_response({"choices": [{"token_ids": tokens}], "usage": usage})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--fault", action="append", default=[])
    arguments = parser.parse_args()
    faults = {int(number): fault for fault, number in (f.split("@") for f in arguments.fault)}
    print("ValueError: the fake server says this on start-up", flush=True)
    web.run_app(
        FakeServer(faults).application(), host="127.0.0.1", port=arguments.port, print=None, shutdown_timeout=0.1
    )


if __name__ == "__main__":
    main()
