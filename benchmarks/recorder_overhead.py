"""What the recorder adds to a call: paired calls, straight to a stub server and through the proxy, in one run.

    python benchmarks/recorder_overhead.py [--prompt-tokens 33234] [--turns 24]

Eight agents take turns; a prompt extends its agent's last one by 700 tokens and has the paper's mean length on average.
The first turn is not measured with them: "first" rows are calls of agents that were never seen, whose whole prompt of
that mean length is new, as after a restart of the proxy (agents that really begin have less to say). "untouched" rows
pass as many bytes through the proxy without recording, which is what any proxy of this kind costs.

The stub answers at once, with bodies made beforehand in vLLM's forms, in a stream with a pause between tokens; asked
for token ids it sends them too (200 KB of JSON), as vLLM does. Stub, proxy and client are processes of their own. The
difference within a pair is what the proxy adds: median and 99th percentile. Where other work disturbs the clock, the
proxy's processor time per call still tells; of a stream most of it falls between tokens. What vLLM itself pays to write
the ids is printed last, where vLLM is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
from aiohttp import web

VOCABULARY = 131_072
OUTPUT_TOKENS = 16
TOKEN_S = 0.002
AGENTS = 8
STRANGERS = 40  # agents of a single call
GROWTH_TOKENS = 700
CHAT = "/v1/chat/completions"
UNTOUCHED = "/untouched"  # a path that the proxy only passes on; the stub's answer has the ids
PROXY = "import typer; from efficient_lmcache.replay.recorder.cli_record import record; typer.run(record)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=33_234, help="the paper's mean prompt by default")
    parser.add_argument("--turns", type=int, default=24, help="calls of each agent and kind")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        _serve(arguments.prompt_tokens, arguments.turns)
    else:
        asyncio.run(_measure(arguments.prompt_tokens, arguments.turns))
        _print_vllm_cost(arguments.prompt_tokens)


def _serve(prompt_tokens: int, turns: int) -> None:
    """The stub's process; says where it listens. Which call it is, a header tells."""
    first_tokens = max(1, prompt_tokens - GROWTH_TOKENS * turns // 2)
    calls = {
        f"{agent} {turn}": (agent, first_tokens + GROWTH_TOKENS * turn)
        for agent in range(AGENTS)
        for turn in range(turns)
    }
    calls |= {f"{agent} first": (agent, prompt_tokens) for agent in range(AGENTS, AGENTS + STRANGERS)}
    bodies = {(name, ids): _bodies(*call, ids) for name, call in calls.items() for ids in (False, True)}

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        ids = request.path == UNTOUCHED or b'"return_token_ids":true' in body[-64:]
        whole, events = bodies[request.headers["X-Call"], ids]
        if b'"stream": true' not in body:
            return web.Response(body=whole, content_type="application/json")
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for event in events:
            await reply.write(event)
            await asyncio.sleep(TOKEN_S)
        return reply

    async def run() -> None:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post(CHAT, answer)
        application.router.add_post(UNTOUCHED, answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"listening http://127.0.0.1:{runner.addresses[0][1]}", file=sys.stderr, flush=True)
        await asyncio.sleep(1e6)

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


def _bodies(seed: int, prompt_tokens: int, ids: bool) -> tuple[bytes, list[bytes]]:
    """One answer, whole and as events."""
    generator = random.Random(seed)
    prompt = [generator.randrange(VOCABULARY) for _ in range(prompt_tokens)]
    output = [generator.randrange(VOCABULARY) for _ in range(OUTPUT_TOKENS)]
    head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "m"}

    def event(delta: dict[str, str], finish: str | None, **more: object) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return b"data: " + _json({**head, "choices": [choice]}) + b"\n\n"

    first = _json({**head, "choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": prompt if ids else None})
    finishes = [None] * (OUTPUT_TOKENS - 1) + ["stop"]
    events = [b"data: " + first + b"\n\n"]
    for token, finish in zip(output, finishes, strict=True):
        events.append(event({"content": " word"}, finish, token_ids=[token] if ids else None))
    choice = {"index": 0, "message": {"role": "assistant", "content": " word" * OUTPUT_TOKENS}, "finish_reason": "stop"}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": OUTPUT_TOKENS}
    choice["token_ids"] = output if ids else None
    whole = {**head, "choices": [choice], "usage": usage, "prompt_token_ids": prompt if ids else None}
    return _json(whole), [*events, b"data: [DONE]\n\n"]


def _json(fields: object) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


