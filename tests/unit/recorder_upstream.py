"""A FAKE of vLLM's HTTP API for the recorder's tests: vLLM's forms of answer, with and without token ids.

Ids are the prompt's UTF-8 bytes; the output is the alphabet from where the prompt's length says. A request may ask
for a fault in its "fault" field: status500, refuse_ids (400 if asked for ids), no_ids, no_integers, unfinished (no
finish reason); and in a stream, after the first output token: drop (the connection breaks), pause (0.5 s), hang, error.

    python recorder_upstream.py PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web


class Upstream:
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.aborted = 0

    def application(self) -> web.Application:
        # Headers as long as vLLM's server takes them.
        application = web.Application(client_max_size=1 << 26, handler_args={"max_field_size": 1 << 22})
        application.router.add_post("/v1/chat/completions", self.generate)
        application.router.add_post("/v1/completions", self.generate)
        application.router.add_post("/v1/responses", self.generate)
        application.router.add_route("*", "/{path:.*}", self.other)
        return application

    async def other(self, request: web.Request) -> web.Response:
        """What arrived, told back."""
        told = {"path": request.raw_path, "method": request.method, "body": (await request.read()).decode()}
        headers = {"X-Upstream": "yes", "X-Seen": request.headers.get("X-Client", "")}
        return web.json_response(told, headers=headers, status=418 if "teapot" in request.path else 200)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.authorizations += request.headers.getall("Authorization", [])
        fault = body.get("fault", "")
        asked = bool(body.get("return_token_ids") or body.get("enable_response_messages"))
        if fault == "status500" or (fault == "refuse_ids" and asked):
            return web.json_response({"error": {"message": "no"}}, status=500 if fault == "status500" else 400)
        answer = Answer(request.path, body, asked and fault != "no_ids")
        if not body.get("stream"):
            return web.Response(text=dumps(answer.whole()), content_type="application/json")
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        try:
            for number, event in enumerate(answer.events(fault)):
                await reply.write(event)
                await asyncio.sleep(0)
                if number == 1 and fault == "drop":
                    assert request.transport is not None
                    request.transport.close()
                    return reply
                if number == 1 and fault == "error":
                    error = {"message": "cannot parse: secret", "type": "InternalServerError", "code": 500}
                    await reply.write(f"data: {dumps({'error': error})}\n\ndata: [DONE]\n\n".encode())
                    return reply
                if number == 1 and fault == "pause":
                    await asyncio.sleep(0.5)
                if number == 1 and fault == "hang":
                    await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return reply


def dumps(fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


class Answer:
    def __init__(self, path: str, body: dict[str, Any], ids: bool) -> None:
        self.path, self.ids = path, ids
        self.prompt = prompt_ids(path, body)
        count = body.get("max_tokens") or body.get("max_output_tokens") or 4
        self.output = [97 + (len(self.prompt) + i) % 26 for i in range(count)]
        self.usage = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
        self.no_integers = body.get("fault") == "no_integers"
        self.n = body.get("n") or 1

    def given(self, ids: list[int]) -> list[Any] | None:
        if not self.ids:
            return None
        return [None, *ids] if self.no_integers else ids

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": "x", "object": kind, "created": 1, "model": "m"}

    def whole(self) -> dict[str, Any]:
        text = bytes(self.output).decode()
        if self.path == "/v1/responses":
            return self.response("completed", text)
        finish = {"logprobs": None, "finish_reason": "stop", "token_ids": self.given(self.output)}
        if self.path == "/v1/completions":
            prompt = {"prompt_token_ids": self.given(self.prompt)}
            choices = [{"index": i, "text": text, **finish, **prompt} for i in range(self.n)]
            return {**self.head("text_completion"), "choices": choices, "usage": self.usage}
        message = {"role": "assistant", "content": text + ' "token_ids":[1,2] \\ é'}
        choices = [{"index": i, "message": message, **finish} for i in range(self.n)]
        whole = {**self.head("chat.completion"), "choices": choices, "usage": self.usage}
        return {**whole, "prompt_token_ids": self.given(self.prompt), "kv_transfer_params": None}

    def response(self, status: str, text: str) -> dict[str, Any]:
        whole = {"id": "x", "output": [{"content": [{"text": text}]}], "status": status}
        usage = {"input_tokens": len(self.prompt), "output_tokens": len(self.output)}
        raw = {"input_messages": None, "output_messages": None}
        if self.ids and status == "completed":
            prompt = bytes(byte % 128 for byte in self.prompt).decode()
            messages = (("input_messages", prompt, self.prompt), ("output_messages", text, self.output))
            raw = {k: [{"message": m, "tokens": t, "type": "raw_message_tokens"}] for k, m, t in messages}
        return {**whole, "usage": usage if status == "completed" else None, "metrics": None, **raw}

    def events(self, fault: str) -> list[bytes]:
        if self.path == "/v1/responses":
            return self.response_events()
        completions = self.path == "/v1/completions"
        head = self.head("text_completion" if completions else "chat.completion.chunk")
        chunks = []
        if not completions:
            delta = {"role": "assistant", "content": ""}
            first = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append({**head, "choices": [first], "prompt_token_ids": self.given(self.prompt)})
        for number, token in enumerate(self.output):
            last = number == len(self.output) - 1
            reason = "stop" if last and fault != "unfinished" else None
            said = {"text": chr(token)} if completions else {"delta": {"content": chr(token)}}
            if not completions and number == 1 and not last:
                if not self.ids:
                    continue  # vLLM's parser held the token back
                said = {"delta": {}}
            prompt = {"prompt_token_ids": self.given(self.prompt) if not number else None} if completions else {}
            ids = {"token_ids": self.given([token])}
            chunks.append({**head, "choices": [{"index": 0, **said, "finish_reason": reason, **prompt, **ids}]})
        chunks.append({**head, "choices": [], "usage": self.usage})
        return [f"data: {dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]

    def response_events(self) -> list[bytes]:
        text = bytes(self.output).decode()
        events = [{"type": "response.created", "response": self.response("in_progress", "")}]
        events += [{"type": "response.output_text.delta", "delta": character} for character in text]
        events.append({"type": "response.completed", "response": self.response("completed", text)})
        return [f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode() for event in events]


def prompt_ids(path: str, body: dict[str, Any]) -> list[int]:
    """The ids that the fake gives a prompt."""
    if path == "/v1/completions":
        prompt = body["prompt"]
        prompt = prompt[0] if isinstance(prompt[0], list) else prompt
        return prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else list(str(prompt).encode())
    if path == "/v1/responses":
        return list(str(body["input"]).encode())
    return list("".join(str(message["content"]) for message in body["messages"]).encode())


if __name__ == "__main__":
    web.run_app(Upstream().application(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
