"""The paper's admission in front of an exclusive tier: pressure where the working set exceeds host and GPU together."""

from __future__ import annotations

from efficient_lmcache.core.admission import RequestFacts
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.simulate.policies.exclusive import ExclusiveTier
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload
from efficient_lmcache.telemetry.eviction_window import EvictionWindow


class WorkingSetTier(ExclusiveTier):
    """What a declined request was the last to fill is not written when the GPU evicts it.

    A request's u counts what neither host nor GPU holds. Of the GPU, running calls' contexts are pinned and count for
    nothing; they are the calls of the latest step.
    """

    def __init__(
        self, workload: Workload, capacity_chunks: int, admission: Admission, bytes_per_token: int, gpu_kv_tokens: int
    ) -> None:
        super().__init__(workload, capacity_chunks)
        self._chunk_bytes = workload.chunks.chunk_tokens * bytes_per_token
        self._gpu_kv_tokens = gpu_kv_tokens
        self._policy = admission.policy(workload.chunks.chunk_tokens, bytes_per_token, capacity_chunks)
        self._evictions = EvictionWindow(admission.activity_window_s)
        self._saves: dict[int, bool] = {}
        self._filled_by: dict[int, int] = {}
        self._pinned_tokens = 0
        self._step_s = -1.0

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        found = super().look_up(call, tokens, gpu_tokens, now_s)
        if call not in self._saves:
            chunks = self._chunks
            facts = RequestFacts(int(chunks.session[call]), int(chunks.prompt_tokens[call]), max(found, gpu_tokens))
            self._saves[call] = self._policy.decide(facts, self._report(now_s), now_s).save
        return found

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        if now_s != self._step_s:
            self._step_s, self._pinned_tokens = now_s, 0
        self._pinned_tokens += tokens
        first = self._filled_chunks[call]
        for key in self._chunks.call_keys(call)[first : tokens // self._chunks.chunk_tokens].tolist():
            self._filled_by[key] = call
        return super().fill(call, tokens, now_s)

    def _makes_room(self, key: int) -> bool:
        call = self._filled_by.get(key)
        return (call is None or self._saves[call] or self._is_awaited(key)) and super()._makes_room(key)

    def _begin(self, now_s: float) -> None:
        self._evictions.add(self.evicted_chunks - self._evictions.grand_total, now_s)

    def _report(self, now_s: float) -> TierReport:
        self._evictions.add(self.evicted_chunks - self._evictions.grand_total, now_s)
        unpinned = max(self._gpu_kv_tokens - self._pinned_tokens, 0) // self._chunks.chunk_tokens
        return TierReport(
            engine_id="",
            sequence=0,
            chunk_tokens=self._chunks.chunk_tokens,
            chunk_bytes=self._chunk_bytes,
            registered_chunks=len(self.sole) + len(self.spare) + unpinned,
            capacity_chunks=self._capacity_chunks + unpinned,
            evicted_chunks=self._evictions.total(now_s),
            evicted_chunks_total=self._evictions.grand_total,
            received_s=now_s,
        )
