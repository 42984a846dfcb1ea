"""No fault of docs/faults.md fails a request or changes a token: a real engine under load, while each happens to it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import fresh_process
import pytest
from fault_scenarios import ENOUGH, EVERYBODY, SECRET, SURVIVOR
from network_namespace import network_namespace

pytestmark = pytest.mark.integration

FAULTS = (
    "clocks an hour apart",
    "redis killed",
    "redis hanging",
    "redis flushed",
    "garbage and oversized messages",
    "the network cut",
    "the password changed",
    "a full disk",
    "another engine killed",
    "publisher dead",
    "observer dead",
)


@pytest.fixture(scope="module")
def served(small_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with ExitStack() as stack:
        try:
            elsewhere = asdict(stack.enter_context(network_namespace()))
        except pytest.skip.Exception as reason:
            elsewhere = None
            print(reason)
        return fresh_process.run(
            "fault_scenarios:survivor",
            timeout_s=1200,
            model=small_model,
            directory=str(tmp_path_factory.mktemp("survivor")),
            elsewhere=elsewhere,
        ) | {"elsewhere": elsewhere}


@pytest.mark.parametrize("fault", FAULTS)
def test_under_load_no_request_fails_and_no_token_is_wrong(served, fault):
    if fault == "the network cut" and served["elsewhere"] is None:
        pytest.skip("no network namespaces here")
    assert served["served"][fault] >= ENOUGH
    assert served["wrong"].get(fault, 0) == 0


def test_neither_goes_anything_wrong_in_between_and_nothing_is_left_behind(served):
    assert set(served["wrong"].values()) <= {0}
    assert set(served["state"].values()) == {0}
    metrics = served["metrics"]
    for name in ("restored_tokens", "stored_tokens", "evicted_chunks"):
        assert metrics[f"efficient_lmcache:{name}_total"] > 0, "the tier had nothing to do: the test proves nothing"


def test_the_pool_forgets_an_engine_that_was_killed_and_no_other(served):
    for fault in ("clocks an hour apart", "garbage and oversized messages", "a full disk"):
        assert served["pools"][fault][::2] == EVERYBODY, fault
    for fault in ("another engine killed", "publisher dead"):
        assert served["pools"][fault][::2] == SURVIVOR, fault


def test_an_engine_whose_tier_is_smaller_than_a_request_and_whose_clocks_are_ahead_serves_too(served):
    victim = served["victim"]
    assert victim["served"] >= ENOUGH
    assert victim["wrong"] == 0
    metrics = victim["metrics"]
    assert metrics["efficient_lmcache:tier_capacity_bytes"] < 3 * 256 * 1024
    assert metrics["efficient_lmcache:evicted_chunks_total"] > 0
    # Its own reports are fresh on its own clock.
    assert metrics["efficient_lmcache:decisions_stale_report_total"] < victim["served"] / 4


def test_with_a_tier_smaller_than_a_chunk_everything_is_computed(small_model):
    result = fresh_process.run("fault_scenarios:tier_smaller_than_a_chunk", timeout_s=1200, model=small_model)
    assert result["wrong"] == 0
    assert result["metrics"].get("efficient_lmcache:stored_tokens_total", 0) == 0
    assert set(result["state"].values()) == {0}


def test_each_fault_is_said_once_and_no_secret_ever(served):
    messages = served["messages"]
    assert len(messages) <= 6 * len(FAULTS), messages
    assert sum("works again" in message for message in messages) >= 5
    assert not [message for message in messages if SECRET in message]
