"""Scheduler side in server mode: a declined request stores nothing, by LMCache's own limit of what it stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from efficient_lmcache.connector.admission import RequestAdmission
from efficient_lmcache.telemetry.pool_now import PoolNow

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ServerAdmission(RequestAdmission):
    """Declines through LMCache's own limit of what is stored of a request.

    Args:
        decline: lets nothing more of a request be stored.
        pool: A and N of all engines that share the server; None where this one knows of no other.
        settings: as of `RequestAdmission`.
    """

    def __init__(self, decline: Callable[[Request], None], pool: PoolNow | None, *settings: Any, **more: Any) -> None:
        super().__init__(*settings, **more)
        self._decline = decline
        self._pool = pool

    def _carry_out(self, request: Request) -> None:
        """After a preemption, too: LMCache tracks the request anew."""
        self._decline(request)
