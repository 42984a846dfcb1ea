"""What a cache tier says about itself: the feedback half of the pressure signal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier's occupancy and evictions, as its first worker published them (paper, Appendix D).

    Attributes:
        engine_id: identifies the serving engine that owns the tier; a reader trusts its own engine only.
        sequence: counts the publisher's reports; a reader drops what it has already seen.
        chunk_tokens: b, tokens per chunk.
        chunk_bytes: bytes of one full chunk on one rank (b * beta).
        registered_chunks: chunks that a lookup can find now.
        capacity_chunks: K_H, the full chunks that the tier's allocator can hold.
        evicted_chunks: chunks evicted in the last 60 s to make room for others. Explicit removals do not count.
        evicted_chunks_total: the same since the tier started.
        received_s: the *receiver's* monotonic clock at receipt; never travels, so clocks of two nodes never compare.
        rank: of the worker that published, among the engine's.
        eviction_batch_chunks: what the tier evicts at a time once it is full; 0 where it evicts as much as it needs.
        backing_tiers: tiers that get whatever this one gets, keep it longer, and whose capacity nobody knows.
    """

    engine_id: str
    sequence: int
    chunk_tokens: int
    chunk_bytes: int
    registered_chunks: int
    capacity_chunks: int
    evicted_chunks: int
    evicted_chunks_total: int
    received_s: float = float("-inf")
    rank: int = 0
    eviction_batch_chunks: int = 0
    backing_tiers: int = 0

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "chunk_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"TierReport.{name} is {getattr(self, name)}; it must be positive")
        for name in (
            "sequence",
            "registered_chunks",
            "capacity_chunks",
            "evicted_chunks",
            "evicted_chunks_total",
            "rank",
            "eviction_batch_chunks",
            "backing_tiers",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"TierReport.{name} is {getattr(self, name)}; it must not be negative")

    @property
    def capacity_bytes(self) -> int:
        """C_H in bytes per rank."""
        return self.capacity_chunks * self.chunk_bytes

    @property
    def occupancy(self) -> float:
        """Registered chunks over K_H; 1.0 for a tier that can hold nothing."""
        return self.registered_chunks / self.capacity_chunks if self.capacity_chunks else 1.0

    def full_and_evicting(self, occupancy_threshold: float) -> bool:
        """Eq. 10's second factor: occupancy at or above theta, and evictions in the window.

        Against what a batch leaves: in a tier that evicts, the room after a batch is no more than the room before the
        next one, and refills that were let into it would bring that about.
        """
        left_by_batch = 1.0 - self.eviction_batch_chunks / self.capacity_chunks if self.capacity_chunks else 1.0
        return self.occupancy >= occupancy_threshold * left_by_batch and self.evicted_chunks > 0

    def age_s(self, now_s: float) -> float:
        """Seconds since receipt on the reader's clock."""
        return now_s - self.received_s
