"""Which tiers a request's new KV enters, as the scheduler tells the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: LMCache's request-level switch: none of the request's new KV is stored.
SKIP_SAVE_KEY = "lmcache.skip_save"
#: A switch that is on. LMCache's asynchronous lookup, which a preempted request meets again, carries strings alone.
ON = "true"
# LMCache hands parameters with its prefix on to the workers, and takes only its tags into its keys.
_SKIP_CPU_KEY = "lmcache.efficient.skip_cpu_tier"
_SKIP_REMOTE_KEY = "lmcache.efficient.skip_remote_tier"


class TierWrites(NamedTuple):
    """The decisions of an engine with a CPU tier and a remote tier.

    Attributes:
        cpu: new chunks, and chunks restored from the remote tier, enter the CPU tier.
        remote: new chunks enter the remote tier.
    """

    cpu: bool
    remote: bool

    def transfer_params(self) -> dict[str, str]:
        """What the request's transfer parameters say of it; nothing where all is as in plain LMCache."""
        params = {_SKIP_CPU_KEY: not self.cpu, _SKIP_REMOTE_KEY: not self.remote}
        params[SKIP_SAVE_KEY] = not (self.cpu or self.remote)
        return {key: ON for key, holds in params.items() if holds}

    @classmethod
    def of(cls, request_configs: Mapping[str, Any] | None) -> TierWrites:
        """What LMCache's configuration of a request says; both tiers where it says nothing."""
        configs = request_configs or {}
        return cls(not configs.get(_SKIP_CPU_KEY, False), not configs.get(_SKIP_REMOTE_KEY, False))
