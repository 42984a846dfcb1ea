"""Server mode: what LMCache stores where vLLM restores nothing (`prompt_logprobs`), and what it unlocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")
pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")

from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
    LMCacheMPRequestTracker,
)

from efficient_lmcache.connector.lmcache_server_adapter import ServerSide

BLOCK_TOKENS, CHUNK_TOKENS, PROMPT_TOKENS = 128, 256, 2000


def tracked(found_tokens: int, in_gpu_tokens: int = 0) -> LMCacheMPRequestTracker:
    """A request of which LMCache found something, and the GPU has something."""
    request: Any = SimpleNamespace(
        request_id="request",
        cache_salt=None,
        sampling_params=None,
        all_token_ids=list(range(PROMPT_TOKENS)),
        num_prompt_tokens=PROMPT_TOKENS,
        mm_features=[],
        mm_hashes=[],
    )
    tracker = LMCacheMPRequestTracker(request)
    tracker.num_lmcache_hit_tokens = tracker.num_stored_tokens = found_tokens
    tracker.num_vllm_hit_tokens = in_gpu_tokens
    return tracker


def stored(tracker: LMCacheMPRequestTracker, steps: list[int], in_gpu_tokens: int = 0) -> list[tuple[int, int, int]]:
    """After each step of a chunked prefill: what it stores, from where to where, and how much is computed."""
    rows, computed = [], in_gpu_tokens
    for tokens in steps:
        computed += tokens
        tracker.increase_num_scheduled_tokens(tokens)
        tracker.allocated_block_ids = {0: list(range(1, 1 + -(-computed // BLOCK_TOKENS)))}
        told = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, CHUNK_TOKENS, [BLOCK_TOKENS])
        if told is not None:
            rows.append((told.op.start, told.op.end, computed))
    return rows


def told_that_nothing_is_restored(tracker: LMCacheMPRequestTracker) -> LMCacheMPRequestTracker:
    connector: Any = SimpleNamespace(request_trackers={"request": tracker}, scheduler_adapter=None)
    ServerSide(connector).restores_nothing("request")
    return tracker


def test_lmcache_alone_stores_what_is_not_computed_yet():
    """Once this fails, `ServerSide.restores_nothing` can go."""
    [(start, end, computed)] = stored(tracked(found_tokens=512), [700])
    assert (start, end) == (512, 768)
    assert end > computed


@pytest.mark.parametrize("step", [100, 130, 256, 300, 700, 767, 1000])
@pytest.mark.parametrize("in_gpu_tokens", [0, 256])
def test_nothing_is_stored_before_it_is_computed_and_all_of_it_then(step, in_gpu_tokens):
    tracker = told_that_nothing_is_restored(tracked(512, in_gpu_tokens))
    steps, left = [], PROMPT_TOKENS - in_gpu_tokens
    while left:
        steps.append(min(step, left))
        left -= steps[-1]
    rows = stored(tracker, steps, in_gpu_tokens)
    assert all(end <= computed for _, end, computed in rows)
    assert rows[0][0] == 512
    assert rows[-1][1] == PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    assert all(before[1] == after[0] for before, after in itertools.pairwise(rows))


class Lookups:
    """LMCache's side of a lookup, as far as its end is told: which spans of whose prompts it unlocks."""

    def __init__(self, looked_up: set[str]) -> None:
        self._pending_lookups = looked_up
        self.lmcache_tokens_per_chunk = CHUNK_TOKENS
        self.unlocked: list[tuple[str, int, int, int, str]] = []

    def free_lookup_locks(
        self, token_ids: list[int], start: int, end: int, request_id: str, cache_salt: str, request_configs: Any
    ) -> None:
        assert request_configs is None
        self.unlocked.append((request_id, len(token_ids), start, end, cache_salt))


def unlocked(state: LMCacheMPRequestState, looked_up: set[str]) -> list[tuple[str, int, int, int, str]]:
    tracker = tracked(found_tokens=512)
    tracker.state, tracker.cache_salt = state, "digest"
    lookups: Any = Lookups(looked_up)
    connector: Any = SimpleNamespace(request_trackers={"request": tracker}, scheduler_adapter=lookups)
    for request_id in ("request", "one that LMCache never saw"):
        ServerSide(connector).release_unscheduled(request_id)
    return list(lookups.unlocked)


def test_what_was_found_for_a_request_that_ends_unscheduled_is_unlocked():
    whole_chunks = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    assert unlocked(LMCacheMPRequestState.PREFETCHING, {"request"}) == [
        ("request", PROMPT_TOKENS, 0, whole_chunks, "digest")
    ]


@pytest.mark.parametrize("state", list(LMCacheMPRequestState))
def test_a_request_that_was_scheduled_or_never_looked_up_has_nothing_to_unlock(state):
    looked_up = set() if state is LMCacheMPRequestState.PREFETCHING else {"request"}
    assert unlocked(state, looked_up) == []
