"""The recorder's proxy against a fake upstream: what clients see, and what is recorded."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from recorder_harness import Harness, finished_trace, recording, running
from recorder_upstream import Answer, prompt_ids

from efficient_lmcache.replay.recorder.ids import RecentIds
from efficient_lmcache.replay.recorder.proxy import Proxy
from efficient_lmcache.replay.recorder.recorder import RecordOptions
from efficient_lmcache.replay.recorder.response import Answer as recorded_answer

CHAT = {"model": "m", "messages": [{"role": "user", "content": 'say "token_ids":[3,4]'}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": [5, 6, 7, 8]},
    "/v1/responses": {"model": "m", "input": "a long story"},
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "T"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_did_not_ask_for_ids_gets_the_same_bytes_and_the_ids_are_recorded(
    out: Path, path: str, stream: bool
) -> None:
    body = {**BODIES[path], "stream": stream}
    async with recording(RecordOptions(out, 256)) as harness:
        direct = await harness.post(harness.direct, path, body)
        assert await harness.post(harness.url, path, body) == direct
    (call,) = finished_trace(out)["inferred-1"]
    assert call.prompt_tokens.tolist() == prompt_ids(path, body)
    assert call.output_tokens.tolist() == Answer(path, body, True).output


@pytest.mark.parametrize(
    "text",
    [
        b'{"delta":"input_messages","item_id":"msg_1","type":"response.output_text.delta"}',
        b'{"response":{"output":["output_messages"],"input_messages": null,"output_messages" :null},"type":"x"}',
        b'{"response":"input_messages","input_messages":[3]}',
        b'{"response":null,"input_messages":"\xff"}',
    ],
)
def test_what_only_looks_like_raw_messages_stays(text: bytes) -> None:
    answer = recorded_answer("/v1/responses", True, RecentIds())
    assert answer.take(text) == text.replace(b"[3]", b"null")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_asks_for_ids_gets_them_too(out: Path, path: str, stream: bool) -> None:
    option = "enable_response_messages" if path == "/v1/responses" else "return_token_ids"
    body = {**BODIES[path], "stream": stream, option: True}
    async with recording(RecordOptions(out, 256)) as harness:
        direct = await harness.post(harness.direct, path, body)
        assert await harness.post(harness.url, path, body) == direct
        assert b"[" + str(prompt_ids(path, body)[0]).encode() in direct[1]
        assert harness.recorder.tally.calls == 1


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        ("/v1/chat/completions", {"n": 2}, "n is not 1"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "several prompts in one request"),
        ("/v1/completions", {"prompt": [[1], [2]]}, "several prompts in one request"),
        ("/v1/completions", {"echo": True}, "echo"),
        ("/v1/chat/completions", {"fault": "no_ids"}, "the server returned no prompt ids"),
        ("/v1/chat/completions", {"fault": "no_integers"}, "the server's token ids are not all integers"),
        ("/v1/chat/completions", {"fault": "refuse_ids"}, "the server refuses to be asked for token ids"),
        ("/v1/responses", {"background": True}, "background response"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "a prompt that is not text alone",
        ),
    ],
)
async def test_a_call_whose_exact_ids_are_unknown_is_forwarded_and_counted(
    out: Path, path: str, change: dict[str, Any], reason: str
) -> None:
    body = {**BODIES[path], **change}
    async with recording(RecordOptions(out, 256)) as harness:
        direct = await harness.post(harness.direct, path, body)
        assert await harness.post(harness.url, path, body) == direct
        assert dict(harness.recorder.tally.unrecorded) == {reason: 1}
        assert harness.recorder.tally.calls == 0


async def test_other_endpoints_pass_untouched(out: Path) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        for method, path in (("GET", "/v1/models?a=%2F&b"), ("POST", "/tokenize"), ("DELETE", "/teapot")):
            replies = []
            for base in (harness.direct, harness.url):
                async with harness.client.request(
                    method, base + path, data=b"text" if method == "POST" else None, headers={"X-Client": "me"}
                ) as response:
                    headers = {k: v for k, v in response.headers.items() if k != "Date"}
                    replies.append((response.status, headers, await response.read()))
            assert replies[0] == replies[1]
        assert harness.recorder.tally.calls == 0


async def test_a_servers_error_passes_and_its_time_stays_in_the_interval(out: Path) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        path = "/v1/chat/completions"
        direct = await harness.post(harness.direct, path, {**CHAT, "fault": "status500"})
        for _ in range(2):
            await asyncio.sleep(0.05)
            assert await harness.post(harness.url, path, {**CHAT, "fault": "status500"}, **{"X-Task-Id": "a"}) == direct
        await asyncio.sleep(0.05)
        await harness.post(harness.url, path, CHAT, **{"X-Task-Id": "a"})
        assert dict(harness.recorder.tally.failed) == {"HTTP status 500": 2}
    (call,) = finished_trace(out)["a"]
    assert 0.1 <= call.interval_s < 5
    assert call.start_s is not None
    assert call.start_s > call.interval_s


async def test_a_server_that_cannot_be_reached_is_a_bad_gateway(out: Path) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        async with running(Proxy("http://127.0.0.1:9", harness.recorder).runner(0.2)) as url:
            status, body = await harness.post(url, "/v1/chat/completions", CHAT)
        assert status == 502
        assert b"cannot be reached" in body
        assert sum(harness.recorder.tally.failed.values()) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_server_that_dies_in_a_stream_ends_the_clients_stream_abnormally(out: Path, path: str) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        with pytest.raises(aiohttp.ClientPayloadError):
            await harness.post(harness.url, path, {**BODIES[path], "stream": True, "fault": "drop"})
        (reason,) = harness.recorder.tally.failed
        assert reason.startswith("the server broke off its answer")
        assert harness.recorder.tally.calls == 0


async def test_a_stream_without_a_finish_is_no_call(out: Path) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        await harness.post(harness.url, "/v1/chat/completions", {**CHAT, "stream": True, "fault": "unfinished"})
        assert dict(harness.recorder.tally.failed) == {"the answer has no end": 1}


async def test_an_error_in_a_stream_is_counted_by_its_kind_for_its_message_may_quote_the_prompt(out: Path) -> None:
    async with recording(RecordOptions(out, 256, private=True)) as harness:
        body = {**CHAT, "stream": True, "fault": "error"}
        direct = await harness.post(harness.direct, "/v1/chat/completions", body)
        assert await harness.post(harness.url, "/v1/chat/completions", body) == direct
        assert b"cannot parse" in direct[1]
        assert dict(harness.recorder.tally.failed) == {"the server reports InternalServerError": 1}


async def test_a_clients_abort_reaches_the_server(out: Path) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        body = {**CHAT, "stream": True, "fault": "hang"}
        async with harness.client.post(harness.url + "/v1/chat/completions", json=body) as response:
            assert b'"content":""' in await response.content.readany()  # the stream is not held back
        await _until(lambda: harness.upstream.aborted == 1)
        await _until(lambda: harness.recorder.tally.failed.total() == 1)
    assert list(harness.recorder.tally.failed) == ["aborted by the client, or by the recording's end"]


async def test_a_client_that_is_gone_at_the_last_byte_leaves_no_stack_trace(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FAKE: the moment; a write notices a closed connection before the loop does in one of twenty tries."""
    whole = web.StreamResponse.write_eof

    async def write_eof(reply: web.StreamResponse, data: bytes = b"") -> None:
        if type(reply) is web.StreamResponse:  # the proxy's, not the upstream's
            raise ConnectionResetError("Cannot write to closing transport")
        await whole(reply, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", write_eof)
    async with recording(RecordOptions(out, 256)) as harness:
        with pytest.raises(aiohttp.ClientError):
            await harness.post(harness.url, "/v1/chat/completions", CHAT)
        assert harness.recorder.tally.calls == 1
    assert caplog.records == []


async def _send(
    url: str, body: bytes, header: bytes, path: str = "/v1/chat/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request, byte by byte as given."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path}".encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head + header + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return reader, writer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_headers_pass_both_ways_as_long_as_vllms_server_takes_them(out: Path, path: str) -> None:
    credentials = b"Bearer " + b"x" * 20_000
    async with recording(RecordOptions(out, 256)) as harness:
        header = b"Authorization: " + credentials + b"\r\nX-Client: " + credentials
        reader, writer = await _send(harness.url, json.dumps(CHAT).encode(), header, path)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    if path == "/tokenize":  # whose answer tells what has arrived
        assert credentials in answer
    else:
        assert harness.upstream.authorizations == [credentials.decode()]


async def test_a_malformed_request_is_refused_and_its_credentials_are_not_logged(
    out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        reader, writer = await _send(harness.url, b"{}", b"Authorization : Bearer secret")
        assert b"400" in await reader.readline()
        writer.close()
    assert "secret" not in caplog.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_compressed_request_arrives_as_it_was_sent(out: Path, path: str) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        replies = []
        for base in (harness.direct, harness.url):
            async with harness.client.post(
                base + path,
                data=gzip.compress(json.dumps(CHAT).encode()),
                headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
            ) as response:
                replies.append((response.status, await response.read()))
        assert replies[0] == replies[1]
        assert replies[0][0] == 200
        assert harness.recorder.tally.calls == 0


async def _until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen within 5 s")


@pytest.mark.parametrize(
    ("headers", "change"),
    [
        ({"X-Task-Id": "a"}, {"metadata": {"task_id": "b"}}),
        ({}, {"kv_transfer_params": {"efficient_lmcache.task_id": "a"}}),
        ({}, {"metadata": {"task_id": "a"}}),
    ],
)
async def test_the_client_may_name_the_task(out: Path, headers: dict[str, str], change: dict[str, Any]) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        await harness.post(harness.url, "/v1/chat/completions", {**CHAT, **change}, **headers)
    assert list(finished_trace(out)) == ["a"]


@pytest.mark.parametrize(
    ("header", "body"),
    [(b"X-Task-Id: \xff", CHAT), (b"X: y", {**CHAT, "metadata": {"task_id": "\udcff"}})],
)
async def test_a_task_may_have_a_name_that_is_not_unicode(out: Path, header: bytes, body: dict[str, Any]) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        reader, writer = await _send(harness.url, json.dumps(body).encode(), header)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert list(finished_trace(out)) == [r"\udcff"]


async def test_tasks_that_nobody_names_are_told_by_their_prefixes(out: Path) -> None:
    async with recording(RecordOptions(out, 256)) as harness:
        await _agents(harness, {})
    trace = finished_trace(out)
    assert sorted(map(len, trace.values())) == [3, 3]


async def _agents(harness: Harness, headers: dict[str, str]) -> None:
    """Two agents take turns; each prompt extends its previous prompt and output."""
    path = "/v1/completions"
    prompts = [[1] * 200 + [agent] * 30 for agent in (2, 3)]
    for _ in range(3):
        for prompt in prompts:
            body = {"prompt": list(prompt), "max_tokens": 5}
            await harness.post(harness.url, path, body, **headers)
            prompt += [*Answer(path, body, True).output, *range(20)]


async def test_calls_of_a_task_that_overlap_go_to_lanes_and_each_lane_keeps_its_conversation(out: Path) -> None:
    async with recording(RecordOptions(out, 256)) as harness:

        async def sub_agent(number: int) -> None:
            prompt = [number] * 40
            for _ in range(3):
                body = {"prompt": list(prompt), "max_tokens": 400, "stream": True}
                await harness.post(harness.url, "/v1/completions", body, **{"X-Task-Id": "a"})
                prompt += [9] * 10
                await asyncio.sleep(0.03)

        await asyncio.gather(sub_agent(1), sub_agent(2))
    trace = finished_trace(out)
    assert set(trace) == {"a", "a#2"}
    assert sorted(sorted({int(call.prompt_tokens[0]) for call in calls}) for calls in trace.values()) == [[1], [2]]
    assert all(len(calls) == 3 for calls in trace.values())


async def test_ids_that_do_not_fit_the_vocabulary_are_not_recorded(out: Path) -> None:
    async with recording(RecordOptions(out, 64)) as harness:
        status, _ = await harness.post(harness.url, "/v1/chat/completions", CHAT)
        assert status == 200
        assert dict(harness.recorder.tally.unrecorded) == {"a token id outside --vocab-size": 1}
