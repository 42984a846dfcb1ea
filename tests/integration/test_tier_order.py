"""The simulated host tier against LMCache's own CPU tier, call by call."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")
pytest.importorskip("numba", reason="needs the extra sizing")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from efficient_lmcache.sizing.policy_tier import HostTier

pytestmark = pytest.mark.integration

CAPACITY = 40
CHUNK_TOKENS = 16
SHAPE = torch.Size([2, 1, CHUNK_TOKENS, 128])
CHUNK_BYTES = 2 * CHUNK_TOKENS * 128 * 2


@pytest.fixture
def backend():
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS, local_cpu=True, max_local_cpu_size=CAPACITY * CHUNK_BYTES / 1024**3
    )
    metadata = LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(1, 2, CHUNK_TOKENS, 1, 128),
    )
    PinMonitor.GetOrCreate(config)
    return LocalCPUBackend(config, metadata, dst_device="cpu")


def key(chunk: int) -> CacheEngineKey:
    return CacheEngineKey("model", 1, 0, chunk, torch.bfloat16)


def look_up(backend: LocalCPUBackend, chunks: list[int]) -> int:
    """As LMCache's engine does: pin the match, touch it, and unpin it when the request has what it needs."""
    absent = (place for place, chunk in enumerate(chunks) if not backend.contains(key(chunk), pin=True))
    found = next(absent, len(chunks))
    backend.touch_cache()
    for chunk in chunks[:found]:
        backend.unpin(key(chunk))
    return found


def store(backend: LocalCPUBackend, chunks: list[int], deduplicated: bool) -> None:
    """Allocate all, copy (left out here), then put all."""
    kept = (chunk for chunk in chunks if not deduplicated or not backend.contains(key(chunk)))
    allocated = [(chunk, backend.allocate(SHAPE, torch.bfloat16, busy_loop=False)) for chunk in kept]
    backend.batched_submit_put_task([key(chunk) for chunk, _ in allocated], [memory for _, memory in allocated])
    for _, memory in allocated:
        memory.ref_count_down()


@pytest.mark.parametrize("deduplicated", [False, True])
def test_every_call_finds_what_lmcaches_own_tier_holds(backend, deduplicated):
    """Conversations that grow, some of them forked from others; a third of the calls is declined."""
    choice = random.Random(deduplicated)
    tier = HostTier(CAPACITY, 100_000)
    conversations = [[0] for _ in range(8)]
    chunks = 1
    matches = []
    for _ in range(600):
        place = choice.randrange(len(conversations))
        if choice.random() < 0.1:
            source = choice.choice(conversations)
            conversations[place] = source[: choice.randint(1, min(len(source), 8))]
        grown = choice.randint(1, 3)
        conversations[place] = conversations[place] + list(range(chunks, chunks + grown))
        chunks += grown
        call = conversations[place][:CAPACITY]
        found = look_up(backend, call)
        keys = np.array(call, np.int64)
        assert tier.match(keys) == found
        tier.use(keys[:found][::-1])
        if choice.random() < 2 / 3:
            store(backend, call[found:], deduplicated)
            tier.store(keys[found:])
        matches.append(found / len(call))
    assert 0.1 < sum(matches) / len(matches) < 0.9
    assert tier.registered_chunks == CAPACITY == len(backend.hot_cache)
