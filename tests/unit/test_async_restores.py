"""With LMCache's asynchronous loading, the event of a restore that is over is forgotten, and no other one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")
pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")

import torch
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata, LoadSpec, ReqMeta
from lmcache.v1.event_manager import EventManager, EventStatus, EventType

from efficient_lmcache.connector.async_restores import forget_used


def request(name: str, load: LoadSpec | None) -> ReqMeta:
    return ReqMeta(name, [1], torch.tensor([0]), load_spec=load)


def after_a_step(async_loading: bool = True) -> dict[str, EventStatus]:
    """Of four requests: restored, looked up and computed, still being read, and in the queue."""
    events = EventManager()
    for name in ("restored", "computed", "being read", "queued"):
        future: asyncio.Future[Any] = asyncio.Future(loop=asyncio.new_event_loop())
        events.add_event(EventType.LOADING, name, future)
        if name != "being read":
            events.update_event_status(EventType.LOADING, name, EventStatus.DONE)
    impl: Any = SimpleNamespace(async_loading=async_loading, lmcache_engine=SimpleNamespace(event_manager=events))
    step = [request("restored", LoadSpec(0, 256, True)), request("computed", LoadSpec(0, 256, False))]
    step += [request("being read", LoadSpec(0, 256, True)), request("never looked up", None)]
    forget_used(impl, LMCacheConnectorMetadata(step))
    return {
        name: events.get_event_status(EventType.LOADING, name)
        for name in ("restored", "computed", "being read", "queued")
    }


def test_what_a_restore_has_used_is_forgotten_and_what_nobody_used_is_left_to_lmcache():
    assert after_a_step() == {
        "restored": EventStatus.NOT_FOUND,
        "computed": EventStatus.DONE,
        "being read": EventStatus.ONGOING,
        "queued": EventStatus.DONE,
    }


def test_without_asynchronous_loading_nothing_is_touched():
    assert after_a_step(async_loading=False)["restored"] == EventStatus.DONE


def test_an_lmcache_that_could_not_start_is_left_alone():
    impl: Any = SimpleNamespace(async_loading=True, lmcache_engine=None)
    forget_used(impl, LMCacheConnectorMetadata([request("restored", LoadSpec(0, 256, True))]))
