"""The reverse proxy: forwards everything, and reads along where a model is called.

A client gets what it would have got without the proxy: status, headers, every event as soon as it is whole, an
abnormal end where the server's was one. Where it did not ask for token ids, they are taken out again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from efficient_lmcache.replay.recorder.ids import RecentIds
from efficient_lmcache.replay.recorder.recorder import LiveCall, Recorder
from efficient_lmcache.replay.recorder.request import RECORDED_PATHS, UNREAD_PATHS, CallRequest, read_request
from efficient_lmcache.replay.recorder.response import Answer
from efficient_lmcache.replay.recorder.sse import EventStream

# Of one connection, not of the message (RFC 9110, 7.6.1).
_HOP_BY_HOP = (
    "Connection",
    "Keep-Alive",
    "Proxy-Authenticate",
    "Proxy-Authorization",
    "Proxy-Connection",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
)
_LARGEST_BODY_BYTES = 1 << 30
_LONGEST_HEADER_BYTES = 4 << 20  # as vLLM's server
_MOST_HEADERS = 256
_IDLE_CONNECTION_S = 2.0  # vLLM's server closes idle connections after 5 s, and a call must not meet that moment
_BAD_GATEWAY = 502
_REFUSALS = (400, 422)
_ABORTED = "aborted by the client, or by the recording's end"


class UpstreamError(Exception):
    """The server cannot be reached, or ended its answer early."""


class Proxy:
    """Forwards to `upstream` (scheme, host, port, perhaps a path), and records with `recorder`.

    `on_call` is called after each call to a path that is recorded.
    """

    def __init__(self, upstream: str, recorder: Recorder, on_call: Callable[[], None] = lambda: None) -> None:
        self._upstream = upstream.rstrip("/")
        self._recorder = recorder
        self._on_call = on_call
        self._recent = RecentIds()
        self._session: aiohttp.ClientSession

    def runner(self, grace_s: float) -> web.AppRunner:
        """Serves it; at its cleanup, calls in flight have `grace_s` to end by themselves."""
        logger = logging.getLogger(__name__)
        logger.addFilter(_quotes_no_request)
        return web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,  # how a client's abort reaches the server
            auto_decompress=False,  # a body is passed on as it comes
            max_line_size=_LONGEST_HEADER_BYTES,
            max_field_size=_LONGEST_HEADER_BYTES,
            max_headers=_MOST_HEADERS,
            logger=logger,
            shutdown_timeout=grace_s,
        )

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._handle)
        application.cleanup_ctx.append(self._client)
        return application

    async def _client(self, _: web.Application) -> AsyncIterator[None]:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            max_line_size=_LONGEST_HEADER_BYTES,
            max_field_size=_LONGEST_HEADER_BYTES,
        )
        async with self._session:
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.method != "POST" or request.path not in (*RECORDED_PATHS, *UNREAD_PATHS):
                return await self._forward(request)
            try:
                return await self._record(request)
            finally:
                self._on_call()
        except UpstreamError as error:
            return _bad_gateway(error)
        except OSError:
            # The client is gone, as a write has noticed before the loop has.
            raise asyncio.CancelledError from None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Anything that is not a model's call."""
        body = request.content if request.can_read_body else None
        async with _Exchange(self._session, self._url(request), request, request.headers, body) as exchange:
            await exchange.relay()
            return exchange.reply

    async def _record(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path in RECORDED_PATHS:
            asked = read_request(request.path, body, request.headers)
        else:
            asked = CallRequest(request.path, body, obstacle=f"{request.path} is not recorded")
        call = self._recorder.begin(asked.task, asked.salt)
        try:
            return await self._call(request, body, asked, call)
        except asyncio.CancelledError:
            call.fail(_ABORTED)
            raise
        except (UpstreamError, OSError) as error:
            call.fail(str(error) if isinstance(error, UpstreamError) else _ABORTED)
            raise

    async def _call(self, request: web.Request, body: bytes, asked: CallRequest, call: LiveCall) -> web.StreamResponse:
        headers = CIMultiDict(request.headers)
        # Compressed ids could not be taken out.
        headers["Accept-Encoding"] = "identity"
        headers["Content-Length"] = str(len(asked.body))
        async with _Exchange(self._session, self._url(request), request, headers, asked.body) as exchange:
            if asked.obstacle is not None:
                return await exchange.relay_call(call, asked.obstacle)
            if not (asked.added and exchange.status in _REFUSALS):
                return await exchange.serve(call, Answer(asked.path, asked.added, self._recent))
        # Was it the client's request that was refused, or what we added? The client's own gets the client's answer.
        headers["Content-Length"] = str(len(body))
        async with _Exchange(self._session, self._url(request), request, headers, body) as exchange:
            return await exchange.relay_call(call, "the server refuses to be asked for token ids")

    def _url(self, request: web.Request) -> URL:
        return URL(self._upstream + request.raw_path, encoded=True)


class _Exchange:
    """One request to the server and its answer on the way to the client; `async with` ends it on both sides."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        request: web.Request,
        headers: Mapping[str, str],
        body: bytes | aiohttp.StreamReader | None,
    ) -> None:
        self._request = request
        self._sending = session.request(
            request.method, url, headers=_end_to_end(headers, ("Host", "Expect")), data=body, allow_redirects=False
        )
        self._response: aiohttp.ClientResponse
        self.reply = web.StreamResponse()

    async def __aenter__(self) -> _Exchange:
        try:
            self._response = await self._sending
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(f"the server cannot be reached: {error}") from error
        self.status = self._response.status
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An answer that has not been read to its end costs its connection, and so ends the call in the server.
        self._response.close()

    async def serve(self, call: LiveCall, answer: Answer) -> web.StreamResponse:
        """Give the client what it asked for of the answer to a call, and write down what became of the call."""
        if self.status != 200:
            return await self.relay_call(call, "")
        if self._response.content_type == "text/event-stream":
            await self._serve_stream(call, answer)
        else:
            await self._serve_body(call, answer)
        return self.reply

    async def relay_call(self, call: LiveCall, obstacle: str) -> web.StreamResponse:
        """Pass on the answer to a call that cannot be recorded."""
        broken = await self.relay()
        if broken is not None or self.status != 200:
            call.fail(broken or f"HTTP status {self.status}")
        else:
            call.leave_out(obstacle)
        return self.reply

    async def relay(self) -> str | None:
        """Pass the answer on as it comes; returns why it has no end, None if it has one."""
        await self._start(self._response.headers.get("Content-Length"))
        try:
            while data := await self._read():
                await self.reply.write(data)
        except UpstreamError as error:
            self._break_off()
            return str(error)
        await self.reply.write_eof()
        return None

    async def _serve_body(self, call: LiveCall, answer: Answer) -> None:
        pieces = []
        while data := await self._read():
            pieces.append(data)
        body = b"".join(pieces)
        left = answer.take(body) or b""
        _settle(call, answer)
        await self._start(str(len(left)))
        await self.reply.write_eof(left)

    async def _serve_stream(self, call: LiveCall, answer: Answer) -> None:
        await self._start(None)
        events = EventStream(answer)
        try:
            while data := await self._read():
                unseen = not answer.shows_prompt
                left = events.feed(data)
                if answer.finished:
                    call.know_output()
                if events.ended:
                    _settle(call, answer)
                if left:
                    await self.reply.write(left)
                # Reading a long prompt's ids takes a millisecond, which the model's next token takes too.
                if unseen and (prompt := answer.prompt()) is not None:
                    call.know_prompt(prompt)
            await self.reply.write(events.rest())
        except UpstreamError as error:
            call.fail(str(error))
            self._break_off()
            return
        except (asyncio.CancelledError, OSError):
            # A client that has seen the output's end need not wait for the stream's.
            if answer.finished:
                _settle(call, answer)
            raise
        _settle(call, answer)
        await self.reply.write_eof()

    async def _start(self, content_length: str | None) -> None:
        self.reply.set_status(self.status, self._response.reason)
        for name, value in _end_to_end(self._response.headers, ("Content-Length",)).items():
            self.reply.headers.add(name, value)
        if content_length is not None:
            self.reply.headers["Content-Length"] = content_length
        await self.reply.prepare(self._request)

    async def _read(self) -> bytes:
        """What has come; nothing at the end. UpstreamError if that was no end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(f"the server broke off its answer: {error}") from error

    def _break_off(self) -> None:
        """Close the client's connection with its answer unfinished, behind what it has already been given."""
        if self._request.transport is not None:
            self._request.transport.close()


def _settle(call: LiveCall, answer: Answer) -> None:
    """Write down what became of a call whose answer has been seen whole."""
    if answer.error is not None or not answer.finished:
        call.fail(answer.error or "the answer has no end")
        return
    try:
        output = answer.output()
    except ValueError as error:
        call.leave_out(str(error))
        return
    missing, prompt = answer.missing(output), answer.prompt()
    if missing is not None or prompt is None:
        call.leave_out(missing or "")
    else:
        call.finish(prompt, output)


def _end_to_end(headers: Mapping[str, str], without: tuple[str, ...]) -> CIMultiDict[str]:
    """A message's own headers: not those of the connection, named by itself or by its `Connection` header."""
    kept = CIMultiDict(headers)
    named = [name.strip() for line in kept.getall("Connection", []) for name in line.split(",") if name.strip()]
    for name in (*_HOP_BY_HOP, *named, *without):
        kept.popall(name, None)
    return kept


def _quotes_no_request(record: logging.LogRecord) -> bool:
    """What is wrong with a malformed request is shown by quoting it, perhaps its credentials; its client is told."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _bad_gateway(error: UpstreamError) -> web.Response:
    body = {"error": {"message": str(error), "type": "BadGateway", "code": _BAD_GATEWAY}}
    return web.Response(status=_BAD_GATEWAY, text=json.dumps(body), content_type="application/json")
