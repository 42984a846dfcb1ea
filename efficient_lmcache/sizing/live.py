"""A running engine's own counters as the planner's inputs: A, N, the tier and the GPU's KV cache."""

from __future__ import annotations

import math
import urllib.error
from dataclasses import dataclass

from efficient_lmcache.core.workingset import WorkingSetEstimate
from efficient_lmcache.replay.localhost import open_url
from efficient_lmcache.replay.metrics import KV_CACHE_INFO, Snapshot

_TIMEOUT_S = 10.0
_PREFIX = "efficient_lmcache:"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LivePool:
    """What an engine says of its pool; of several engines behind one URL, the one with the largest working set.

    Attributes:
        active_pool: A.
        mean_prompt_tokens: N.
        working_set_bytes: the engine's own estimate (Eq. 5), per rank.
        tier_gib: C_H per rank; None if it has no host tier or has not reported one yet.
        gpu_kv_tokens: K_G; None if vLLM does not say.
    """

    active_pool: int
    mean_prompt_tokens: float
    working_set_bytes: float
    tier_gib: float | None
    gpu_kv_tokens: int | None

    def footprint_differs(self, bytes_per_token: int) -> bool:
        """Whether the engine counts with another footprint than this one: another model, TP or cache type."""
        own = WorkingSetEstimate(self.active_pool, self.mean_prompt_tokens, bytes_per_token).bytes
        return not math.isclose(own, self.working_set_bytes, rel_tol=0.01)


def read_live_pool(url: str) -> LivePool:
    """Ask an engine's /metrics.

    Args:
        url: of the API server or of its /metrics.

    Raises:
        ValueError: naming the URL and what is wrong with it or with its answer.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--from-metrics {url!r}: must be a URL like http://HOST:PORT")
    address = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with open_url(address, timeout=_TIMEOUT_S) as response:
            text = response.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ValueError(f"--from-metrics {address}: cannot be read ({error})") from error
    try:
        return parse_live_pool(text)
    except ValueError as error:
        raise ValueError(f"--from-metrics {address}: {error}") from error


def parse_live_pool(text: str) -> LivePool:
    """The pool in a /metrics page.

    Raises:
        ValueError: not such a page, a gauge is missing, or no task is active.
    """
    try:
        snapshot = Snapshot.parse(text)
    except ValueError as error:
        raise ValueError(f"is no page of metrics ({error})") from error
    engines = [sample.labels for sample in snapshot.named(f"{_PREFIX}working_set_bytes")]
    if not engines:
        raise ValueError(
            f"has no {_PREFIX}working_set_bytes; it must be an engine that `efficient-lmcache serve` started "
            "and that has seen a request"
        )

    def gauge(name: str, labels: dict[str, str]) -> float | None:
        return next((s.value for s in snapshot.named(f"{_PREFIX}{name}") if s.labels == labels), None)

    labels = max(engines, key=lambda labels: gauge("working_set_bytes", labels) or 0.0)
    values = {name: gauge(name, labels) for name in ("working_set_bytes", "active_pool_tasks", "mean_prompt_tokens")}
    for name, value in values.items():
        if value is None or not math.isfinite(value):
            raise ValueError(f"{_PREFIX}{name} is {value}; it must be a finite number")
    active_pool = int(values["active_pool_tasks"] or 0)
    if active_pool < 1:
        raise ValueError(f"{_PREFIX}active_pool_tasks is 0; ask while agents are running")
    capacity_bytes = gauge("tier_capacity_bytes", labels)
    return LivePool(
        active_pool=active_pool,
        mean_prompt_tokens=values["mean_prompt_tokens"] or 0.0,
        working_set_bytes=values["working_set_bytes"] or 0.0,
        tier_gib=capacity_bytes / _GIB if capacity_bytes and 0 < capacity_bytes < math.inf else None,
        gpu_kv_tokens=_gpu_kv_tokens(snapshot),
    )


def _gpu_kv_tokens(snapshot: Snapshot) -> int | None:
    for sample in snapshot.named(KV_CACHE_INFO):
        blocks, block_size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
        if blocks.isdigit() and block_size.isdigit():
            return int(blocks) * int(block_size)
    return None
