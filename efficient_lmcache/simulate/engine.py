"""Engines' settings, and their compiled state made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.simulate._engine_state import BLOCK, FILLED, NONE, PLACE, STATE, WORK, Calls, Engine


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
        keyless_first: freed blocks that nobody can find again are taken before the prefix cache's (in vLLM 0.13 they
            wait behind what was used before them).
    """

    gpu_kv_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    reserves_prompt: bool = True
    plans_ahead: bool = True
    keyless_first: bool = True

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


def new_engines(settings: Sequence[EngineSettings], blocks: References, *, logs_evictions: bool = False) -> Engine:
    """Engines with empty caches for calls of these blocks, in one: `engine_of` tells them apart.

    Args:
        logs_evictions: keep the keys that leave the prefix caches in `Engine.evicted`.
    """
    number = len(settings)
    # No more calls than there are run at once, and none has more blocks than the longest one.
    places = [min(each.max_num_seqs, max(len(blocks), 1)) for each in settings]
    seqs, table = max(places), -(-int(_tokens(blocks).max(initial=1)) // blocks.chunk_tokens)
    # vLLM keeps one block for itself.
    counts = [each.gpu_kv_tokens // blocks.chunk_tokens - 1 for each in settings]
    for count, each in zip(counts, settings, strict=True):
        if count < 1:
            raise ValueError(f"{each.gpu_kv_tokens} GPU KV tokens make no two blocks of {blocks.chunk_tokens}")
    _require_room(blocks, min(counts) * blocks.chunk_tokens)
    made = Engine(
        state=np.zeros(number, STATE),
        blocks=np.zeros((number, max(counts) + 1), BLOCK),
        holder=np.full((number, int(blocks.keys.max(initial=-1)) + 1), NONE, np.int32),
        rows=np.zeros((number, seqs, table), np.int32),
        free_rows=np.tile(np.arange(seqs), (number, 1)),
        places=np.zeros((number, seqs), PLACE),
        planned=np.zeros((number, seqs), WORK),
        flight=np.zeros((number, seqs), WORK),
        finished=np.zeros((number, seqs), np.int64),
        filled=np.zeros((number, seqs), FILLED),
        evicted=np.zeros((number, 4 * max(counts) if logs_evictions else 0), np.int64),
        block_tokens=blocks.chunk_tokens,
    )
    made.blocks["key"] = NONE
    for state, row, count, most, each in zip(made.state, made.blocks, counts, places, settings, strict=True):
        ring = np.arange(count + 1)
        row["newer"][: count + 1], row["older"][: count + 1] = np.roll(ring, -1), np.roll(ring, 1)
        state["gpu_blocks"] = state["free_blocks"] = count
        state["max_num_seqs"] = state["free_rows"] = most
        state["max_batched_tokens"] = each.max_batched_tokens
        state["reserves_prompt"], state["plans_ahead"] = each.reserves_prompt, each.plans_ahead
        state["keyless_first"] = each.keyless_first
    return made


def _tokens(blocks: References) -> Ints:
    """That the GPU holds of each call in the end: all but its last output token, which nothing attends to."""
    tokens: Ints = np.maximum(blocks.prompt_tokens, 1) + np.maximum(blocks.output_tokens, 1) - 1
    return tokens


def _require_room(blocks: References, gpu_tokens: int) -> None:
    """ValueError for a call that could never end, as the GPU does not hold it."""
    for call in np.flatnonzero(_tokens(blocks) > gpu_tokens)[:1].tolist():
        output = f" and {blocks.output_tokens[call]} of output" if blocks.output_tokens[call] > 1 else ""
        asked = f"{blocks.prompt_tokens[call]} prompt tokens{output}"
        raise ValueError(f"call {call} has {asked}; they do not fit into the GPU's {gpu_tokens}")
