"""More than one rank: what each of them stores, restores and drops, inside real vLLM on the CPU."""

from __future__ import annotations

import fresh_process
import pytest

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 256
BYTES_PER_TOKEN_PER_RANK = 512  # half of the small model's KiB


def test_two_ranks_keep_shards_of_the_same_chunks(small_model):
    """One engine, as starting one takes longest; what it does in turn is judged here in turn."""
    result = fresh_process.run("ranks_scenarios:two_ranks", model=small_model)

    for answers in ("restored", "partly_restored", "answers_after_evictions"):
        assert result[answers] == result["computed"], answers
    stored = result["stored"]
    assert [row["rank"] for row in stored] == [0, 1]
    assert stored[0]["chunks"] == stored[1]["chunks"]
    assert stored[0]["key"] != stored[1]["key"]
    tokens = 4 * 4 * CHUNK_TOKENS
    metrics = result["metrics"]
    assert metrics["efficient_lmcache:stored_tokens_total"] == tokens
    assert metrics["efficient_lmcache:restored_tokens_total"] == tokens

    # What one rank had lost it stored again, and the other one had it still.
    made_up_for = result["made_up_for"]
    assert {frozenset(row["chunks"]) for row in made_up_for} == {frozenset(stored[0]["chunks"])}

    # What was computed over a chunk that one rank had lost, neither that rank nor the other one keeps.
    lost = result["lost_on_its_way"]
    computed, recomputed, restored = lost["answers"]
    assert recomputed == restored == computed
    assert len(lost["new"]) == 3
    assert [set(chunks) for chunks in lost["chunks"]] == [{*made_up_for[0]["chunks"], *lost["new"]}] * 2

    assert result["preemptions"] > 0
    assert [row["chunks"] for row in result["declined"]] == lost["chunks"]

    evicted = result["evicted"]
    assert evicted[0]["chunks"] == evicted[1]["chunks"]
    assert evicted[0]["evicted"] == evicted[1]["evicted"] == result["evicted_counted"] > 0
    assert [row["publishes"] for row in evicted] == [True, False]
    assert {row["pins"] for row in evicted} == {0}
    assert result["bytes_per_token"] == BYTES_PER_TOKEN_PER_RANK
    capacity_chunks = evicted[0]["capacity_chunks"]
    assert result["report"] == {
        "registered_chunks": len(evicted[0]["chunks"]),
        "capacity_chunks": capacity_chunks,
        "chunk_bytes": CHUNK_TOKENS * BYTES_PER_TOKEN_PER_RANK,
        "evicted_chunks": evicted[0]["evicted"],
    }
    assert capacity_chunks == 4 * 1024**2 // (CHUNK_TOKENS * BYTES_PER_TOKEN_PER_RANK)
    assert result["processes_left"] == []
