"""Worker side, with LMCache's `enable_async_loading`: what a restore has used is released once.

A restore releases the chunks that were read for it. LMCache 0.5.6 leaves the event behind that says that they were
read, takes it for that of an aborted lookup when the step ends, and releases them again: the CPU tier then holds
chunks whose memory belongs to nobody, and the next restore of one ends the engine.

`tests/integration/test_upstream.py` guards what this module touches of LMCache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl


def forget_used(impl: LMCacheConnectorV1Impl, metadata: Any) -> None:
    """After a step's restores, before it ends."""
    engine = impl.lmcache_engine
    if engine is None or not impl.async_loading:
        return
    # vLLM also loads the connector's module where it only wants our metrics; LMCache is not imported for that.
    from lmcache.v1.event_manager import EventStatus, EventType

    events = engine.event_manager
    for request in metadata.requests:
        restored = request.load_spec is not None and request.load_spec.can_load
        if restored and events.get_event_status(EventType.LOADING, request.req_id) == EventStatus.DONE:
            events.pop_event(EventType.LOADING, request.req_id)
