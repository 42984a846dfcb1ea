"""Snapshots of a server's /metrics, and the numbers of a run as differences between two of them."""

from __future__ import annotations

import urllib.error
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from efficient_lmcache.replay.localhost import open_url

COMPUTED_PREFILL = "vllm:request_prefill_kv_computed_tokens_sum"
PREEMPTIONS = "vllm:num_preemptions_total"
KV_CACHE_INFO = "vllm:cache_config_info"
_SCRAPE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """Where a connector counts what it moves, and how long after an event its counters may still lag.

    LMCache counts a chunk as stored when it is asked to store it; our connector, which leaves resident chunks out,
    when it copies it. LMCache's hits are whole chunks, also where vLLM already had some of their tokens; our restored
    tokens are those really copied, so that LMCache's number is the larger one for the same transfers. A name is None
    where the connector has no such thing. LMCache's workers each count for themselves; ours speak through the first.
    """

    stored_tokens: str | None
    restored_tokens: str | None
    evicted_chunks: str | None
    deduplicated_chunks: str | None
    lag_s: float
    summed_over_ranks: bool = False


# What an engine counts whose tier is an LMCache server's: vLLM's own count of what its connector loads.
_WITH_SERVER = TierMetrics(None, "vllm:external_prefix_cache_hits_total", None, None, lag_s=1.0)
_TIER_METRICS = {
    "none": TierMetrics(None, None, None, None, lag_s=1.0),
    "efficient": TierMetrics(
        "efficient_lmcache:stored_tokens_total",
        "efficient_lmcache:restored_tokens_total",
        "efficient_lmcache:evicted_chunks_total",
        "efficient_lmcache:deduplicated_chunks_total",
        lag_s=1.0,
    ),
    # LMCache publishes every 10 s and has no way to be asked sooner.
    "lmcache": TierMetrics(
        "lmcache:num_stored_tokens_total",
        "lmcache:num_hit_tokens_total",
        "lmcache:local_cpu_evict_keys_count_total",
        None,
        lag_s=11.0,
        summed_over_ranks=True,
    ),
}


def tier_metrics(connector: str, mode: str) -> TierMetrics:
    """Of an engine; `mode` is `RunRecord.mode`."""
    return _WITH_SERVER if mode == "server" else _TIER_METRICS[connector]


class MetricsError(RuntimeError):
    """A metric that a run's record needs could not be read."""


@dataclass(frozen=True)
class Snapshot:
    """All samples of one scrape."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        return cls(tuple(s for family in text_string_to_metric_families(text) for s in family.samples))

    def named(self, name: str) -> list[Sample]:
        """The samples of one metric, one for each combination of labels."""
        return [sample for sample in self.samples if sample.name == name]

    def label(self, name: str, label: str) -> str:
        """A label's value, for metrics that carry their information in labels."""
        for sample in self.named(name):
            if label in sample.labels:
                return sample.labels[label]
        raise MetricsError(f"the server's /metrics lacks {name} with the label {label}")


def scrape(base_url: str, save_to: Path) -> Snapshot:
    """Read /metrics, save its text and parse it."""
    try:
        with open_url(f"{base_url}/metrics", timeout=_SCRAPE_TIMEOUT_S) as response:
            text = response.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise MetricsError(f"{base_url}/metrics cannot be read: {error}") from error
    save_to.write_text(text)
    return Snapshot.parse(text)


def increase(before: Snapshot, after: Snapshot, name: str) -> int:
    """How much a counter grew, summed over its labels.

    A counter may be absent from the first snapshot, because some appear with their first event, but not from the
    second.

    Raises:
        MetricsError: the counter is absent from the second snapshot, or shrank.
    """
    grown = after.named(name)
    if not grown:
        raise MetricsError(f"the server's /metrics lacks {name}")
    difference = sum(s.value for s in grown) - sum(s.value for s in before.named(name))
    if difference < 0:
        raise MetricsError(f"{name} fell by {-difference:g} during the run: the server restarted")
    return round(difference)


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What an LMCache server did for all its engines, in its own counters (0.5.6): per rank.

    Attributes:
        stored_tokens, evicted_chunks: really written, and evicted to make room.
        dropped_chunks: of stores for which there was no room; the server drops such a store as a whole.
    """

    stored_tokens: int
    evicted_chunks: int
    dropped_chunks: int

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot, chunk_tokens: int, ranks: int) -> ServerCounts:
        """Raises MetricsError for what is no LMCache server's /metrics."""
        increase(before, after, "lmcache_mp_l1_eviction_loop_ticks_total")  # there from the first second on

        def chunks(name: str) -> int:
            # A counter appears with its first event; every rank has its part of a chunk.
            return round((increase(before, after, name) if after.named(name) else 0) / ranks)

        return cls(
            stored_tokens=chunks("lmcache_mp_l1_write_chunks_total") * chunk_tokens,
            evicted_chunks=chunks("lmcache_mp_l1_evicted_chunks_total"),
            dropped_chunks=chunks("lmcache_mp_l1_allocation_failure_chunks_total"),
        )
