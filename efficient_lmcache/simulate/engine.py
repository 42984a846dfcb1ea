"""One engine's settings, and its compiled state made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from efficient_lmcache.core.references import References
from efficient_lmcache.simulate._engine_state import NONE, STATE, Calls, Engine


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """vLLM's settings that the model knows.

    Attributes:
        gpu_kv_tokens: K_G, as vLLM reports it at start-up.
        max_num_seqs: R.
        max_batched_tokens: of one step.
        reserves_prompt: a call is admitted only if all its blocks fit (`scheduler_reserve_full_isl`; vLLM 0.13 admits
            by the first step's).
        plans_ahead: a step is planned when the one before it begins (`async_scheduling`; not so in vLLM 0.13).
    """

    gpu_kv_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    reserves_prompt: bool = True
    plans_ahead: bool = True

    def __post_init__(self) -> None:
        for name in ("gpu_kv_tokens", "max_num_seqs", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineSettings.{name} is {getattr(self, name)}; it must be at least 1")


def new_calls(blocks: References) -> Calls:
    """No call has arrived. An unknown output is taken as one token."""
    calls = len(blocks)

    def zeros() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.zeros(calls, np.int64)

    return Calls(
        keys=blocks.keys,
        offsets=blocks.offsets,
        prompt_tokens=np.maximum(blocks.prompt_tokens, 1),
        output_tokens=np.maximum(blocks.output_tokens, 1),
        host_tokens=np.full(calls, NONE),
        computed_tokens=zeros(),
        produced_tokens=zeros(),
        pending_tokens=zeros(),
        gpu_tokens=zeros(),
        restored_tokens=zeros(),
        recomputed_tokens=zeros(),
        next_waiting=np.full(calls, NONE),
        preemptions=zeros(),
        admitted_s=np.full(calls, np.nan),
        first_token_s=np.full(calls, np.nan),
        finished_s=np.full(calls, np.nan),
    )


def new_engine(settings: EngineSettings, blocks: References, *, logs_evictions: bool = False) -> Engine:
    """An engine with an empty cache for calls of these blocks.

    Args:
        logs_evictions: keep the keys that leave the prefix cache in `Engine.evicted`.
    """
    # vLLM keeps one block for itself.
    count = settings.gpu_kv_tokens // blocks.chunk_tokens - 1
    if count < 1:
        raise ValueError(f"{settings.gpu_kv_tokens} GPU KV tokens make no two blocks of {blocks.chunk_tokens}")
    ring = np.arange(count + 1, dtype=np.int32)
    state = np.zeros(1, STATE)
    state["free_blocks"], state["free_rows"] = count, settings.max_num_seqs
    seqs = settings.max_num_seqs

    def per_place() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.zeros(seqs, np.int64)

    return Engine(
        state=state,
        newer=np.roll(ring, -1),
        older=np.roll(ring, 1),
        users=np.zeros(count, np.int32),
        key=np.full(count, NONE, np.int64),
        holder=np.full(int(blocks.keys.max(initial=-1)) + 1, NONE, np.int32),
        rows=np.zeros((seqs, count), np.int32),
        free_rows=np.arange(seqs),
        row=per_place(),
        held=per_place(),
        registered=per_place(),
        running=per_place(),
        scheduled=per_place(),
        planned=np.zeros((3, seqs), np.int64),
        flight=np.zeros((3, seqs), np.int64),
        finished=per_place(),
        filled=np.zeros((2, seqs), np.int64),
        evicted=np.zeros(4 * count if logs_evictions else 0, np.int64),
        block_tokens=blocks.chunk_tokens,
        max_batched_tokens=settings.max_batched_tokens,
        reserves_prompt=settings.reserves_prompt,
        plans_ahead=settings.plans_ahead,
    )
