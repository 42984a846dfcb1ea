"""Where messages are in Redis: a key for the last value, and a channel of the same name for those who listen.

efficient-lmcache:<deployment>:tier:<engine>:<rank>     a tier report
efficient-lmcache:<deployment>:pool:<engine>            an observation
efficient-lmcache:<deployment>:index                    the set of those keys, as a Redis is too large to search
efficient-lmcache:<deployment>:salt                     of the hashes of task names
efficient-lmcache:<deployment>:probe:<tier>             the engine that probes a tier which several share
"""

from __future__ import annotations

import re
import urllib.parse
from functools import lru_cache
from typing import NamedTuple

DEPLOYMENT_PATTERN = r"[A-Za-z0-9._-]{1,64}"


class Channel(NamedTuple):
    """What a key says of the message under it.

    Attributes:
        kind: "tier" or "pool".
        engine_id: who published it.
        rank: 0 for an observation.
    """

    kind: str
    engine_id: str
    rank: int


def prefix(deployment: str) -> str:
    """What all keys of a deployment begin with.

    Raises:
        ValueError: the name is not `DEPLOYMENT_PATTERN`: it is part of a pattern of channels.
    """
    if not re.fullmatch(DEPLOYMENT_PATTERN, deployment):
        raise ValueError(f"deployment is {deployment!r:.80}; it must be 1 to 64 of letters, digits, '.', '_' and '-'")
    return f"efficient-lmcache:{deployment}:"


def tier_key(deployment: str, engine_id: str, rank: int) -> str:
    return f"{prefix(deployment)}tier:{_quoted(engine_id)}:{rank}"


def pool_key(deployment: str, engine_id: str) -> str:
    return f"{prefix(deployment)}pool:{_quoted(engine_id)}"


def probe_key(deployment: str, tier: str) -> str:
    return f"{prefix(deployment)}probe:{_quoted(tier)}"


@lru_cache(maxsize=1024)
def parse(key: str) -> Channel | None:
    """The inverse of `tier_key` and `pool_key`; None for any other key."""
    match = re.fullmatch(rf"efficient-lmcache:{DEPLOYMENT_PATTERN}:(tier:[^:]+:[0-9]{{1,9}}|pool:[^:]+)", key)
    if match is None:
        return None
    kind, engine, *rank = match[1].split(":")
    return Channel(kind, urllib.parse.unquote(engine), int(rank[0]) if rank else 0)


def all_of(deployment: str) -> list[str]:
    """The patterns of all channels of a deployment. An ACL must allow them literally."""
    return [f"{prefix(deployment)}tier:*", all_pools(deployment)]


def all_pools(deployment: str) -> str:
    """The pattern of the channels of all observations."""
    return f"{prefix(deployment)}pool:*"


def _quoted(engine_id: str) -> str:
    return urllib.parse.quote(engine_id, safe="", errors="replace")
