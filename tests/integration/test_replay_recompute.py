"""Forced outputs and the driver against real vLLM on the CPU, without a connector."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from conftest import REPLAY_VOCAB_SIZE

from efficient_lmcache.replay.driver import CallRow, Driver, DriverOptions, ServerLost
from efficient_lmcache.replay.metrics import PREEMPTIONS, increase, scrape
from efficient_lmcache.replay.protocol import FORCED_TOKENS_KEY
from efficient_lmcache.replay.routing import Router
from efficient_lmcache.replay.server import Server
from efficient_lmcache.replay.trace import Call, Manifest, TraceReader, TraceWriter

pytestmark = pytest.mark.integration


def write_trace(path: Path, tasks: int, prompt_tokens: int, output_tokens: int) -> Path:
    """Tasks of two calls; the second one's prompt continues the first one's output."""
    with TraceWriter(path, Manifest(REPLAY_VOCAB_SIZE, "synthetic", "test")) as writer:
        for task in range(tasks):
            rng = np.random.default_rng(task)
            first = Call(tokens(rng, prompt_tokens), tokens(rng, output_tokens), 0.0)
            prompt = np.concatenate((first.prompt_tokens, first.output_tokens, tokens(rng, 20)))
            writer.write_task(f"task-{task}", [first, Call(prompt, tokens(rng, output_tokens), 0.0)])
    return path


def tokens(rng: np.random.Generator, length: int) -> Any:
    return rng.integers(REPLAY_VOCAB_SIZE, size=length)


async def replay(trace: Path, server: Server, active_pool: int, rows: list[CallRow]) -> None:
    with TraceReader(trace) as reader:
        await Driver(
            reader, Router([server.base_url]), DriverOptions(active_pool, label_tasks=False), rows.append
        ).run()


def body(forced: Any = None, **changed: Any) -> dict[str, Any]:
    xargs = {} if forced is None else {"vllm_xargs": {FORCED_TOKENS_KEY: forced}}
    length = len(forced) if isinstance(forced, list) and forced else 4
    request = {"prompt": list(range(1, 40)), "max_tokens": length, "temperature": 0, "ignore_eos": True}
    return {**request, "return_token_ids": True, **xargs, **changed}


async def post(server: Server, *requests: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    async def one(session: aiohttp.ClientSession, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with session.post("/v1/completions", json=request) as response:
            return response.status, await response.json()

    async with aiohttp.ClientSession(server.base_url) as session:
        return await asyncio.gather(*(one(session, request) for request in requests))


def output(answer: tuple[int, dict[str, Any]]) -> list[int]:
    status, content = answer
    assert status == 200, content
    return content["choices"][0]["token_ids"]


async def test_outputs_are_exact_while_requests_preempt_one_another(recompute_server: Server, tmp_path: Path) -> None:
    before = scrape(recompute_server.base_url, tmp_path / "before")
    rows: list[CallRow] = []
    await replay(
        write_trace(tmp_path / "trace", tasks=10, prompt_tokens=60, output_tokens=280), recompute_server, 8, rows
    )
    assert [row.error for row in rows if not row.exact] == []
    assert len(rows) == 20
    assert increase(before, scrape(recompute_server.base_url, tmp_path / "after"), PREEMPTIONS) > 0


async def test_outputs_are_exact_while_long_prompts_are_prefilled_in_chunks(
    recompute_server: Server, tmp_path: Path
) -> None:
    rows: list[CallRow] = []
    await replay(
        write_trace(tmp_path / "trace", tasks=6, prompt_tokens=700, output_tokens=40), recompute_server, 4, rows
    )
    assert [row.error for row in rows if not row.exact] == []
    assert len(rows) == 12


async def test_requests_that_do_not_opt_in_answer_as_they_do_alone(recompute_server: Server) -> None:
    plain = [body(prompt=list(range(n, n + 30)), max_tokens=12) for n in (1, 100, 200)]
    alone = [output((await post(recompute_server, request))[0]) for request in plain]
    rng = np.random.default_rng(0)
    forced = [tokens(rng, 12).tolist() for _ in range(3)]
    mixed = [request for pair in zip(plain, map(body, forced), strict=True) for request in pair]
    answers = [output(answer) for answer in await post(recompute_server, *mixed)]
    assert answers[1::2] == forced
    assert answers[::2] == alone


async def test_a_forced_output_is_exact_when_sampled_at_random(recompute_server: Server) -> None:
    forced = tokens(np.random.default_rng(1), 30).tolist()
    (answer,) = await post(recompute_server, body(forced, temperature=1.5, top_p=0.9, seed=3, frequency_penalty=1.0))
    assert output(answer) == forced


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (body([REPLAY_VOCAB_SIZE]), f"token ids of this model are 0 to {REPLAY_VOCAB_SIZE - 1}"),
        (body([-1]), "token ids of this model are"),
        (body([]), "non-empty list"),
        (body("1, 2"), "non-empty list"),
        (body([1.5]), "must be an integer"),
        (body([1, 2], max_tokens=5), "it must be the list's length, 2"),
        (body([1, 2], ignore_eos=False), "ignore_eos must be true"),
        (body([1, 2], min_tokens=1), "min_tokens must not be set"),
        (body([1, 2], stop_token_ids=[7]), "stop_token_ids must not be set"),
        (body([1, 2], n=2, temperature=1.0), "n is 2"),
        (body([1] * 20, prompt=[1] * 1140), "within the model's maximum length"),
    ],
)
async def test_a_request_that_cannot_be_forced_is_a_400_and_the_server_lives(
    request_: dict[str, Any], message: str, recompute_server: Server
) -> None:
    ((status, content), good) = await post(recompute_server, request_, body([5, 6, 7]))
    assert status == 400
    assert message in content["error"]["message"]
    assert output(good) == [5, 6, 7]


def test_killing_the_engine_ends_the_replay_with_one_error(recompute_server: Server, tmp_path: Path) -> None:
    """Last in this module: the server does not survive it."""
    rows: list[CallRow] = []
    trace = write_trace(tmp_path / "trace", tasks=8, prompt_tokens=600, output_tokens=200)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: asyncio.run(replay(trace, recompute_server, 4, rows)))
        while not rows:
            assert not running.done()
            time.sleep(0.05)
        os.kill(engine_process(recompute_server), signal.SIGKILL)
        with pytest.raises(ServerLost, match="the server stopped answering at task"):
            running.result(120)
    assert {row.status for row in rows} >= {"answered", "failed"}


def engine_process(server: Server) -> int:
    """The engine among the children of the API server."""
    children = Path(f"/proc/{server.process_id}/task/{server.process_id}/children").read_text().split()
    return next(int(child) for child in children if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text())
