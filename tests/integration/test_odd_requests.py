"""Requests of the kinds that have ended engines with LMCache, or got another's KV, inside real vLLM."""

from __future__ import annotations

import fresh_process
import pytest
from lmcache_server_process import CHUNK_TOKENS

pytestmark = pytest.mark.integration

pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")


def test_preempted_requests_of_which_nothing_is_restored_end_no_engine(small_model):
    result = fresh_process.run("odd_request_scenarios:without_restores", model=small_model)
    assert result["preempted_with_logprobs"] > 0
    assert result["preempted_with_embeddings"] > 0
    assert result["answered_tokens"] == [16] * 8
    first, second = result["embedded"]
    assert first == second[::-1]
    assert first[0] != first[1]
    assert result["stored_of_embeddings"] == result["without_lmcache"] == 0
    assert set(result["state"].values()) == {0}


def test_beside_a_server_adapters_and_embeddings_share_no_kv_and_multiconnector_finds_the_statistics(
    small_model, lmcache_server, tmp_path
):
    result = fresh_process.run(
        "odd_request_scenarios:adapters_and_embeddings_beside_a_server",
        model=small_model,
        transfer_options=lmcache_server.transfer_options,
        directory=str(tmp_path),
    )
    answers = result["answers"]
    for name, (computed, again) in answers.items():
        assert computed == again, name
    assert len({tuple(computed) for computed, _ in answers.values()}) == len(answers)
    # The second time everybody restores two chunks of its own; embeddings never do.
    assert result["restored_tokens"] == [0, 3 * 2 * CHUNK_TOKENS]
    assert result["restored_in_all"] == 3 * 2 * CHUNK_TOKENS
    assert result["remembered"] == [0, 0, 0]
