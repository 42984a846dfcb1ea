"""A restore that fails leaves nothing behind (in-process mode).

A chunk may vanish between its lookup and its restore, most of all from a remote tier. vLLM hears of it after the step,
and computes the request again from the first block that was lost, or fails it. The step itself, however, computes the
rest of the prompt over whatever lies in those blocks, and LMCache 0.5.6 stores that under the prompt's keys: whoever
restores it later gets it. So a worker withholds what was computed over lost blocks, also in steps that were scheduled
before the scheduler had heard of them. Other ranks, which computed from what that one did without knowing, take their
stores back as soon as the scheduler tells them.

`tests/integration/test_upstream.py` guards what this module touches of LMCache.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl, ReqMeta

_KNOWN = "efficient_lmcache_lost_blocks"
# More than vLLM schedules ahead of a step's output, with pipeline stages and asynchronous scheduling.
_STEPS_REMEMBERED = 16


class LossesHeard:
    """Scheduler side: tells the workers from which step on vLLM computes lost blocks anew."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def hear(self, block_ids: Iterable[int] | None) -> None:
        """Of the blocks that the workers reported with a step's output."""
        self._blocks.update(block_ids or ())

    def tell(self, metadata: Any) -> None:
        """With the next step's metadata."""
        if self._blocks:
            setattr(metadata, _KNOWN, frozenset(self._blocks))
            self._blocks.clear()


class _Store(NamedTuple):
    """What a step stores of a request: the chunks of these tokens that end behind the first so many."""

    blocks: frozenset[int]
    token_ids: list[int]
    skipped_tokens: int
    request_configs: dict[str, Any] | None


class LostRestores:
    """Worker side: the blocks whose content nobody knows."""

    def __init__(self, impl: LMCacheConnectorV1Impl) -> None:
        self._impl = impl
        self._blocks: set[int] = set()
        # What this rank stores before it hears that another one has lost a block.
        self._latest_stores: deque[list[_Store]] = deque(maxlen=_STEPS_REMEMBERED)

    def __len__(self) -> int:
        return len(self._blocks)

    def before_restores(self, metadata: Any) -> None:
        """What the scheduler has heard of is computed in this step, or belongs to nobody any more."""
        known: frozenset[int] = getattr(metadata, _KNOWN, frozenset())
        lost_elsewhere = known - self._blocks
        self._blocks -= known
        if lost_elsewhere:
            for store in itertools.chain.from_iterable(self._latest_stores):
                if not lost_elsewhere.isdisjoint(store.blocks):
                    self._take_back(store)

    def after_restores(self) -> None:
        """Also remembers what vLLM, with speculation, takes away before the stores."""
        self._blocks.update(self._impl._invalid_block_ids)

    def withhold_stores(self, metadata: Any) -> None:
        """Let LMCache store nothing of the requests that have a lost block, their own or shared."""
        engine = self._impl.lmcache_engine
        has_other_ranks = engine is not None and engine.metadata.world_size > 1
        if not self._blocks and not has_other_ranks:
            return
        stores = []
        for request in metadata.requests:
            if request.save_spec is None or not request.save_spec.can_save:
                continue
            store = self._store_of(request)
            if self._blocks.isdisjoint(store.blocks):
                stores.append(store)
            else:
                request.save_spec.can_save = False
        self._latest_stores.append(stores)

    def _store_of(self, request: ReqMeta) -> _Store:
        block_tokens = self._impl._block_size
        # A request's slots begin with a block, and blocks are whole.
        blocks = (request.slot_mapping[::block_tokens] // block_tokens).tolist()
        assert request.save_spec is not None
        return _Store(
            frozenset(blocks), request.token_ids, request.save_spec.skip_leading_tokens, request.request_configs
        )

    def _take_back(self, store: _Store) -> None:
        engine = self._impl.lmcache_engine
        if engine is None or engine.storage_manager is None:
            return
        chunks = engine.token_database.process_tokens(tokens=store.token_ids, request_configs=store.request_configs)
        for _, end, key in chunks:
            if end > store.skipped_tokens:
                engine.storage_manager.remove(key)
