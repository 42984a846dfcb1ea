"""vLLM's scheduler and block cache without an engine: agents in a closed loop, every step takes a second."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from efficient_lmcache.simulate.engine import EngineSettings


class Call(NamedTuple):
    """A lane's next call; `host_tokens` is what a connector says that it and the GPU hold."""

    lane: int
    prompt: list[int]
    output: list[int]
    pause_s: float
    host_tokens: int


@dataclass
class Seen:
    """What became of one call."""

    admitted_s: float = -1.0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    cached_tokens: int = -1
    preemptions: int = 0


class FixedConnector:
    """Knows of every call how much it holds, and loads it at once; every other hook does nothing."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def get_num_new_matched_tokens(self, request: Any, local_tokens: int) -> tuple[int, bool]:
        held = self._calls[int(request.request_id)].host_tokens
        return max(min(held, request.num_tokens - 1) - local_tokens, 0), False

    def has_pending_block_frees(self) -> bool:
        return False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def take_events(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


@dataclass
class ClosedLoop:
    """Lanes that take turns on a scheduler, `active_pool` at a time.

    A step is planned when the one before it begins, where the settings say so, as the engine core's batch queue does.
    """

    scheduler: Any
    calls: Sequence[Call]
    settings: EngineSettings
    block_tokens: int
    active_pool: int
    seen: list[Seen] = field(init=False)

    def run(self) -> list[Seen]:
        self.seen = [Seen() for _ in self.calls]
        self._numbers = count()
        self._arrivals: list[tuple[float, int, int]] = []
        lanes: dict[int, list[int]] = {}
        for number, call in enumerate(self.calls):
            lanes.setdefault(call.lane, []).append(number)
        self._lanes = list(lanes.values())
        self._lane_calls: dict[int, list[int]] = {}
        self._requests: dict[str, Any] = {}
        self._clock_s = self._end_s = 0.0
        self._step: Any = None
        self._watch_preemptions()
        for _ in range(min(self.active_pool, len(self._lanes))):
            self._next_lane()
        while any(each.finished_s < 0 for each in self.seen):
            self._turn()
        return self.seen

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def watched(request: Any, *arguments: Any, **named: Any) -> None:
            self.seen[int(request.request_id)].preemptions += 1
            preempt(request, *arguments, **named)

        self.scheduler._preempt_request = watched

    def _next_lane(self) -> None:
        if self._lanes:
            first, *others = self._lanes.pop(0)
            self._lane_calls[self.calls[first].lane] = others
            self._send(first)

    def _send(self, call: int) -> None:
        heapq.heappush(self._arrivals, (self._clock_s + self.calls[call].pause_s, next(self._numbers), call))

    def _turn(self) -> None:
        idle = not self._requests
        while self._arrivals and (self._arrivals[0][0] <= self._clock_s or idle):
            at_s, _, call = heapq.heappop(self._arrivals)
            self._clock_s, idle = max(self._clock_s, at_s), False
            self._requests[str(call)] = self._request(call)
            self.scheduler.add_request(self._requests[str(call)])
        planned = self.scheduler.schedule()
        sampling = {name: self._planned(name, tokens) for name, tokens in planned.num_scheduled_tokens.items()}
        if self._step:
            self._complete()
        if sampling:
            self._step, self._end_s = (planned, sampling), self._clock_s + 1.0
            if not self.settings.plans_ahead:
                self._complete()

    def _planned(self, name: str, tokens: int) -> list[int]:
        """The output tokens that the request's part of the step samples: one or none."""
        request, call, seen = self._requests[name], self.calls[int(name)], self.seen[int(name)]
        if seen.admitted_s < 0:
            seen.admitted_s, seen.cached_tokens = self._clock_s, request.num_computed_tokens - tokens
        return [] if request.is_prefill_chunk else [call.output[request.num_computed_tokens - len(call.prompt)]]

    def _complete(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        planned, sampling = self._step
        self._step, self._clock_s = None, self._end_s
        numbers = {name: number for number, name in enumerate(sampling)}
        self.scheduler.update_from_output(planned, ModelRunnerOutput(list(sampling), numbers, list(sampling.values())))
        for name in sampling:
            request, seen = self._requests.get(name), self.seen[int(name)]
            if request is None:
                continue
            if request.num_output_tokens and seen.first_token_s < 0:
                seen.first_token_s = self._clock_s
            if request.is_finished():
                seen.finished_s = self._clock_s
                del self._requests[name]
                self._go_on(self.calls[int(name)].lane)

    def _go_on(self, lane: int) -> None:
        others = self._lane_calls[lane]
        if others:
            self._send(others.pop(0))
        else:
            self._next_lane()

    def _request(self, call: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        asked = SamplingParams(max_tokens=len(self.calls[call].output), ignore_eos=True, temperature=0.0)
        hasher = get_request_block_hasher(self.block_tokens, sha256)
        prompt = list(self.calls[call].prompt)
        return Request(str(call), prompt, asked, None, arrival_time=float(next(self._numbers)), block_hasher=hasher)


def new_scheduler(model: str, settings: EngineSettings, block_tokens: int, connector: FixedConnector) -> Any:
    """vLLM's, asynchronous where steps are planned ahead, with an empty cache."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    config = VllmConfig(
        model_config=ModelConfig(model=model, tokenizer=model, dtype="bfloat16"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_batched_tokens,
            max_model_len=32_768,
            is_encoder_decoder=False,
            async_scheduling=settings.plans_ahead,
            scheduler_reserve_full_isl=settings.reserves_prompt,
        ),
        cache_config=CacheConfig(block_size=block_tokens, enable_prefix_caching=True),
    )
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32)
    blocks = settings.gpu_kv_tokens // block_tokens
    config.cache_config.num_gpu_blocks = blocks
    made = (AsyncScheduler if settings.plans_ahead else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        hash_block_size=block_tokens,
    )
    # What `kv_role: kv_both` means to it: what a preempted request has in flight is dropped.
    made.connector, made.requires_kv_delivery = connector, True
    return made
