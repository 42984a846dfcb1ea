"""The closed loop: A slots take the trace's tasks in order, and every task's calls follow one another.

Each call goes to the engine that the router names shortly before it is due; there may be only one.

A call becomes eligible once the task's previous response has arrived and the recorded interval (times `time_scale`)
has passed; a task's first call once its slot is free, plus that call's interval. All that can be done before is: its
request is encoded, and shortly before it is due a connection has been found that waits only for the body. Prompts are
the recorded ones, outputs are forced to the recorded ones (`forced_output`) and compared token by token. A call that
gets no output fails, and the task's later calls are skipped: they would meet a cache that the recorded task never saw.
Everything that happened to a call is one `CallRow`.

At any moment an agent holds its task's record, its current prompt and the one before it (4 bytes a
token each) and one encoded request (about 6 bytes a token): what a thousand agents need is a thousand times that.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson

from efficient_lmcache.replay.open_files import allow_open_files
from efficient_lmcache.replay.requests import TaskRequests
from efficient_lmcache.replay.routing import Router
from efficient_lmcache.replay.spelling import option
from efficient_lmcache.replay.trace import Call, TraceReader
from efficient_lmcache.replay.turns import Turns

_HEALTH_TIMEOUT_S = 30.0
_KEEP_ALIVE_S = 1.0  # a server closes idle connections (vLLM after 5 s), maybe just as the next call is sent on one
_START_INTERVAL_S = 0.005  # between two slots' starts: longer than reading a task and sending its first call
_AHEAD_S = 0.05  # how long before a call is due its request is made ready: many times what that takes
_ERROR_TEXT_LENGTH = 500


class ReplayOptionError(ValueError):
    """An option, or the model it names, that no replay can be made with."""


class ServerLost(RuntimeError):
    """The server no longer answers; the replay cannot go on.

    Attributes:
        engine: its number.
    """

    def __init__(self, message: str, engine: int) -> None:
        super().__init__(message)
        self.engine = engine


class _WaitedTooLong(Exception):
    """A connection waited for its body for longer than a server may keep an idle one open."""


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """How to replay.

    Attributes:
        active_pool: A, slots that work on tasks at the same time.
        time_scale: multiplies recorded intervals; 0 sends every call at once after its predecessor.
        label_tasks: tell the server which task a call belongs to; without, the connector infers it.
        call_timeout_s: a call without a response for so long fails, and the server counts as lost if no call was
            answered in that time; far above any sound call's time.
    """

    active_pool: int
    time_scale: float = 1.0
    label_tasks: bool = True
    call_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        for name, valid, allowed in (
            ("active_pool", self.active_pool >= 1, "at least 1"),
            ("time_scale", 0 <= self.time_scale < math.inf, "a finite number >= 0"),
            ("call_timeout_s", 0 < self.call_timeout_s < math.inf, "a finite number > 0"),
        ):
            if not valid:
                raise ReplayOptionError(f"{option(name)} is {getattr(self, name)}; it must be {allowed}")


@dataclass(frozen=True, slots=True)
class CallRow:
    """What happened to one call; times are seconds since the replay began.

    Attributes:
        status: answered | failed (no output) | skipped (its task failed earlier) | cancelled (the replay ended).
        exact: every recorded output token came back, and no other.
        first_mismatch: position of the first wrong, missing or surplus token of an answered call.
        cached_tokens: prompt tokens that the server did not compute, where it reports them.
        eligible_s, dispatched_s, finished_s: when the agent would have sent it, when its body was handed to the open
            connection, when the whole response had arrived; None for what did not happen.
        engine: number of the one that it was sent to, from 0; None for a skipped call.
    """

    task: str
    call: int
    prompt_tokens: int
    output_tokens: int
    status: str
    exact: bool = False
    first_mismatch: int | None = None
    cached_tokens: int | None = None
    http_status: int | None = None
    error: str | None = None
    eligible_s: float | None = None
    dispatched_s: float | None = None
    finished_s: float | None = None
    engine: int | None = None


@dataclass(slots=True)
class Tally:
    """What the rows so far add up to.

    Attributes:
        answered, exact: calls with an output, and with exactly the recorded one.
        failed, skipped: calls without an output, and calls not sent because their task had failed.
        prompt_tokens, output_tokens: of the answered calls.
        first_dispatch_s, last_finish_s: their difference is the makespan.
    """

    answered: int = 0
    exact: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_dispatch_s: float = math.inf
    last_finish_s: float = -math.inf

    def add(self, row: CallRow) -> None:
        self.exact += row.exact
        self.failed += row.status == "failed"
        self.skipped += row.status == "skipped"
        if row.status != "answered":
            return
        self.answered += 1
        self.prompt_tokens += row.prompt_tokens
        self.output_tokens += row.output_tokens
        assert row.dispatched_s is not None
        assert row.finished_s is not None
        self.first_dispatch_s = min(self.first_dispatch_s, row.dispatched_s)
        self.last_finish_s = max(self.last_finish_s, row.finished_s)

    @property
    def makespan_s(self) -> float | None:
        """None before the first answer."""
        return self.last_finish_s - self.first_dispatch_s if self.answered else None


class Driver:
    """Replays one trace against the router's engines. `on_row` gets every call's row as it ends."""

    def __init__(
        self, trace: TraceReader, router: Router, options: DriverOptions, on_row: Callable[[CallRow], None]
    ) -> None:
        self._trace = trace
        self._router = router
        self._options = options
        self._on_row = on_row
        self._start_s = 0.0
        self._last_answer_s = 0.0
        self._turns = Turns()

    async def run(self) -> None:
        """Replay all tasks. Cancelling it records the calls in flight as cancelled.

        Raises:
            ServerLost: an engine stopped answering.
            TraceError: the trace is damaged.
        """
        allow_open_files()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=self._options.call_timeout_s)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
        with _rare_garbage_collections():
            async with session:
                await self._replay_all(session)

    async def _replay_all(self, session: aiohttp.ClientSession) -> None:
        waiting = iter(range(len(self._trace.tasks)))
        self._start_s = time.monotonic()
        slots = [asyncio.create_task(self._slot(number, waiting, session)) for number in range(self._slots)]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    @property
    def _slots(self) -> int:
        """A slot beyond the tasks would have nothing to do."""
        return min(self._options.active_pool, len(self._trace.tasks))

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _slot(self, number: int, waiting: Iterator[int], session: aiohttp.ClientSession) -> None:
        # All at once, the first of a thousand would not send its call before the last has read its task.
        await asyncio.sleep(number * _START_INTERVAL_S)
        free_s = number * _START_INTERVAL_S + _AHEAD_S
        for task_index in waiting:
            await self._replay_task(task_index, free_s, session)
            free_s = self._now_s()

    async def _replay_task(self, task_index: int, ready_s: float, session: aiohttp.ClientSession) -> None:
        task = self._trace.tasks[task_index]
        requests = TaskRequests(task.task_id if self._options.label_tasks else None)
        failed = False
        calls = self._trace.calls(task_index)
        for number in range(task.calls):
            await self._turns.wait(ready_s)
            call = next(calls)
            row = CallRow(task.task_id, number, len(call.prompt_tokens), len(call.output_tokens), "skipped")
            if failed:
                self._on_row(row)
                continue
            eligible_s = ready_s + call.interval_s * self._options.time_scale
            await self._turns.wait(eligible_s)
            body = requests.encode(call)
            await asyncio.sleep(eligible_s - _AHEAD_S - self._now_s())
            await self._turns.wait(eligible_s)
            with self._router.sending(task.task_id) as engine:
                row = await self._send(replace(row, eligible_s=eligible_s, engine=engine), body, call, session)
            assert row.finished_s is not None
            ready_s = row.finished_s
            self._on_row(row)
            if row.status == "answered":
                self._last_answer_s = ready_s
            else:
                failed = True
                await self._require_server(session, row)

    async def _send(self, row: CallRow, body: tuple[bytes, ...], call: Call, session: aiohttp.ClientSession) -> CallRow:
        """Send a call once it is eligible; until then a connection waits for it.

        Where this process gets no processor for so long that the server may have closed the connection, another takes
        the call at once.
        """
        try:
            return await self._send_on_waiting(row, body, call, session, _KEEP_ALIVE_S)
        except _WaitedTooLong:
            return await self._send_on_waiting(row, body, call, session, math.inf)

    async def _send_on_waiting(
        self,
        row: CallRow,
        body: tuple[bytes, ...],
        call: Call,
        session: aiohttp.ClientSession,
        longest_wait_s: float,
    ) -> CallRow:
        """Raises _WaitedTooLong, with nothing sent, if the connection waited longer than that."""
        eligible_s = row.eligible_s
        assert row.engine is not None
        assert eligible_s is not None
        url = f"{self._router.base_urls[row.engine]}/v1/completions"
        http_status: int | None = None
        dispatches_s: list[float] = []

        def ended() -> CallRow:
            dispatched_s = dispatches_s[0] if dispatches_s else None
            return replace(row, http_status=http_status, dispatched_s=dispatched_s, finished_s=self._now_s())

        headers = {"Content-Type": "application/json", "Content-Length": str(sum(map(len, body)))}
        data = self._when_due(body, eligible_s, self._now_s() + longest_wait_s, dispatches_s)
        try:
            async with session.post(url, data=data, headers=headers) as response:
                http_status = response.status
                answer = await response.read()
            row = ended()
        except asyncio.CancelledError:
            if self._now_s() >= eligible_s:
                self._on_row(replace(ended(), status="cancelled"))
            raise
        except asyncio.TimeoutError:
            return replace(ended(), status="failed", error=f"no response within {self._options.call_timeout_s:g} s")
        except aiohttp.ClientError as error:
            if not dispatches_s and isinstance(error.__cause__, _WaitedTooLong):
                raise error.__cause__ from None
            return replace(ended(), status="failed", error=f"{type(error).__name__}: {error}")
        return replace(row, **_outcome(http_status, answer, call))

    async def _when_due(
        self, body: tuple[bytes, ...], eligible_s: float, latest_s: float, dispatches_s: list[float]
    ) -> AsyncIterator[bytes]:
        """A request's body, taken by the open connection; notes when that begins. Too late, it is not given."""
        early_s = eligible_s - self._now_s()
        if early_s > 0:
            await asyncio.sleep(early_s)
        if self._now_s() > latest_s:
            raise _WaitedTooLong
        dispatches_s.append(self._now_s())
        for piece in body:
            yield piece

    async def _require_server(self, session: aiohttp.ClientSession, row: CallRow) -> None:
        """After a failed call: was it the call, or is its server gone?"""
        assert row.engine is not None
        urls = self._router.base_urls
        url, name = urls[row.engine], "the server" if len(urls) == 1 else f"engine {row.engine}"
        where = f"{name} stopped answering at task {row.task!r}, call {row.call}: {row.error}"
        # A server that hangs may still call itself healthy.
        if self._now_s() - self._last_answer_s > self._options.call_timeout_s:
            raise ServerLost(f"{where}, nor any other call", row.engine)
        try:
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)) as response:
                if response.status == 200:
                    return
                state = f"/health answers {response.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            state = f"/health: {type(error).__name__}"
        raise ServerLost(f"{where} ({state})", row.engine)


