"""What a step computed over KV that was lost on its way from LMCache is stored by nobody."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")

import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata, ReqMeta, SaveSpec

from efficient_lmcache.connector.lost_restores import LossesHeard, LostRestores

BLOCK_TOKENS = 4


def step(*requests: ReqMeta) -> LMCacheConnectorMetadata:
    return LMCacheConnectorMetadata(list(requests))


def request(name: str, blocks: list[int], saves: bool = True) -> ReqMeta:
    slots = torch.tensor([block * BLOCK_TOKENS + slot for block in blocks for slot in range(BLOCK_TOKENS)])
    return ReqMeta(name, list(range(len(slots))), slots, save_spec=SaveSpec(0, saves))


def stored(worker: LostRestores, metadata: LMCacheConnectorMetadata, lost: set[int] | None = None) -> list[str]:
    """One step of a worker, in which restores lose these blocks."""
    worker.before_restores(metadata)
    worker._impl._invalid_block_ids.update(lost or ())
    worker.after_restores()
    # With speculation vLLM asks for what was lost before the stores.
    worker._impl._invalid_block_ids.clear()
    worker.withhold_stores(metadata)
    return [one.req_id for one in metadata.requests if one.save_spec is not None and one.save_spec.can_save]


class Ranks:
    """An LMCache engine of one of several ranks, as far as a store is taken back; two tokens are a chunk."""

    def __init__(self, world_size: int) -> None:
        self.metadata = SimpleNamespace(world_size=world_size)
        self.token_database = self.storage_manager = self
        self.removed: list[tuple[str, int]] = []

    def process_tokens(self, tokens: list[int], request_configs: dict[str, Any] | None) -> Any:
        for start in range(0, len(tokens), 2):
            yield start, start + 2, (str(request_configs), start)

    def remove(self, key: tuple[str, int]) -> int:
        self.removed.append(key)
        return 1


def new_worker(engine: Ranks | None = None) -> LostRestores:
    impl: Any = SimpleNamespace(_invalid_block_ids=set(), _block_size=BLOCK_TOKENS, lmcache_engine=engine)
    return LostRestores(impl)


def told(heard: LossesHeard, *requests: ReqMeta) -> LMCacheConnectorMetadata:
    """The next step's metadata as it reaches a worker's process."""
    metadata = step(*requests)
    heard.tell(metadata)
    copied: LMCacheConnectorMetadata = pickle.loads(pickle.dumps(metadata))
    return copied


def test_a_request_that_lost_a_block_stores_nothing_and_others_do():
    metadata = step(request("lost", [1, 2, 3]), request("well", [4, 5]), request("declined", [2], saves=False))
    assert stored(new_worker(), metadata, lost={2}) == ["well"]


def test_a_request_that_shares_the_lost_block_stores_nothing_either():
    assert stored(new_worker(), step(request("lost", [1, 2]), request("shares", [2, 7])), lost={2}) == []


def test_a_step_that_was_scheduled_before_the_scheduler_heard_stores_nothing_of_it_and_the_next_one_does():
    worker, heard = new_worker(), LossesHeard()
    assert stored(worker, step(request("lost", [1, 2])), lost={2}) == []
    assert stored(worker, told(heard, request("lost", [1, 2, 3]), request("well", [9]))) == ["well"]
    heard.hear({2})
    assert stored(worker, told(heard, request("lost", [1, 2, 3]))) == ["lost"]
    assert len(worker) == 0


def test_what_was_heard_is_told_once():
    heard = LossesHeard()
    heard.hear({3})
    heard.hear(None)
    assert vars(told(heard)) != vars(step())
    assert vars(told(heard)) == vars(step())


def test_another_rank_takes_back_what_it_stored_before_it_heard_and_nothing_else():
    engine, heard = Ranks(world_size=2), LossesHeard()
    worker = new_worker(engine)
    lost = request("lost", [1, 2])
    assert lost.save_spec is not None
    lost.save_spec.skip_leading_tokens, lost.request_configs = 4, {"lmcache.tag.a": "b"}
    assert stored(worker, step(lost, request("well", [7]))) == ["lost", "well"]
    heard.hear({1})
    assert stored(worker, told(heard, request("lost", [1, 2]))) == ["lost"]
    assert engine.removed == [(str({"lmcache.tag.a": "b"}), 4), (str({"lmcache.tag.a": "b"}), 6)]


def test_the_rank_that_lost_it_has_nothing_to_take_back():
    engine, heard = Ranks(world_size=2), LossesHeard()
    worker = new_worker(engine)
    assert stored(worker, step(request("lost", [1, 2])), lost={1}) == []
    heard.hear({1})
    assert stored(worker, told(heard, request("lost", [1, 2]))) == ["lost"]
    assert engine.removed == []


@given(
    lost=st.sets(st.integers(0, 20)),
    tables=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True), max_size=6),
)
def test_exactly_those_store_whose_blocks_are_all_known(lost, tables):
    requests = [request(str(index), blocks) for index, blocks in enumerate(tables)]
    expected = [str(index) for index, blocks in enumerate(tables) if not lost & set(blocks)]
    assert stored(new_worker(), step(*requests), lost=lost) == expected
