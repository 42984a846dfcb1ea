"""A deployment at one moment: a row for every engine and rank, and the pool."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from efficient_lmcache.core.observation import Observation, PoolEstimate, pool_estimate
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.cluster import ClusterView
from efficient_lmcache.telemetry.shared_probe import SHARED_TIER_PREFIX

SCHEMA = "efficient-lmcache-cluster/1"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One rank of one engine: what its worker said of the tier, what its scheduler said of the pool, or one of both.

    Or a tier that engines share, under its own name.
    """

    engine_id: str
    rank: int
    tier: TierReport | None
    seen: Observation | None
    age_s: float

    @property
    def pool(self) -> PoolEstimate | None:
        """A and N as this engine alone sees them."""
        return pool_estimate([self.seen]) if self.seen else None

    def record(self) -> dict[str, Any]:
        """In types that JSON knows; null where nothing was said."""
        tier, pool = self.tier, self.pool
        return {
            "engine": self.engine_id,
            "rank": self.rank,
            "tier_occupancy_ratio": tier and tier.occupancy,
            "tier_registered_chunks": tier and tier.registered_chunks,
            "tier_capacity_chunks": tier and tier.capacity_chunks,
            "tier_capacity_bytes": tier and tier.capacity_bytes,
            "tier_capacity_tokens": tier and tier.capacity_chunks * tier.chunk_tokens,
            "tier_evicted_chunks_window": tier and tier.evicted_chunks,
            "tier_evicted_chunks_total": tier and tier.evicted_chunks_total,
            "pressure": self.seen and self.seen.pressure,
            "active_pool_tasks": pool and pool.active_pool,
            "mean_prompt_tokens": pool and pool.mean_prompt_tokens,
            "age_s": round(self.age_s, 3),
        }


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """All of a deployment that is not older than asked for.

    Attributes:
        engines: in the order of their names and ranks.
        pool: from all observations.
    """

    engines: tuple[EngineStatus, ...]
    pool: PoolEstimate
    bad_messages: int

    @property
    def registered_chunks(self) -> int:
        return sum(row.tier.registered_chunks for row in self.engines if row.tier)

    @property
    def capacity_chunks(self) -> int:
        return sum(row.tier.capacity_chunks for row in self.engines if row.tier)

    @property
    def evicted_chunks(self) -> int:
        return sum(row.tier.evicted_chunks for row in self.engines if row.tier)

    @property
    def under_pressure(self) -> int:
        """Engines whose latest decision was."""
        return len({row.engine_id for row in self.engines if row.seen and row.seen.pressure})

    @property
    def engine_count(self) -> int:
        """Of a tier that engines share, none is."""
        return len({row.engine_id for row in self.engines if not row.engine_id.startswith(SHARED_TIER_PREFIX)})

    def record(self, deployment: str) -> dict[str, Any]:
        """In types that JSON knows."""
        return {
            "schema": SCHEMA,
            "deployment": deployment,
            "pool": {
                "engines": self.engine_count,
                "engines_under_pressure": self.under_pressure,
                "active_tasks": self.pool.active_pool,
                "mean_prompt_tokens": self.pool.mean_prompt_tokens,
                "window_lookups": self.pool.window_lookups,
                "tier_registered_chunks": self.registered_chunks,
                "tier_capacity_chunks": self.capacity_chunks,
                "tier_evicted_chunks_window": self.evicted_chunks,
            },
            "engines": [row.record() for row in self.engines],
            "bad_messages": self.bad_messages,
        }


def cluster_status(view: ClusterView, max_age_s: float) -> ClusterStatus:
    """Rows of engines that said something in the last `max_age_s`; `view` must use `time.monotonic`."""
    observations = view.observations(max_age_s)
    tiers = view.tiers(max_age_s)
    now_s = time.monotonic()
    seen_by_engine = {seen.engine_id: seen for seen in observations}
    rows = [_row(tier, seen_by_engine.get(tier.engine_id), now_s) for tier in tiers]
    with_tier = {tier.engine_id for tier in tiers}
    rows += [_row(None, seen, now_s) for seen in observations if seen.engine_id not in with_tier]
    rows.sort(key=lambda row: (row.engine_id, row.rank))
    return ClusterStatus(tuple(rows), pool_estimate(observations), view.bad_messages)


def _row(tier: TierReport | None, seen: Observation | None, now_s: float) -> EngineStatus:
    messages = [message for message in (tier, seen) if message is not None]
    return EngineStatus(
        engine_id=messages[0].engine_id,
        rank=tier.rank if tier else 0,
        tier=tier,
        seen=seen,
        age_s=max(message.age_s(now_s) for message in messages),
    )