@contextmanager
def _rare_garbage_collections() -> Iterator[None]:
    """Collect garbage only once it is a million objects.

    A thousand agents' calls in flight are so many live objects that a collection takes tens of milliseconds, and finds
    nothing: a call's objects free each other.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _outcome(http_status: int, answer: bytes, call: Call) -> dict[str, Any]:
    """The fields of a row that a response decides."""
    shown = answer.decode(errors="replace")[:_ERROR_TEXT_LENGTH]
    if http_status != 200:
        return {"status": "failed", "error": shown}
    try:
        response = orjson.loads(answer)
        returned = response["choices"][0]["token_ids"]
        usage = response["usage"]
        details = usage.get("prompt_tokens_details") or {}
        served_prompt_tokens = usage["prompt_tokens"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return {"status": "failed", "error": f"not a completion with token ids ({type(error).__name__}): {shown}"}
    if served_prompt_tokens != len(call.prompt_tokens):
        return {"status": "failed", "error": f"the server counted {served_prompt_tokens} prompt tokens"}
    mismatch = first_mismatch(call.output_tokens.tolist(), returned or [])
    return {
        "status": "answered",
        "exact": mismatch is None,
        "first_mismatch": mismatch,
        "cached_tokens": details.get("cached_tokens"),
    }


def first_mismatch(recorded: list[int], returned: list[int]) -> int | None:
    """The first position at which two outputs differ, the shorter one's end included; None for equal ones."""
    if recorded == returned:
        return None
    pairs = zip(recorded, returned, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(recorded), len(returned)))
