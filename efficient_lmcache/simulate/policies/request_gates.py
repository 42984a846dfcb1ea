"""The connector's admission with one of its parts replaced: what signals pressure, or what counts as a refill."""

from __future__ import annotations

from collections import deque
from statistics import fmean

import numpy as np

from efficient_lmcache.core.admission import (
    AdmissionParameters,
    AdmissionPolicy,
    ConditionedAdmission,
    Decision,
    RequestFacts,
)
from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.core.references import References
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.simulate.tiers import LMCacheTier
from efficient_lmcache.sizing.policy_tier import Admission

_WINDOW_LOOKUPS = 256


class ReuseDistances:
    """Stack distances of a stream as it comes, from one chunk in `stride` (SHARDS; Waldspurger et al., 2015)."""

    def __init__(self, keys: int, stride: int) -> None:
        self._stride = stride
        self._last_place = np.full(keys // stride + 1, -1)
        self._place = 0
        self._farthest: deque[int] = deque(maxlen=_WINDOW_LOOKUPS)

    def observe(self, keys: list[int]) -> None:
        """A call references these chunks; numbers in order of appearance are as good as a hash of the key."""
        sampled = [key // self._stride for key in keys if key % self._stride == 0]
        before = self._last_place[sampled]
        if (seen := before[before >= 0]).size:
            self._farthest.append(self._stride * int(np.count_nonzero(self._last_place > seen.min())))
        self._last_place[sampled] = self._place + np.arange(len(sampled))
        self._place += len(sampled)

    @property
    def working_set_chunks(self) -> float:
        """What the latest calls' prompts were behind, on average: the tier they would have needed."""
        return fmean(self._farthest) if self._farthest else 0.0


class StackDistanceAdmission(ConditionedAdmission):
    """Pressure where the measured distance exceeds the tier, instead of Eq. 5."""

    name = "stack-distance"

    def __init__(self, parameters: AdmissionParameters, distances: ReuseDistances, capacity_chunks: int) -> None:
        super().__init__(parameters)
        self._distances = distances
        self._capacity_chunks = capacity_chunks

    def _pressure(self, estimate_above: bool, full_and_evicting: bool | None) -> bool:
        above = self._distances.working_set_chunks > self._capacity_chunks
        return super()._pressure(above, full_and_evicting)


class StackDistanceTier(LMCacheTier):
    """LMCache's tier under `StackDistanceAdmission`."""

    _STRIDE = 8

    def __init__(self, chunks: References, capacity_chunks: int, admission: Admission, bytes_per_token: int) -> None:
        super().__init__(chunks, capacity_chunks, admission, bytes_per_token)
        self._distances = ReuseDistances(int(chunks.keys.max(initial=-1)) + 1, self._STRIDE)
        self.policy = StackDistanceAdmission(_parameters(self.policy), self._distances, capacity_chunks)

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        if call not in self.decisions:
            self._distances.observe(self._chunks.call_keys(call).tolist())
        return super().look_up(call, tokens, gpu_tokens, now_s)


class AdaptiveThreshold(ConditionedAdmission):
    """kappa between the two modes of u's logarithm over the latest lookups (Otsu, 1979), anew for every request."""

    name = "adaptive-kappa"

    def __init__(self, parameters: AdmissionParameters) -> None:
        super().__init__(parameters)
        self._new_chunks: deque[int] = deque(maxlen=_WINDOW_LOOKUPS)
        self._above = False

    def decide(
        self, request: RequestFacts, tier_report: TierReport | None, now_s: float, pool: PoolEstimate | None = None
    ) -> Decision:
        chunk_tokens = self.parameters.chunk_tokens
        new_chunks = request.prompt_tokens // chunk_tokens - request.host_match_tokens // chunk_tokens
        self._new_chunks.append(new_chunks)
        decision = super().decide(request, tier_report, now_s, pool)
        return decision._replace(save=not (decision.pressure and new_chunks > _otsu(self._new_chunks)))


class AdaptiveThresholdTier(LMCacheTier):
    """LMCache's tier under `AdaptiveThreshold`."""

    def __init__(self, chunks: References, capacity_chunks: int, admission: Admission, bytes_per_token: int) -> None:
        super().__init__(chunks, capacity_chunks, admission, bytes_per_token)
        self.policy = AdaptiveThreshold(_parameters(self.policy))


def _parameters(policy: AdmissionPolicy) -> AdmissionParameters:
    assert isinstance(policy, ConditionedAdmission)
    return policy.parameters


def _otsu(values: deque[int]) -> float:
    """The value up to which the lower of two classes goes, with the largest variance between the classes."""
    logs = np.log1p(np.sort(np.fromiter(values, np.float64)))
    count = np.arange(1, len(logs))
    sums = np.cumsum(logs)
    below, above = sums[:-1] / count, (sums[-1] - sums[:-1]) / (len(logs) - count)
    between = count * (len(logs) - count) * (above - below) ** 2
    between[np.diff(logs) == 0] = -1.0  # equal values belong to one class
    return float(np.expm1(logs[np.argmax(between)])) + 1e-9 if len(logs) > 1 else float("inf")
