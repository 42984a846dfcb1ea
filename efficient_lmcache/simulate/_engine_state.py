"""What one compiled engine holds: `_engine_kernel` changes it, `engine` makes and reads it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from efficient_lmcache.core.references import Floats, Ints

NONE = -1
#: What `advance` stops for.
NOTHING, LOOKUP, STEPPED, STUCK = 0, 1, 2, 3

Int32s = npt.NDArray[np.int32]
Records = npt.NDArray[np.void]

STATE = np.dtype(
    [
        ("clock_s", np.float64),
        ("busy_s", np.float64),
        ("end_s", np.float64),  # of the step that is computed
        ("running", np.int64),  # how many
        ("first_waiting", np.int64),
        ("last_waiting", np.int64),
        ("waiting", np.int64),
        ("fetching", np.int64),  # calls that will wait once their KV has come from afar
        ("free_blocks", np.int64),
        ("free_rows", np.int64),
        ("budget_tokens", np.int64),  # left in this step
        ("preempted", np.int64),  # in this step
        ("restores", np.int64),  # in this step, and their tokens
        ("restored_tokens", np.int64),
        ("planned", np.int64),  # calls of the step that was planned ahead, and of the one that is computed
        ("in_flight", np.int64),
        ("preemptions", np.int64),  # since the start, and all below
        ("steps", np.int64),
        ("prefilled_tokens", np.int64),
        ("decoded_tokens", np.int64),
        ("call", np.int64),  # that LOOKUP asks for
        ("finished", np.int64),  # entries of `Engine.finished`, of `Engine.filled`, of `Engine.evicted`
        ("filled", np.int64),
        ("evicted", np.int64),
        ("gpu_blocks", np.int64),  # settings, and all below
        ("max_num_seqs", np.int64),
        ("max_batched_tokens", np.int64),
        ("reserves_prompt", np.bool_),  # a call is admitted only if all its blocks fit (`scheduler_reserve_full_isl`)
        ("plans_ahead", np.bool_),  # a step is planned when the one before it begins (`async_scheduling`)
        ("keyless_first", np.bool_),  # freed blocks without a key are taken before the prefix cache's
        ("amid_plan", np.bool_),  # no settings: while LOOKUP is answered,
        ("awaits_end", np.bool_),  # and while nothing is to be done before the step that is computed ends
    ]
)
#: A block: its neighbours in the free list, NONE while it is in use; how many running calls hold it; the key whose
#: holder it is, or NONE.
BLOCK = np.dtype([("newer", np.int32), ("older", np.int32), ("users", np.int32), ("key", np.int32)])
#: A running call: its row, its blocks, those of them that were offered to the prefix cache; its tokens in a step that
#: is being scheduled.
PLACE = np.dtype([(name, np.int64) for name in ("call", "row", "held", "registered", "scheduled")])
#: A call's part of a step: its tokens, and tokens known before.
WORK = np.dtype([(name, np.int64) for name in ("call", "new", "known")])
#: A call whose prompt a step continued, and up to where.
FILLED = np.dtype([("call", np.int64), ("tokens", np.int64)])


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
    """One engine; or several of them, with one dimension more in front of all arrays.

    Attributes:
        state: `STATE` [1].
        blocks: `BLOCK` [GPU blocks + 1]: the free list is circular through the last entry.
        holder: int32 [keys]: NONE for a key that is not cached.
        rows: int32 [max_num_seqs, blocks of the longest call]: block tables.
        free_rows: int64 [max_num_seqs]: a stack.
        places: `PLACE` [max_num_seqs]: running calls in the order of their admission.
        planned, flight: `WORK` [max_num_seqs]: of the step that is planned, and of the one that is computed.
        finished: int64 [max_num_seqs]: calls that the last step ended.
        filled: `FILLED` [max_num_seqs]: calls whose prompt the last step continued.
        evicted: int64 [..]: keys that lost their holder since the caller last emptied it; of length 0 to keep none.
        block_tokens: of vLLM.
    """

    state: Records
    blocks: Records
    holder: Int32s
    rows: Int32s
    free_rows: Ints
    places: Records
    planned: Records
    flight: Records
    finished: Ints
    filled: Records
    evicted: Ints
    block_tokens: int


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
