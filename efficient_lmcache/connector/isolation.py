"""Requests share KV in LMCache only if they differ in nothing that its keys leave out (in-process mode).

    tenant      a request's `cache_salt`: vLLM salts the hashes of its own prefix cache, LMCache's keys know no salt
    adapter     its LoRA adapter, with which the same tokens have other KV
    embeddings  what it sent in the place of tokens: LMCache sees zeros

A request's `lmcache.tag.*` parameters are part of LMCache's keys, at lookup, store and restore and in every tier. So
every request with an adapter gets one tag more, and every salted one another. Without either, keys are LMCache's own.
Prompts of embeddings, and whatever cannot be tagged, are computed without LMCache.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from efficient_lmcache.connector import vllm_adapter
from efficient_lmcache.connector.tenants import adapter_digest, tenant_digest
from efficient_lmcache.telemetry.failure_log import FailureLog

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.request import Request

ADAPTER_TAG_KEY = "lmcache.tag.efficient_lmcache_adapter"
TENANT_TAG_KEY = "lmcache.tag.efficient_lmcache_tenant"
# A key's text ends with its last tag: nothing that a client puts into one of its own stands in for a tenant's.
_TAG_KEYS = (ADAPTER_TAG_KEY, TENANT_TAG_KEY)

_logger = logging.getLogger(__name__)


def own_tags(request: Request) -> dict[str, str]:
    """The tags that keep a request's keys apart; none for one of no tenant with no adapter."""
    tags = {}
    adapter = vllm_adapter.adapter(request)
    if adapter is not None:
        tags[ADAPTER_TAG_KEY] = adapter_digest(*adapter)
    if request.cache_salt:
        tags[TENANT_TAG_KEY] = tenant_digest(request.cache_salt)
    return tags


class RequestIsolation:
    """Scheduler side: asked before each lookup, so that the lookup's key and all later ones have the tags.

    Args:
        obstacle: why LMCache does not always heed tags in this engine, if so. Requests that need one then do without
            LMCache.
    """

    def __init__(self, obstacle: str | None = None) -> None:
        self._obstacle = obstacle
        self._without_lmcache: set[str] = set()
        self._failures = FailureLog(_logger, "Keeping a request's keys apart")
        if obstacle:
            _logger.warning("Requests with a cache_salt or a LoRA adapter are served without LMCache: %s", obstacle)

    def may_use_lmcache(self, request: Request) -> bool:
        """Whether the request may be looked up, restored and stored; if so, its keys are its own from now on.

        Never raises: a request that cannot be kept apart is computed, and leaves nothing behind.
        """
        if request.request_id in self._without_lmcache:
            return False
        try:
            kept_apart = self._keep_apart(request)
        except Exception as error:
            self._failures.failed(error)
            kept_apart = False
        else:
            self._failures.succeeded()
        if not kept_apart:
            self._without_lmcache.add(request.request_id)
        return kept_apart

    @property
    def without_lmcache(self) -> Collection[str]:
        """Requests of which LMCache must not see anything."""
        return self._without_lmcache

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted."""
        self._without_lmcache.discard(request_id)

    def _keep_apart(self, request: Request) -> bool:
        if vllm_adapter.sends_embeddings(request):
            return False
        tags, given = own_tags(request), vllm_adapter.kv_transfer_params(request)
        # A pooling request has no sampling parameters to carry a tag.
        if tags and (self._obstacle or request.sampling_params is None):
            return False
        if tags or given:
            for key in _TAG_KEYS:
                # Nobody gets at another's keys by giving its tag for one of its own.
                if given.get(key) != tags.get(key):
                    vllm_adapter.set_kv_transfer_param(request, key, tags.get(key))
        return True
