"""The closed loop against a fake server (see `fake_server`): faults, order, pacing, cancellation."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from fake_server import FakeServer

from efficient_lmcache.replay import driver as driver_module
from efficient_lmcache.replay.driver import (
    CallRow,
    Driver,
    DriverOptions,
    ReplayOptionError,
    ServerLost,
    Tally,
    first_mismatch,
)
from efficient_lmcache.replay.routing import Router
from efficient_lmcache.replay.server import free_port
from efficient_lmcache.replay.trace import Call, Manifest, TraceReader, TraceWriter

OUTPUT_TOKENS = 4


@pytest.fixture
def make_trace(tmp_path: Path) -> Callable[..., Path]:
    def make(tasks: int, calls: int, interval_s: float = 0.0) -> Path:
        path = tmp_path / "trace"
        with TraceWriter(path, Manifest(vocab_size=100, tokenizer="synthetic", source="test")) as writer:
            for task in range(tasks):
                rng = np.random.default_rng(task)
                prompt = rng.integers(90, size=5)
                recorded = []
                for _ in range(calls):
                    output = rng.integers(90, size=OUTPUT_TOKENS)
                    recorded.append(Call(prompt, output, interval_s))
                    prompt = np.concatenate((prompt, output, rng.integers(90, size=3)))
                writer.write_task(f"task-{task}", recorded)
        return path

    return make


def url_of(http: TestServer) -> str:
    return str(http.make_url("/")).rstrip("/")


async def replay(path: Path, server: FakeServer, rows: list[CallRow] | None = None, **options: Any) -> list[CallRow]:
    rows = [] if rows is None else rows
    async with TestServer(server.application()) as http:
        with TraceReader(path) as trace:
            driver_options = DriverOptions(**{"active_pool": 1, "time_scale": 0.0, **options})
            await Driver(trace, Router([url_of(http)]), driver_options, rows.append).run()
    return rows


def statuses(rows: list[CallRow]) -> dict[tuple[str, int], str]:
    return {(row.task, row.call): row.status for row in rows}


async def test_every_call_is_sent_once_as_recorded_and_in_the_tasks_order(make_trace: Callable[..., Path]) -> None:
    path, server = make_trace(tasks=3, calls=4), FakeServer({})
    rows = await replay(path, server)
    assert [(row.task, row.call) for row in rows] == [(f"task-{t}", c) for t in range(3) for c in range(4)]
    assert all(row.exact and row.status == "answered" and row.cached_tokens == 1 for row in rows)
    with TraceReader(path) as trace:
        recorded = [call for task in range(3) for call in trace.calls(task)]
    assert [body["prompt"] for body in server.bodies] == [call.prompt_tokens.tolist() for call in recorded]
    for body, call in zip(server.bodies, recorded, strict=True):
        assert body["vllm_xargs"] == {"efficient_lmcache.forced_tokens": call.output_tokens.tolist()}
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (OUTPUT_TOKENS, 0, True)
    assert server.bodies[4]["kv_transfer_params"] == {"efficient_lmcache.task_id": "task-1"}


async def test_the_pool_keeps_its_slots_busy_and_no_more(make_trace: Callable[..., Path]) -> None:
    server = FakeServer({})
    rows = await replay(make_trace(tasks=7, calls=3), server, active_pool=3)
    assert server.most_in_flight == 3
    started = [row.task for row in sorted(rows, key=lambda row: row.dispatched_s or 0) if row.call == 0]
    assert set(started[:3]) == {"task-0", "task-1", "task-2"}


async def test_a_task_waits_for_its_response_and_then_its_scaled_interval(make_trace: Callable[..., Path]) -> None:
    rows = await replay(make_trace(tasks=1, calls=4, interval_s=0.1), FakeServer({}), time_scale=0.5)
    assert rows[0].eligible_s is not None
    for previous, row in itertools.pairwise(rows):
        assert previous.finished_s is not None
        assert row.eligible_s is not None
        assert row.dispatched_s is not None
        assert row.eligible_s >= previous.finished_s + 0.05
        assert row.dispatched_s >= row.eligible_s


async def test_a_call_counts_as_sent_only_once_a_connection_takes_its_body(make_trace: Callable[..., Path]) -> None:
    rows: list[CallRow] = []
    with TraceReader(make_trace(tasks=1, calls=1)) as trace, pytest.raises(ServerLost):
        await Driver(trace, Router([f"http://127.0.0.1:{free_port()}"]), DriverOptions(1), rows.append).run()
    (row,) = rows
    assert row.status == "failed"
    assert row.eligible_s is not None
    assert row.dispatched_s is None


async def test_a_call_whose_connection_waited_too_long_is_sent_once_on_another(
    make_trace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the driver gets no processor for seconds, and the server has closed what was idle in between."""
    monkeypatch.setattr(driver_module, "_KEEP_ALIVE_S", 0.01)  # less than a connection waits for its call in any case
    server = FakeServer({})
    rows = await replay(make_trace(tasks=2, calls=3, interval_s=0.1), server, active_pool=2, time_scale=1.0)
    assert set(statuses(rows).values()) == {"answered"}
    assert all(row.exact for row in rows)
    assert len(server.bodies) == 6


