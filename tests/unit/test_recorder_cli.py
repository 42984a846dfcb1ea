"""`record` as a process: its options, its signals, and what a kill -9 leaves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import typer
from recorder_harness import serving
from recorder_upstream import Upstream
from typer.testing import CliRunner, Result

from efficient_lmcache.replay.recorder.cli_record import record
from efficient_lmcache.replay.recorder.journal import JournalReader, journal_path
from efficient_lmcache.replay.recorder.recorder import Recorder, RecordOptions
from efficient_lmcache.replay.trace import TraceReader, TraceWriter

PROGRAM = "import typer; from efficient_lmcache.replay.recorder.cli_record import record; typer.run(record)"


APP = typer.Typer()
APP.command()(record)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(APP, arguments)


@asynccontextmanager
async def proxy(upstream: str, *arguments: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A recorder's process and where it listens; killed at the end if it is still there."""
    command = [sys.executable, "-c", PROGRAM, "--upstream", upstream, "--listen", "127.0.0.1:0", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        said = ""
        while not (match := re.search(r"recording (http://[\d.:]+)", said)):
            line = await asyncio.wait_for(process.stderr.readline(), 60)
            assert line, said
            said += line.decode()
        yield match[1], process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _agent(url: str, name: str, calls: range, finished: set[str]) -> None:
    """Sends calls until the proxy is gone; notes those whose answer it has seen whole."""
    async with aiohttp.ClientSession() as client:
        for number in calls:
            text = f"{name} {number:05d}"
            body = {"messages": [{"role": "user", "content": text}], "stream": number % 2 == 0}
            try:
                async with client.post(
                    url + "/v1/chat/completions", json=body, headers={"X-Task-Id": name}
                ) as response:
                    answer = await response.read()
            except aiohttp.ClientError:
                return
            if b"[DONE]" in answer or b'"usage"' in answer:
                finished.add(text)


async def test_a_killed_proxy_loses_and_doubles_no_finished_call(tmp_path: Path) -> None:
    out, finished = tmp_path / "T", set[str]()
    arguments = ("--out", str(out), "--vocab-size", "256")
    async with serving(Upstream().application()) as upstream:
        for round_number in range(2):
            async with proxy(upstream, *arguments) as (url, process):
                calls = range(10_000 * round_number, 10_000 * (round_number + 1))
                agents = [asyncio.create_task(_agent(url, name, calls, finished)) for name in "abcd"]
                while len(finished) < 60 * (round_number + 1):
                    await asyncio.sleep(0.005)
                process.send_signal(signal.SIGKILL)
                await asyncio.gather(*agents)
        with JournalReader(journal_path(out)) as reader:
            assert sum(1 for _ in reader.records()) >= len(finished)
        async with proxy(upstream, *arguments) as (url, process):
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
    with TraceReader(out) as reader:
        reader.verify()
        recorded = [
            bytes(call.prompt_tokens.astype("u1")).decode()
            for number in range(len(reader.tasks))
            for call in reader.calls(number)
        ]
    assert len(set(recorded)) == len(recorded)
    # A call that had ended when the kill came, but whose last byte was still on its way, may be there too.
    assert finished <= set(recorded)
    assert len(set(recorded) - finished) <= 2 * 4
    assert not journal_path(out).exists()


async def test_finish_makes_the_trace_that_a_killed_proxy_could_not(tmp_path: Path) -> None:
    out, finished = tmp_path / "T", set[str]()
    async with serving(Upstream().application()) as upstream, proxy(upstream, "--out", str(out)) as (url, process):
        await _agent(url, "a", range(3), finished)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert not out.exists()
    done = run("--finish", "--out", str(out))
    assert (done.exit_code, done.stdout) == (0, f"{out}: 1 tasks, 3 calls, 21 prompt tokens\n"), done.stderr
    again = run("--finish", "--out", str(out))
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


def test_reasons_are_shown_as_they_are(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "T"))
    recorder.begin().fail("what [/b] means")
    recorder.close()
    done = run("--finish", "--out", str(tmp_path / "T"))
    assert "1 calls failed or were aborted: what [/b] means\n" in done.stderr


def test_an_interruption_while_the_trace_is_made_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAKE: the moment of the Ctrl-C."""
    recorder = Recorder(RecordOptions(tmp_path / "T"))
    recorder.begin("a").finish(np.array([1], np.uint32), np.array([2], np.uint32))
    recorder.close()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "write_task", interrupted)
        done = run("--finish", "--out", str(tmp_path / "T"))
    assert done.exit_code == 2
    assert "interrupted; T.journal is kept, `record --finish` makes the trace of it" in done.stderr
    assert os.listdir(tmp_path) == ["T.journal"]
    assert run("--finish", "--out", str(tmp_path / "T")).exit_code == 0


async def test_signals_during_the_grace_do_not_cost_the_trace(tmp_path: Path) -> None:
    out = tmp_path / "T"
    async with serving(Upstream().application()) as upstream, proxy(upstream, "--out", str(out)) as (url, process):
        await _agent(url, "a", range(1), set())
        body = {"messages": [{"content": "x"}], "stream": True, "fault": "pause"}
        async with aiohttp.ClientSession() as client, client.post(url + "/v1/chat/completions", json=body) as response:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                process.send_signal(number)
                await asyncio.sleep(0.1)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 30) == 0
    with TraceReader(out) as reader:
        assert reader.totals.calls == 2


async def test_calls_in_flight_at_the_end_are_given_time_and_the_port_is_free_again(tmp_path: Path) -> None:
    out = tmp_path / "T"
    async with serving(Upstream().application()) as upstream, proxy(upstream, "--out", str(out)) as (url, process):
        body = {"messages": [{"content": "x"}], "stream": True, "max_tokens": 2000}
        async with (
            aiohttp.ClientSession() as client,
            client.post(url + "/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(30)) as response,
        ):
            process.send_signal(signal.SIGINT)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 30) == 0
    with TraceReader(out) as reader:
        assert reader.totals.output_tokens == 2000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--upstream", "localhost:8000"], "must be a URL like"),
        (["--upstream", "http://localhost:80000"], "must be a URL like"),
        (["--upstream", "http://127.0.0.1:1/v1"], "without the /v1"),
        (["--upstream", "http://user:secret@127.0.0.1:1"], "has a user or password in it"),
        (["--upstream", "http://127.0.0.1:1", "--listen", "8000"], "must be HOST:PORT"),
        (["--upstream", "http://127.0.0.1:1", "--private"], "--private needs the vocabulary's size"),
        (["--upstream", "http://127.0.0.1:1", "--vocab-size", "5", "--model", "m"], "give one"),
        (["--upstream", "http://127.0.0.1:1", "--model", "nowhere"], "nowhere"),
        ([], "--upstream is missing"),
        (["--finish"], "no such journal; there is nothing to finish\n"),
    ],
)
def test_bad_options_are_one_error_and_leave_nothing(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run("--out", str(tmp_path / "T"), *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_recording_of_nothing_leaves_nothing(tmp_path: Path) -> None:
    async def nothing() -> int | None:
        async with proxy("http://127.0.0.1:9", "--out", str(tmp_path / "T")) as (url, process):
            async with aiohttp.ClientSession() as client, client.get(url + "/health") as response:
                assert response.status == 502
                assert "cannot be reached" in json.loads(await response.read())["error"]["message"]
            process.send_signal(signal.SIGTERM)
            return await asyncio.wait_for(process.wait(), 30)

    assert asyncio.run(nothing()) == 1
    assert os.listdir(tmp_path) == []
