"""Chunks between a real LMCache's CPU tier and its remote tier, by each tier's decision. No vLLM."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmcache_tiers import CHUNK_TOKENS, LMCacheTiers

from efficient_lmcache.connector.tier_writes import TierWrites

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch", reason="torch is not installed (the cpu or gpu extra)")
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")

BOTH, CPU_ONLY, REMOTE_ONLY, NEITHER = (
    TierWrites(cpu=cpu, remote=remote) for cpu, remote in ((True, True), (True, False), (False, True), (False, False))
)
CPU_CHUNKS, PROMPT_CHUNKS = 12, 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    made = LMCacheTiers(tmp_path_factory.mktemp("remote"), CPU_CHUNKS, staging_chunks=PROMPT_CHUNKS)
    yield made
    made.close()


@pytest.fixture
def tiers(engine):
    engine.clear()
    return engine


def prompt(task: int, chunks: int = PROMPT_CHUNKS) -> list[int]:
    return list(range(10_000 * task, 10_000 * task + chunks * CHUNK_TOKENS))


def kv(task: int, chunks: int):
    """A task's KV is a function of its tokens, as a model's is."""
    full = torch.randn(PROMPT_CHUNKS * CHUNK_TOKENS // 4, 2, 4, 64, generator=torch.Generator().manual_seed(task))
    return full[: chunks * CHUNK_TOKENS // 4].to(torch.bfloat16)


def serve(tiers: LMCacheTiers, task: int, writes: TierWrites, chunks: int = PROMPT_CHUNKS) -> int:
    """Returns the tokens that were restored, bit for bit."""
    tokens, params = prompt(task, chunks), writes.transfer_params()
    found = tiers.look_up(tokens)
    restored = tiers.restore(tokens[:found], params) if found else None
    if restored is not None:
        assert torch.equal(restored, kv(task, chunks)[: found // 4])
    if writes != NEITHER:  # LMCache itself skips the store
        tiers.store(tokens, kv(task, chunks), found, params)
    return found


def test_a_request_that_the_cpu_tier_declines_goes_to_the_remote_tier_alone(tiers):
    serve(tiers, 0, BOTH)
    residents = tiers.residents
    serve(tiers, 1, REMOTE_ONLY)
    assert tiers.residents == residents
    assert tiers.remote_chunks == 2 * PROMPT_CHUNKS
    assert tiers.counted == {"remote_only_chunks": PROMPT_CHUNKS}


def test_a_request_that_the_remote_tier_declines_goes_to_the_cpu_tier_alone(tiers):
    serve(tiers, 0, CPU_ONLY)
    assert len(tiers.residents) == PROMPT_CHUNKS
    assert tiers.remote_chunks == 0


def test_a_remote_hit_stays_in_the_cpu_tier_if_that_admits_it_and_only_then(tiers):
    serve(tiers, 0, REMOTE_ONLY)
    assert serve(tiers, 0, REMOTE_ONLY) == PROMPT_CHUNKS * CHUNK_TOKENS
    assert serve(tiers, 0, NEITHER) == PROMPT_CHUNKS * CHUNK_TOKENS
    assert tiers.residents == []
    assert tiers.counted["unpromoted_chunks"] == 2 * PROMPT_CHUNKS
    assert serve(tiers, 0, BOTH) == PROMPT_CHUNKS * CHUNK_TOKENS
    assert len(tiers.residents) == PROMPT_CHUNKS


def test_without_room_for_staging_stores_are_cut_short_and_restores_are_not(tmp_path):
    tiers = LMCacheTiers(tmp_path, CPU_CHUNKS, staging_chunks=2)
    for task in range(3):
        serve(tiers, task, CPU_ONLY, chunks=4)
    assert len(tiers.residents) == CPU_CHUNKS
    for stored in (2, 4, 5):  # each turn finds what the one before it left, and stores what comes next
        serve(tiers, 9, REMOTE_ONLY)
        assert tiers.look_up(prompt(9)) == stored * CHUNK_TOKENS
        tiers.restore(prompt(9), REMOTE_ONLY.transfer_params())
    assert tiers.counted["remote_dropped_stores"] == 2
    # Five chunks were restored at once: two through staging, three in the place of residents.
    assert serve(tiers, 9, REMOTE_ONLY) == PROMPT_CHUNKS * CHUNK_TOKENS
    assert len(tiers.residents) == CPU_CHUNKS - 3
    tiers.close()


def test_a_scheduler_that_asks_hears_what_lies_in_the_cpu_tier(tiers):
    serve(tiers, 0, BOTH, chunks=2)
    serve(tiers, 0, REMOTE_ONLY)
    answer = tiers.engine.lookup(
        tokens=prompt(0),
        lookup_id="request",
        pin=True,
        request_configs={"lmcache.efficient.ask_cpu_match": True},
    ).to_bytes(4, "big")
    found, in_cpu_tier = (int.from_bytes(answer[start : start + 4], "big") for start in (0, 4))
    assert (found, in_cpu_tier) == (5 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    tiers.engine.lookup_unpin("request")


@pytest.mark.parametrize("writes", [BOTH, CPU_ONLY])
def test_whoever_indexes_events_can_follow_the_chain_past_chunks_that_were_not_copied_again(tiers, writes):
    tokens = prompt(0)
    tiers.store(tokens, kv(0, PROMPT_CHUNKS), 0, writes.transfer_params())
    whole = tiers.take_events()
    chain = [event.block_hashes[0] for event in whole]
    parents = [None, *chain[:-1]]
    assert [event.parent_block_hash for event in whole] == parents
    for lost in (2, 4):
        assert tiers.engine.storage_manager.local_cpu_backend.remove(tiers.residents[lost - (lost == 4)])
    tiers.store(tokens, kv(0, PROMPT_CHUNKS), 0, writes.transfer_params())
    again = tiers.take_events()
    assert [event.block_hashes[0] for event in again] == [chain[2], chain[4]]
    assert [event.parent_block_hash for event in again] == [parents[2], parents[4]]


decisions = st.sampled_from([BOTH, CPU_ONLY, REMOTE_ONLY, NEITHER])
turns = st.lists(st.tuples(st.integers(0, 5), st.integers(1, PROMPT_CHUNKS), decisions), max_size=25)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=turns)
def test_what_the_cpu_tier_declines_never_changes_its_residents(tiers, turns):
    for task, chunks, writes in turns:
        before = set(tiers.residents)
        serve(tiers, task, writes, chunks)
        if not writes.cpu:
            assert set(tiers.residents) == before
    assert not any(chunk.is_pinned for chunk in tiers.engine.storage_manager.local_cpu_backend.hot_cache.values())
