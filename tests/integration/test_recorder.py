"""Live agents of the real `openai` client, through the recorder's process, to real vLLM; then their replay."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import REPLAY_VOCAB_SIZE
from rich.console import Console

from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.recorder.journal import CallRecord, JournalReader, journal_path
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.server import Server, ServerOptions, environment, free_port, serve_command
from efficient_lmcache.replay.trace import Call, TraceReader, common_prefix_tokens

openai = pytest.importorskip("openai")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.integration

AGENTS = 3
CALLS = 4
OUTPUT_TOKENS = 8
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROGRAM = "import typer; from efficient_lmcache.replay.recorder.cli_record import record; typer.run(record)"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer learned on the spot, and a chat template."""
    pytest.importorskip("vllm")
    from efficient_lmcache.replay.model import create_model

    directory = create_model(tmp_path_factory.mktemp("chat") / "model", vocab_size=REPLAY_VOCAB_SIZE)
    special = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=REPLAY_VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEMPLATE, Path(__file__).read_text()], trainer)
    # Every id that the model can emit must be one of the tokenizer.
    tokenizer.add_tokens([f"<{number}>" for number in range(REPLAY_VOCAB_SIZE - tokenizer.get_vocab_size())])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM with the tokenizer, and without a connector."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "metrics").mkdir()
    options = ServerOptions(
        model=chat_model,
        vocab_size=REPLAY_VOCAB_SIZE,
        connector="none",
        admission="recompute",
        host_gib=0.0,
        chunk_tokens=256,
        max_model_len_tokens=4096,
        bytes_per_token=1024,
        decision_log=directory / "decisions.jsonl",
        metrics_dir=directory / "metrics",
        block_tokens=128,
        gpu_kv_tokens=80 * 128,
        compile_model=False,
    )
    port = free_port()
    command = [part for part in serve_command(options, port) if part != "--skip-tokenizer-init"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with Server(command, environment(options, os.environ), port, directory / "server.log") as running:
        running.wait_until_ready(600.0)
        yield running


class RecorderProcess:
    """`record` as its users run it."""

    def __init__(self, upstream: str, out: Path, *arguments: str) -> None:
        command = [sys.executable, "-c", PROGRAM, "--upstream", upstream, "--listen", "127.0.0.1:0"]
        self._process = subprocess.Popen(
            [*command, "--out", str(out), *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        said = ""
        while not (match := re.search(r"recording (http://[\d.:]+)", said)):
            line = self._process.stderr.readline()
            assert line, said
            said += line
        self.url = match[1]

    def finish(self) -> str:
        """Ends it as Ctrl-C does; what it says."""
        self._process.send_signal(signal.SIGINT)
        stdout, stderr = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, stderr
        return stdout + stderr


def client(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def bystander(
    server: Server, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RecorderProcess, Path]]:
    """A recorder, and its journal, which it writes before its client has its answer."""
    out = tmp_path_factory.mktemp("bystander") / "T"
    recorder = RecorderProcess(server.base_url, out, "--model", str(chat_model))
    yield recorder, journal_path(out)
    recorder.finish()


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": 'é "token_ids":[1,2]'}], "max_tokens": 6},
    "/v1/completions": {"prompt": [11, 12, 13, 14] * 30, "max_tokens": 6},
    "/v1/responses": {"input": "tell me a story", "max_output_tokens": 6},
}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "change"),
    [
        *((path, {}) for path in REQUESTS),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/chat/completions", TOOLS),
        ("/v1/completions", {"logprobs": 2}),
        ("/v1/completions", {"prompt": "two"}),
        ("/v1/chat/completions", {"max_tokens": -1}),
        ("/v1/chat/completions", {"model": "nobody's"}),
    ],
)
def test_a_client_sees_what_vllm_gives_without_a_recorder(
    server: Server,
    chat_model: Path,
    bystander: tuple[RecorderProcess, Path],
    path: str,
    change: dict[str, Any],
    stream: bool,
) -> None:
    import httpx

    body = {"model": str(chat_model), "temperature": 0, "seed": 1, "stream": stream, **REQUESTS[path], **change}
    if stream and path != "/v1/responses":
        body["stream_options"] = {"include_usage": True}
    recorder, journal = bystander
    recorded_before = _calls_in(journal)
    replies = []
    for base in (server.base_url, recorder.url):
        reply = httpx.post(base + path, json=body, timeout=60)
        text = _without_what_differs(reply.text)
        seen = _merged(text) if reply.headers["content-type"].startswith("text/event-stream") else text
        replies.append((reply.status_code, reply.headers["content-type"], seen))
    assert replies[0] == replies[1]
    assert _calls_in(journal) - recorded_before == (replies[0][0] == 200 and "n" not in change)


def _calls_in(journal: Path) -> int:
    with JournalReader(journal) as reader:
        return sum(isinstance(record, CallRecord) for _, record in reader.records())


def _without_what_differs(text: str) -> str:
    """Identifiers and times are new in every answer, and the second may find the first one's prompt in the cache."""
    text = re.sub(r"(chatcmpl|cmpl|resp|msg|call|chatcmpl-tool)[-_][0-9a-f]{8,}", r"\1", text)
    return re.sub(r'"(created|created_at|sequence_number|cached_tokens)":\d+', r'"\1":0', text)


