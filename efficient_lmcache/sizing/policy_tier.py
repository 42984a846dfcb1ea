"""The host tier of one rank under a write-admission policy, call by call, as LMCache's CPU tier orders its chunks.

    lookup      finds h, the leading chunks that are resident, and promotes them tail first: the head is the most recent
    decision    the connector's own policy object, asked with what the connector would tell it at that moment
    store       an admitted call inserts what is absent beyond h, head first; a declined one inserts nothing
    eviction    the least recent chunk, for each insert into a full tier

Chunks that are resident beyond a gap are neither found nor promoted. So this is no stack algorithm: what a tier holds
is not what a larger one holds, and each capacity is simulated by itself. (Where everything a call references becomes
the most recent, `core.coverage` has all capacities from one pass.)

What is left out: a prompt that is computed in several steps is stored step by step, and other lookups fall between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.admission import ADMISSIONS, AdmissionParameters, AdmissionPolicy, RequestFacts
from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.sizing import _tier_kernel as kernel
from efficient_lmcache.telemetry.eviction_window import EvictionWindow

_REPORT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Admission:
    """A write admission by what operators set of it.

    Attributes:
        name: `none`, `fixed` or `conditioned`.
        write_threshold_chunks: kappa.
        occupancy_threshold: theta.
        activity_window_s: a task is active, and an eviction counts, for so many seconds.
    """

    name: str = "none"
    write_threshold_chunks: int = 8
    occupancy_threshold: float = 0.95
    activity_window_s: float = 60.0

    def __post_init__(self) -> None:
        if self.name not in ADMISSIONS:
            raise ValueError(f"Admission.name is {self.name!r}; it must be one of {', '.join(ADMISSIONS)}")

    @property
    def deduplicates(self) -> bool:
        """Whether stores leave out what the tier holds."""
        return self.name != "none"

    def policy(self, chunk_tokens: int, bytes_per_token: int, capacity_chunks: int) -> AdmissionPolicy:
        """The connector's policy object in front of a tier of so many chunks, with nothing observed yet."""
        parameters = AdmissionParameters(
            chunk_tokens=chunk_tokens,
            bytes_per_token=bytes_per_token,
            configured_capacity_bytes=capacity_chunks * chunk_tokens * bytes_per_token,
            write_threshold_chunks=self.write_threshold_chunks,
            occupancy_threshold=self.occupancy_threshold,
            activity_window_s=self.activity_window_s,
        )
        return ADMISSIONS[self.name](parameters)


class Served(NamedTuple):
    """What one rank's tier did for a stream.

    Attributes:
        covered_tokens: int64 [calls]: h of every call.
        stored_tokens: copied to the tier. Plain offload copies resident chunks beyond a gap once more, as LMCache
            does; the other admissions deduplicate.
        declined_calls: calls that were not admitted.
    """

    covered_tokens: Ints
    stored_tokens: int
    declined_calls: int


class HostTier:
    """An LRU tier of K_H >= 1 chunks, numbered 0 to `chunks` - 1."""

    def __init__(self, capacity_chunks: int, chunks: int) -> None:
        if capacity_chunks < 1:
            raise ValueError(f"capacity_chunks is {capacity_chunks}; it must be at least 1")
        self.capacity_chunks = capacity_chunks
        self.registered_chunks = 0
        self._recency = kernel.empty(chunks)

    def match(self, keys: Ints) -> int:
        """How many leading keys are resident."""
        return kernel.match(self._recency, keys)

    def use(self, keys: Ints) -> tuple[int, int]:
        """Make one key after the other the most recent, inserting what is absent. Returns inserts and evictions."""
        return self._grown(kernel.use(self._recency, keys, self.registered_chunks, self.capacity_chunks))

    def store(self, keys: Ints) -> tuple[int, int]:
        """As `use`, but what is resident keeps its place."""
        return self._grown(kernel.store(self._recency, keys, self.registered_chunks, self.capacity_chunks))

    def _grown(self, inserted: int) -> tuple[int, int]:
        before = self.registered_chunks
        self.registered_chunks = min(before + inserted, self.capacity_chunks)
        return inserted, before + inserted - self.registered_chunks