async def _measure(prompt_tokens: int, turns: int) -> None:
    """Prints a row per kind of call."""
    print(f"{'call':<24}{'direct':>11}{'proxied':>11}{'ratio':>8}{'added, median':>16}{'p99':>11}{'proxy CPU':>12}")
    agents = [f"{agent} {turn}" for turn in range(turns) for agent in range(AGENTS)]
    strangers = [f"{agent} first" for agent in range(AGENTS, AGENTS + STRANGERS)]
    text = "lorem ipsum " * (prompt_tokens // 3)
    with tempfile.TemporaryDirectory() as directory:
        stub, url = _start(__file__, "--serve", "0", "--prompt-tokens", str(prompt_tokens), "--turns", str(turns))
        try:
            for private in (False, True):
                for stream in (False, True):
                    options = ["--out", f"{directory}/{stream}-{private}", "--vocab-size", str(VOCABULARY)]
                    proxy, proxy_url = _start(
                        "-c", PROXY, "--upstream", url, "--listen", "127.0.0.1:0", *options, *["--private"] * private
                    )
                    try:
                        rows = [(agents, "", CHAT), (strangers, ", first", CHAT)]
                        for calls, kind, path in [*rows, *[(agents, ", untouched", UNTOUCHED)] * (not private)]:
                            known = calls is agents
                            if known:
                                await _pairs(url, proxy_url, text, stream, calls[:AGENTS], path)
                            used_s = _processor_s(proxy.pid)
                            pairs = await _pairs(url, proxy_url, text, stream, calls[AGENTS * known :], path)
                            used_s = (_processor_s(proxy.pid) - used_s) / len(pairs[0])
                            name = f"{'stream' if stream else 'plain'}{', private' * private}{kind}"
                            _print_row(name, pairs, used_s)
                    finally:
                        proxy.terminate()
                        proxy.communicate()
        finally:
            stub.kill()
            stub.wait()


def _start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A process that says where it listens."""
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not (match := re.search(r"(?:recording|listening) (http://\S+)", process.stderr.readline())):
        if process.poll() is not None:
            raise SystemExit(f"{arguments}: ended before it listened")
    return process, match[1]


async def _pairs(
    direct: str, proxied: str, text: str, stream: bool, calls: list[str], path: str = CHAT
) -> list[list[float]]:
    """Seconds of each call, direct and proxied; which side goes first changes from pair to pair."""
    seconds: list[list[float]] = [[], []]
    body = json.dumps({"messages": [{"role": "user", "content": text}], "model": "m", "stream": stream})
    async with aiohttp.ClientSession() as session:
        for number, call in enumerate(calls):
            headers = {"Content-Type": "application/json", "X-Task-Id": call.split()[0], "X-Call": call}
            sides = [(0, direct + CHAT), (1, proxied + path)]
            for side, url in sides if number % 2 else reversed(sides):
                start_s = time.perf_counter()
                async with session.post(url, data=body, headers=headers) as response:
                    await response.read()
                    assert response.status == 200
                seconds[side].append(time.perf_counter() - start_s)
    return seconds


def _processor_s(process_id: int) -> float:
    """Processor time that a process has used, user and system."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _print_row(name: str, pairs: list[list[float]], used_s: float) -> None:
    added = [1e3 * (proxied - direct) for direct, proxied in zip(*pairs, strict=True)]
    direct, proxied = (1e3 * statistics.median(side) for side in pairs)
    p99 = statistics.quantiles(added, n=100)[98]
    print(
        f"{name:<24}{direct:>8.2f} ms{proxied:>8.2f} ms{proxied / direct:>8.2f}"
        f"{statistics.median(added):>13.2f} ms{p99:>8.2f} ms{1e3 * used_s:>9.2f} ms",
        flush=True,
    )


def _print_vllm_cost(prompt_tokens: int) -> None:
    """What vLLM pays per call to write a prompt's ids, whole (dict, then JSON) and in a stream (JSON at once)."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    except ImportError:
        return
    ids = list(range(prompt_tokens))
    chunk = ChatCompletionStreamResponse(id="x", created=1, model="m", choices=[], prompt_token_ids=ids)
    for name, write in (
        ("plain", lambda: json.dumps(chunk.model_dump())),
        ("stream", lambda: chunk.model_dump_json(exclude_unset=True)),
    ):
        seconds = []
        for _ in range(50):
            start_s = time.perf_counter()
            write()
            seconds.append(time.perf_counter() - start_s)
        print(f"vLLM's own cost of writing the prompt's ids, {name}: {1e3 * statistics.median(seconds):.2f} ms")


if __name__ == "__main__":
    main()