def _merged(stream: str) -> tuple[str, list[str]]:
    """All text of a stream, and its lines with the text taken out, of equal ones in a row the first: vLLM sends several
    tokens in one event where its client is slow to read."""
    said: list[str] = []

    def take(match: re.Match[str]) -> str:
        said.append(match[2])
        return match[1] + '""'

    lines = [
        re.sub(r'("(?:content|text|delta)":)"((?:[^"\\]|\\.)*)"', take, re.sub(r'"logprobs":\{.*?\]\}', "", line))
        for line in stream.split("\n\n")
    ]
    return "".join(said), [line for line, before in zip(lines, [None, *lines], strict=False) if line != before]


async def _live_agent(url: str, model: str, number: int) -> list[tuple[list[int] | None, str]]:
    """An agent of one kind of request; returns of each call its prompt's ids, where it knows them, and its text."""
    generator = random.Random(number)
    headers = {"X-Task-Id": f"agent-{number}"}
    seen: list[tuple[list[int] | None, str]] = []
    words = ["import", "return", "test", "trace", "server"]
    text = " ".join(generator.choices(words, k=200))
    messages: list[dict[str, str]] = [{"role": "user", "content": text}]
    async with client(url) as api:
        for _ in range(CALLS):
            said = ""
            prompt: list[int] | None = None
            if number == 0:
                stream = await api.chat.completions.create(
                    model=model, messages=messages, max_tokens=OUTPUT_TOKENS, stream=True, extra_headers=headers
                )
                async for chunk in stream:
                    said += chunk.choices[0].delta.content or "" if chunk.choices else ""
            elif number == 1:
                prompt = [generator.randrange(REPLAY_VOCAB_SIZE) for _ in range(300)]
                if seen:
                    prompt = [*(seen[-1][0] or []), *prompt[:50]]
                whole = await api.completions.create(
                    model=model, prompt=prompt, max_tokens=OUTPUT_TOKENS, extra_headers=headers
                )
                said = whole.choices[0].text
            else:
                answer = await api.responses.create(
                    model=model,
                    input=messages,  # type: ignore[arg-type]
                    max_output_tokens=OUTPUT_TOKENS,
                    metadata={"task_id": f"agent-{number}"},
                )
                said = answer.output_text
            seen.append((prompt, said))
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": " ".join(words)}]
            await asyncio.sleep(0.02)
    return seen


@pytest.fixture(scope="module")
def live(
    server: Server, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[tuple[list[int] | None, str]]]]:
    """Three agents at once through a recorder: chat in streams, completions, responses."""
    out = tmp_path_factory.mktemp("live") / "T"
    recorder = RecorderProcess(server.base_url, out, "--model", str(chat_model))

    async def agents() -> list[list[tuple[list[int] | None, str]]]:
        async with client(recorder.url) as api:
            assert [model.id async for model in api.models.list()] == [str(chat_model)]
            with pytest.raises(openai.NotFoundError):
                await api.chat.completions.create(model="nobody's", messages=[{"role": "user", "content": "x"}])
        return list(
            await asyncio.gather(*(_live_agent(recorder.url, str(chat_model), number) for number in range(AGENTS)))
        )

    seen = asyncio.run(agents())
    assert f"{AGENTS} tasks, {AGENTS * CALLS} calls" in recorder.finish()
    return out, seen


def test_what_is_recorded_is_what_the_agents_sent_and_saw(
    live: tuple[Path, list[list[tuple[list[int] | None, str]]]], chat_model: Path
) -> None:
    out, seen = live
    tokenizer = tokenizers.Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    with TraceReader(out) as reader:
        assert [task.task_id for task in reader.tasks] != []
        tasks = {task.task_id: list(reader.calls(number)) for number, task in enumerate(reader.tasks)}
    for number, calls in enumerate(seen):
        recorded = tasks[f"agent-{number}"]
        assert len(recorded) == CALLS
        for call, (prompt, said) in zip(recorded, calls, strict=True):
            assert len(call.output_tokens) == OUTPUT_TOKENS
            if prompt is not None:
                assert call.prompt_tokens.tolist() == prompt
            text = tokenizer.decode(call.output_tokens.tolist())
            assert "\ufffd" in text or said.strip() == text.strip()
        assert all(0.02 <= call.interval_s < 30 for call in recorded[1:])
        _assert_growing(recorded)


def _assert_growing(calls: list[Call]) -> None:
    for earlier, later in pairwise(calls):
        # A chat template's generation prompt may be followed by text that tokenizes otherwise.
        assert common_prefix_tokens(earlier.prompt_tokens, later.prompt_tokens) >= len(earlier.prompt_tokens) - 1


def test_what_was_recorded_live_replays_with_every_token_equal_twice(
    live: tuple[Path, list[list[tuple[list[int] | None, str]]]], server: Server, chat_model: Path, tmp_path: Path
) -> None:
    out, _ = live
    for repeat in range(2):
        options = RunOptions(
            trace=out,
            model=chat_model,
            admission="conditioned",
            host_gib=16 / 1024,
            active_pool=AGENTS,
            out=tmp_path / f"run-{repeat}",
            gpu_kv_tokens=24 * 128,
            chunk_tokens=128,
        )
        record = run_replay(options, Console(quiet=True))
        assert (record.status, record.error) == ("complete", None)
        assert record.outputs_exact == record.calls == AGENTS * CALLS