async def test_hundreds_of_agents_are_all_served_and_each_in_its_order(make_trace: Callable[..., Path]) -> None:
    server = FakeServer({})
    rows = await replay(make_trace(tasks=300, calls=2), server, active_pool=300)
    assert len(rows) == 600
    assert all(row.exact for row in rows)
    for task in range(300):
        times = [(r.eligible_s, r.dispatched_s, r.finished_s) for r in rows if r.task == f"task-{task}"]
        flat = [time_s for of_call in times for time_s in of_call]
        assert flat == sorted(flat, key=lambda time_s: time_s or 0.0)


async def test_more_agents_than_files_may_be_open_by_default_are_all_served_at_once(
    make_trace: Callable[..., Path],
) -> None:
    server, limits = FakeServer(dict.fromkeys(range(1, 61), "hang")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        with pytest.raises(ServerLost):
            await replay(make_trace(tasks=60, calls=1), server, active_pool=60, call_timeout_s=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert server.most_in_flight == 60


async def test_a_replay_leaves_the_processs_garbage_collection_as_it_was(make_trace: Callable[..., Path]) -> None:
    before = gc.get_threshold()
    await replay(make_trace(tasks=1, calls=1), FakeServer({}))
    assert gc.get_threshold() == before


async def test_unlabelled_calls_do_not_name_their_task(make_trace: Callable[..., Path]) -> None:
    server = FakeServer({})
    await replay(make_trace(tasks=1, calls=1), server, label_tasks=False)
    assert "kv_transfer_params" not in server.bodies[0]


@pytest.mark.parametrize(
    ("fault", "position"), [("wrong", OUTPUT_TOKENS - 1), ("short", OUTPUT_TOKENS - 1), ("long", OUTPUT_TOKENS)]
)
async def test_an_inexact_output_is_recorded_with_its_first_mismatch_and_the_task_goes_on(
    fault: str, position: int, make_trace: Callable[..., Path]
) -> None:
    rows = await replay(make_trace(tasks=1, calls=3), FakeServer({2: fault}))
    assert [row.exact for row in rows] == [True, False, True]
    assert [row.first_mismatch for row in rows] == [None, position, None]


@pytest.mark.parametrize(
    ("fault", "error", "http_status"),
    [
        ("status500", "no such luck", 500),
        ("garbage", "not a completion with token ids", 200),
        ("drop", "Disconnected", None),
    ],
)
async def test_a_failed_call_is_recorded_and_its_tasks_later_calls_are_skipped(
    fault: str, error: str, http_status: int | None, make_trace: Callable[..., Path]
) -> None:
    rows = await replay(make_trace(tasks=2, calls=3), FakeServer({2: fault}))
    assert statuses(rows) == {
        ("task-0", 0): "answered",
        ("task-0", 1): "failed",
        ("task-0", 2): "skipped",
        **{("task-1", call): "answered" for call in range(3)},
    }
    assert error in (rows[1].error or "")
    assert rows[1].http_status == http_status


async def test_a_hanging_call_fails_after_its_timeout_and_the_others_go_on(make_trace: Callable[..., Path]) -> None:
    path = make_trace(tasks=2, calls=60, interval_s=0.05)
    rows = await replay(path, FakeServer({1: "hang"}), active_pool=2, time_scale=1.0, call_timeout_s=2.0)
    hung = next(row for row in rows if row.error)
    assert hung.error == "no response within 2 s"
    assert {row.status for row in rows if row.task == hung.task} == {"failed", "skipped"}
    assert {row.status for row in rows if row.task != hung.task} == {"answered"}


async def test_a_server_that_answers_no_call_at_all_is_lost_though_it_calls_itself_healthy(
    make_trace: Callable[..., Path],
) -> None:
    hanging = FakeServer(dict.fromkeys(range(2, 9), "hang"))
    with pytest.raises(ServerLost, match=r"no response within 0.5 s, nor any other call"):
        await replay(make_trace(tasks=9, calls=2), hanging, active_pool=2, call_timeout_s=0.5)


async def test_an_unhealthy_server_ends_the_replay_with_one_error(make_trace: Callable[..., Path]) -> None:
    rows: list[CallRow] = []
    with pytest.raises(ServerLost, match=r"stopped answering at task 'task-0', call 2: engine dead .*answers 503"):
        await replay(make_trace(tasks=2, calls=5), FakeServer({3: "refuse"}), rows)
    assert [row.status for row in rows] == ["answered", "answered", "failed"]


async def test_cancelling_records_what_was_in_flight(make_trace: Callable[..., Path]) -> None:
    rows: list[CallRow] = []
    server = FakeServer({2: "hang"})
    running = asyncio.create_task(replay(make_trace(tasks=1, calls=3), server, rows))
    while server.calls < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [row.status for row in rows] == ["answered", "cancelled"]


@pytest.mark.parametrize(("time_scale", "ahead_s"), [(1.0, 0.0), (0.0, 60.0)])
async def test_cancelling_records_nothing_of_a_call_that_is_not_due_yet(
    time_scale: float, ahead_s: float, make_trace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its agent's pause, and while a connection waits for it already."""
    monkeypatch.setattr(driver_module, "_AHEAD_S", ahead_s)
    rows: list[CallRow] = []
    path, server = make_trace(tasks=1, calls=1, interval_s=60.0), FakeServer({})
    running = asyncio.create_task(replay(path, server, rows, time_scale=time_scale))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (rows, server.bodies) == ([], [])


def test_a_tally_adds_up_answered_calls_only() -> None:
    tally = Tally()
    row = CallRow("t", 0, 10, 2, "answered", exact=True, dispatched_s=1.0, finished_s=2.0)
    for added in (
        row,
        CallRow("t", 1, 20, 3, "answered", first_mismatch=1, dispatched_s=0.5, finished_s=4.0),
        CallRow("t", 2, 40, 5, "failed", dispatched_s=0.1, finished_s=9.0),
        CallRow("t", 3, 80, 5, "skipped"),
    ):
        tally.add(added)
    assert (tally.answered, tally.exact, tally.failed, tally.skipped) == (2, 1, 1, 1)
    assert (tally.prompt_tokens, tally.output_tokens, tally.makespan_s) == (30, 5, 3.5)
    assert Tally().makespan_s is None


def test_first_mismatch_finds_wrong_missing_and_surplus_tokens() -> None:
    assert first_mismatch([1, 2], [1, 2]) is None
    assert first_mismatch([1, 2], [3, 2]) == 0
    assert first_mismatch([1, 2], [1]) == 1
    assert first_mismatch([1, 2], [1, 2, 3]) == 2
    assert first_mismatch([1], []) == 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"active_pool": 0}, "--active-pool"),
        ({"time_scale": -1.0}, "--time-scale"),
        ({"time_scale": float("nan")}, "--time-scale"),
        ({"call_timeout_s": 0.0}, "--call-timeout-s"),
        ({"call_timeout_s": float("inf")}, "--call-timeout-s"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ReplayOptionError, match=f"{name} is "):
        DriverOptions(**{"active_pool": 1, **options})