def serve(references: References, capacity_chunks: int) -> Served:
    """A stream under plain offload: every call is admitted.

    Chunks beyond a call's `lookup_chunks` are written anew: a retention window makes calls look up fewer.
    """
    matched = np.zeros(len(references), np.int64)
    if not capacity_chunks:
        return Served(matched, 0, 0)
    recency = kernel.empty(_chunks(references))
    kernel.serve(recency, references.keys, references.offsets, references.lookup_chunks, capacity_chunks, matched)
    stored = len(references.keys) - int(matched.sum())
    return Served(matched * references.chunk_tokens, stored * references.chunk_tokens, 0)


def serve_admitted(
    references: References, lookup_s: Floats, capacity_chunks: int, admission: Admission, bytes_per_token: int
) -> Served:
    """A stream under an admission; a call's session is its task.

    Args:
        lookup_s: float64 [calls]: when each call is looked up; not decreasing.
        capacity_chunks: K_H.
        bytes_per_token: beta per rank.
    """
    chunk_tokens = references.chunk_tokens
    matched = np.zeros(len(references), np.int64)
    if not capacity_chunks:
        return Served(matched, 0, 0)
    tier = HostTier(capacity_chunks, _chunks(references))
    policy = admission.policy(chunk_tokens, bytes_per_token, capacity_chunks)
    reports = TierReports(tier, chunk_tokens, bytes_per_token, admission.activity_window_s)
    stored = declined = 0
    per_call = (references.session, references.prompt_tokens, references.lookup_chunks, lookup_s)
    for call, (task, prompt_tokens, looked_up, now_s) in enumerate(
        zip(*(values.tolist() for values in per_call), strict=True)
    ):
        keys = references.call_keys(call)
        found = tier.match(keys[:looked_up])
        tier.use(keys[:found][::-1])
        matched[call] = found
        request = RequestFacts(task, prompt_tokens, found * chunk_tokens)
        if not policy.decide(request, reports.latest(now_s), now_s).save:
            declined += 1
            continue
        inserted, evicted = map(sum, zip(tier.store(keys[found:looked_up]), tier.use(keys[looked_up:]), strict=True))
        stored += inserted if admission.deduplicates else len(keys) - found
        reports.evictions.add(evicted, now_s)
    return Served(matched * chunk_tokens, stored * chunk_tokens, declined)


class TierReports:
    """Tier reports as the first worker publishes them: one a second, with the evictions of the last window.

    Attributes:
        evictions: chunks evicted to make room; whoever changes the tier adds them.
    """

    def __init__(self, tier: HostTier, chunk_tokens: int, bytes_per_token: int, window_s: float) -> None:
        self.evictions = EvictionWindow(window_s)
        self._tier = tier
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_tokens * bytes_per_token
        self._latest: TierReport | None = None

    def latest(self, now_s: float) -> TierReport:
        """The newest report at `now_s`. The tier must not have changed since the call before that."""
        sequence = int(now_s // _REPORT_INTERVAL_S)
        if self._latest is None or sequence > self._latest.sequence:
            published_s = sequence * _REPORT_INTERVAL_S
            self._latest = TierReport(
                engine_id="",
                sequence=sequence,
                chunk_tokens=self._chunk_tokens,
                chunk_bytes=self._chunk_bytes,
                registered_chunks=self._tier.registered_chunks,
                capacity_chunks=self._tier.capacity_chunks,
                evicted_chunks=self.evictions.total(published_s),
                evicted_chunks_total=self.evictions.grand_total,
                received_s=published_s,
            )
        return self._latest


def _chunks(references: References) -> int:
    return int(references.keys.max(initial=-1)) + 1
