"""Tenants (requests with a `cache_salt`) neither restore what others stored in LMCache nor learn that it is there.

vLLM salts the hashes of its own prefix cache. LMCache's keys know nothing of the salt, but a request's `lmcache.tag.*`
parameters are part of them, at lookup, store and restore and in every tier. So every salted request gets one tag more.
Without a salt, keys are LMCache's own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from efficient_lmcache.connector import vllm_adapter
from efficient_lmcache.connector.tenants import tenant_digest
from efficient_lmcache.telemetry.failure_log import FailureLog

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.request import Request

TENANT_TAG_KEY = "lmcache.tag.efficient_lmcache_tenant"

_logger = logging.getLogger(__name__)


class TenantIsolation:
    """Scheduler side: asked before each lookup, so that the lookup's key and all later ones have the tag.

    Args:
        obstacle: why LMCache does not always heed tags in this engine, if so. Salted requests then do without LMCache.
    """

    def __init__(self, obstacle: str | None = None) -> None:
        self._obstacle = obstacle
        self._without_lmcache: set[str] = set()
        self._failures = FailureLog(_logger, "Keeping a tenant's keys apart")
        if obstacle:
            _logger.warning("Requests with a cache_salt are served without LMCache: %s", obstacle)

    def may_use_lmcache(self, request: Request) -> bool:
        """Whether the request may be looked up, restored and stored; if so, its keys are its tenant's from now on.

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
        if not request.cache_salt:
            # Nobody gets at a tenant's keys by giving its tag for one of its own.
            if vllm_adapter.kv_transfer_param(request, TENANT_TAG_KEY) is not None:
                vllm_adapter.set_kv_transfer_param(request, TENANT_TAG_KEY, None)
            return True
        # A pooling request has no sampling parameters to carry a tag.
        if self._obstacle or request.sampling_params is None:
            return False
        tag = tenant_digest(request.cache_salt)
        if vllm_adapter.kv_transfer_param(request, TENANT_TAG_KEY) != tag:
            vllm_adapter.set_kv_transfer_param(request, TENANT_TAG_KEY, tag)
        return True
