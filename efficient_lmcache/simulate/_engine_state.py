"""What one compiled engine holds: `_engine_kernel` changes it, `engine` makes and reads it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from efficient_lmcache.core.references import Floats, Ints

NONE = -1
#: What `advance` stops at.
IDLE, PAUSED, LOOKUP, STEPPED, STUCK = 0, 1, 2, 3, 4
BETWEEN_STEPS, ADMITTING = 0, 1

Int32s = npt.NDArray[np.int32]

STATE = np.dtype(
    [
        ("clock_s", np.float64),
        ("busy_s", np.float64),
        ("phase", np.int64),
        ("running", np.int64),  # how many
        ("first_waiting", np.int64),
        ("last_waiting", np.int64),
        ("waiting", np.int64),
        ("free_blocks", np.int64),
        ("free_rows", np.int64),
        ("budget_tokens", np.int64),  # left in this step
        ("preempted", np.int64),  # in this step
        ("restores", np.int64),  # in this step, and their tokens
        ("restored_tokens", np.int64),
        ("in_flight", np.int64),  # calls of the step that is computed, and its end
        ("end_s", np.float64),
        ("preemptions", np.int64),  # since the start, and all below
        ("steps", np.int64),
        ("prefilled_tokens", np.int64),
        ("decoded_tokens", np.int64),
        ("call", np.int64),  # that LOOKUP asks for
        ("finished", np.int64),  # entries of `Engine.finished`, of `Engine.filled`, of `Engine.evicted`
        ("filled", np.int64),
        ("evicted", np.int64),
    ]
)


class Calls(NamedTuple):
    """All calls of the simulated work, whichever engine serves them; int64 [calls] unless said otherwise.

    Attributes:
        keys: int64 [blocks of all calls]: call c has keys[offsets[c] : offsets[c + 1]], its prompt's and output's.
        offsets: int64 [calls + 1].
        prompt_tokens, output_tokens: n >= 1 and m >= 1.
        host_tokens: h of the lookup that the next admission uses; NONE before it.
        computed_tokens: KV that is in the cache, what is scheduled included.
        produced_tokens, pending_tokens: of the output: there, and computed by scheduled steps.
        gpu_tokens, restored_tokens: at the first admission: found in the GPU's cache, and restored beyond it.
        recomputed_tokens: computed once more, after preemptions.
        next_waiting: the queue's links.
        preemptions: how often.
        admitted_s, first_token_s, finished_s: float64; nan until then.
    """

    keys: Ints
    offsets: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    host_tokens: Ints
    computed_tokens: Ints
    produced_tokens: Ints
    pending_tokens: Ints
    gpu_tokens: Ints
    restored_tokens: Ints
    recomputed_tokens: Ints
    next_waiting: Ints
    preemptions: Ints
    admitted_s: Floats
    first_token_s: Floats
    finished_s: Floats


class Engine(NamedTuple):
    """One engine.

    Attributes:
        state: `STATE` [1].
        newer, older: int32 [blocks + 1]: the free list, circular through its last entry; NONE for blocks in use.
        users: int32 [blocks]: running calls that hold a block.
        key: int64 [blocks]: the key whose holder a block is; NONE.
        holder: int32 [keys]: NONE for a key that is not cached.
        rows: int32 [max_num_seqs, blocks]: block tables.
        free_rows: int64 [max_num_seqs]: a stack.
        row, held, registered: int64 [max_num_seqs]: of running calls by place: its row, its blocks, those of them that
            were offered to the prefix cache.
        running: int64 [max_num_seqs]: calls in the order of their admission.
        scheduled: int64 [max_num_seqs]: tokens of the step that is planned, by place.
        planned, flight: int64 [3, max_num_seqs]: calls, their tokens, and tokens known before: of the step that is
            planned, and of the one that is computed.
        finished: int64 [max_num_seqs]: calls that the last step ended.
        filled: int64 [2, max_num_seqs]: calls whose prompt the last step continued, and up to where.
        evicted: int64 [..]: keys that lost their holder since the caller last emptied it; of length 0 to keep none.
        block_tokens, max_batched_tokens: of vLLM.
        reserves_prompt: whether a call is admitted only if all its blocks fit (vLLM's `scheduler_reserve_full_isl`).
        plans_ahead: whether a step is planned when the one before it begins (vLLM's `async_scheduling`).
    """

    state: npt.NDArray[np.void]
    newer: Int32s
    older: Int32s
    users: Int32s
    key: Ints
    holder: Int32s
    rows: npt.NDArray[np.int32]
    free_rows: Ints
    row: Ints
    held: Ints
    registered: Ints
    running: Ints
    scheduled: Ints
    planned: Ints
    flight: Ints
    finished: Ints
    filled: Ints
    evicted: Ints
    block_tokens: int
    max_batched_tokens: int
    reserves_prompt: bool
    plans_ahead: bool


class StepCosts(NamedTuple):
    """Seconds of one step: overhead + sequences + max(compute, memory) + restores.

    Attributes:
        step_s, sequence_s: for each step, and for each call in it.
        token_s: compute of a token without attention.
        pair_s: compute of one token attending to one other.
        dense_s: reading the weights that every token uses.
        experts_s: reading all experts' weights.
        expert_share: of the experts that one token uses; 1 for a dense model, whose `experts_s` is 0.
        context_s: reading one token's KV.
        restore_s, restored_token_s: for each call with a restore, and for each restored token.
    """

    step_s: float
    sequence_s: float
    token_s: float
    pair_s: float
    dense_s: float
    experts_s: float
    expert_share: float
    context_s: float
    restore_s: float
    restored_token_s: float
