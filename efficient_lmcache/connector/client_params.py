"""Transfer parameters on which LMCache raises, in vLLM's scheduler or in a worker: one request would end the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from efficient_lmcache.connector import vllm_adapter

if TYPE_CHECKING:
    from vllm.v1.request import Request

_DISAGG_FIELDS = ("req_id", "receiver_host", "receiver_init_port", "receiver_alloc_port")
_logger = logging.getLogger(__name__)


def unusable(params: Mapping[Any, Any]) -> list[str]:
    """The names of those that LMCache 0.5.6 cannot use: read without a look at what they are, or part of a key."""
    return [name for name, value in params.items() if isinstance(name, str) and not _is_usable(name, value)]


def _is_usable(name: str, value: Any) -> bool:
    if name == "disagg_spec":
        has_all = isinstance(value, dict) and all(field in value for field in _DISAGG_FIELDS)
        return has_all and isinstance(value["receiver_host"], str)
    if name == "lmcache.max_offload_tokens":
        return type(value) is int and value >= 0
    return not name.startswith("lmcache.") or value is None or isinstance(value, str | int | float)


class ClientParams:
    """Scheduler side: asked once about each request, when it arrives."""

    def __init__(self) -> None:
        self._said = False

    def check(self, request: Request) -> None:
        """Take away what LMCache cannot use; said once, as any client can send it. Never raises."""
        try:
            names = unusable(request.kv_transfer_params or {})
            if names:
                vllm_adapter.drop_kv_transfer_params(request, names)
        except Exception as error:
            names = [f"kv_transfer_params ({type(error).__name__}: {error})"]
        if names and not self._said:
            self._said = True
            _logger.warning("A client sends what LMCache cannot use, which is ignored from now on: %.200s", names)


def drop_question(request: Request, name: str) -> None:
    """Take away what a client asks about its request's end, where LMCache 0.5.6 would look for an answer in vain and
    raise. Never raises."""
    params = request.kv_transfer_params
    if isinstance(params, dict) and name in params:
        vllm_adapter.drop_kv_transfer_params(request, [name])
