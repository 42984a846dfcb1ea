"""One engine, compiled: vLLM's scheduler and its paged KV cache, one iteration after the other.

    block       KV of `block_tokens` tokens; full ones have a key that identifies all tokens up to their end
    holder      the block that holds a key; a key has one at most (vLLM keeps duplicates until one is evicted)
    free list   blocks that nobody runs with, least recently used first; those with a key are the prefix cache
    row         one running call's block table

A call's blocks return to the free list tail first, so a block never outlives its predecessor there: what is cached of a
prompt is a leading run, found by bisection. A kernel calls compiled functions of its own file only.
"""

from __future__ import annotations

import numpy as np

from efficient_lmcache.core._compiled import compiled
from efficient_lmcache.core.references import Ints
from efficient_lmcache.simulate._engine_state import (
    ADMITTING,
    BETWEEN_STEPS,
    IDLE,
    LOOKUP,
    NONE,
    PAUSED,
    STEPPED,
    STUCK,
    Calls,
    Engine,
    Int32s,
    StepCosts,
)


@compiled
def advance(engine: Engine, calls: Calls, costs: StepCosts, until_s: float) -> int:
    """Run whole steps until one ends at or after `until_s`, or until the caller is needed.

    Returns:
        IDLE (nothing to do), PAUSED (time is up), STUCK (nothing runs, and the first waiting call does not fit), LOOKUP
        (`state.call` waits for its `host_tokens`; call again) or STEPPED (a step ended that finished calls or continued
        prompts, or the list of evicted keys is half full).
    """
    state = engine.state[0]
    while True:
        if state.phase == BETWEEN_STEPS:
            if state.running == 0 and state.waiting == 0:
                return IDLE
            if state.clock_s >= until_s:
                return PAUSED
            state.budget_tokens = engine.max_batched_tokens
            state.preempted = state.restores = state.restored_tokens = 0
            state.finished = state.filled = 0
            engine.scheduled[:] = 0
            _schedule_running(engine, calls)
            state.phase = ADMITTING
        call = _admit_waiting(engine, calls)
        if call != NONE:
            state.call = call
            return LOOKUP
        state.phase = BETWEEN_STEPS
        planned = _plan(engine, calls)
        if planned == 0 and state.in_flight == 0:
            return STUCK
        if state.in_flight:
            _complete(engine, calls)
        if planned:
            _launch(engine, calls, costs, planned)
            if not engine.plans_ahead:
                _complete(engine, calls)
        if state.finished or state.filled or 2 * state.evicted > len(engine.evicted):
            return STEPPED


@compiled
def enqueue(engine: Engine, calls: Calls, call: int) -> None:
    """A call arrives: it waits behind all others."""
    state = engine.state[0]
    calls.next_waiting[call] = NONE
    if state.waiting:
        calls.next_waiting[state.last_waiting] = call
    else:
        state.first_waiting = call
    state.last_waiting = call
    state.waiting += 1


@compiled
def _schedule_running(engine: Engine, calls: Calls) -> None:
    """Running calls first, in order; for want of blocks the last one is preempted, if need be the asking one."""
    state = engine.state[0]
    place = 0
    while place < state.running and state.budget_tokens > 0:
        call = engine.running[place]
        produced = calls.produced_tokens[call] + calls.pending_tokens[call]
        if produced == calls.output_tokens[call]:
            place += 1
            continue
        total = calls.prompt_tokens[call] + produced
        new = min(total - calls.computed_tokens[call], state.budget_tokens)
        while not _allocate(engine, calls, place, calls.computed_tokens[call] + new):
            _preempt_last(engine, calls)
            if state.running <= place:
                return
        engine.scheduled[place] = new
        state.budget_tokens -= new
        place += 1


@compiled
def _preempt_last(engine: Engine, calls: Calls) -> None:
    state = engine.state[0]
    place = state.running - 1
    call = engine.running[place]
    _free(engine, place)
    state.running = place
    # What of it is in flight is lost.
    for entry in range(state.in_flight):
        if engine.flight[0, entry] == call:
            engine.flight[0, entry] = NONE
    calls.computed_tokens[call] = calls.pending_tokens[call] = 0
    calls.host_tokens[call] = NONE
    calls.preemptions[call] += 1
    calls.next_waiting[call] = state.first_waiting if state.waiting else NONE
    if not state.waiting:
        state.last_waiting = call
    state.first_waiting = call
    state.waiting += 1
    state.preempted = 1
    state.preemptions += 1


@compiled
def _admit_waiting(engine: Engine, calls: Calls) -> int:
    """Waiting calls, first come first served, unless this step preempted one. Returns a call that must be looked up."""
    state = engine.state[0]
    while state.waiting and state.budget_tokens > 0 and state.running < len(engine.running) and not state.preempted:
        call = state.first_waiting
        if calls.host_tokens[call] == NONE:
            return int(call)
        if not _admit(engine, calls, call):
            break
        state.first_waiting = calls.next_waiting[call]
        state.waiting -= 1
    return NONE


@compiled
def _admit(engine: Engine, calls: Calls, call: int) -> bool:
    """Give a call its cached blocks and those of its first step; False if they do not fit."""
    state, block_tokens = engine.state[0], engine.block_tokens
    total = calls.prompt_tokens[call] + calls.produced_tokens[call]
    keys = calls.keys[calls.offsets[call] : calls.offsets[call + 1]]
    found = cached_blocks(engine, keys[: (total - 1) // block_tokens])
    # The last token is always computed: its logits are what the call is for.
    restored = max(min(calls.host_tokens[call], total - 1) - found * block_tokens, 0)
    known = found * block_tokens + restored
    new = min(total - known, state.budget_tokens)
    must_fit = total if engine.reserves_prompt else known + new
    needed = _blocks(must_fit, block_tokens) - found + _unused(engine, keys[:found])
    if needed > state.free_blocks:
        return False
    place = state.running
    state.running += 1
    state.free_rows -= 1
    row = engine.free_rows[state.free_rows]
    engine.running[place], engine.row[place], engine.scheduled[place] = call, row, new
    for index in range(found):
        block = engine.holder[keys[index]]
        _take(engine, block)
        engine.rows[row, index] = block
    engine.held[place] = engine.registered[place] = found
    _allocate(engine, calls, place, known + new)
    if calls.preemptions[call]:
        calls.recomputed_tokens[call] += total - known
    elif np.isnan(calls.admitted_s[call]):
        calls.gpu_tokens[call], calls.restored_tokens[call] = found * block_tokens, restored
        calls.admitted_s[call] = state.clock_s
    calls.computed_tokens[call] = known
    calls.host_tokens[call] = NONE
    state.budget_tokens -= new
    state.restored_tokens += restored
    state.restores += restored > 0
    return True


@compiled
def _plan(engine: Engine, calls: Calls) -> int:
    """What was scheduled counts as computed from now on. Returns the planned step's calls."""
    planned = 0
    for place in range(engine.state[0].running):
        new = engine.scheduled[place]
        if new == 0:
            continue
        call = engine.running[place]
        known = calls.computed_tokens[call]
        engine.planned[0, planned], engine.planned[1, planned], engine.planned[2, planned] = call, new, known
        planned += 1
        calls.computed_tokens[call] = known + new
        if known + new == calls.prompt_tokens[call] + calls.produced_tokens[call] + calls.pending_tokens[call]:
            calls.pending_tokens[call] += 1
    return planned


@compiled
def _launch(engine: Engine, calls: Calls, costs: StepCosts, planned: int) -> None:
    """The planned step begins; what it computes is computed, even for a call that is preempted meanwhile."""
    state = engine.state[0]
    tokens = pairs = contexts = 0
    for entry in range(planned):
        new, known = engine.planned[1, entry], engine.planned[2, entry]
        engine.flight[:, entry] = engine.planned[:, entry]
        prompt_left = calls.prompt_tokens[engine.planned[0, entry]] - known
        state.prefilled_tokens += max(min(new, prompt_left), 0)
        tokens += new
        pairs += new * known + new * (new + 1) // 2
        contexts += known + new
    compute_s = tokens * costs.token_s + pairs * costs.pair_s
    experts = 1.0 - (1.0 - costs.expert_share) ** tokens
    memory_s = costs.dense_s + costs.experts_s * experts + contexts * costs.context_s
    restores_s = state.restores * costs.restore_s + state.restored_tokens * costs.restored_token_s
    step_s = costs.step_s + planned * costs.sequence_s + max(compute_s, memory_s) + restores_s
    state.in_flight = planned
    state.end_s = state.clock_s + step_s
    state.busy_s += step_s
    state.steps += 1


@compiled
def _complete(engine: Engine, calls: Calls) -> None:
    """The step in flight ends; calls with their last token leave."""
    state = engine.state[0]
    state.clock_s = state.end_s
    ended = False
    for entry in range(state.in_flight):
        call, new, known = engine.flight[0, entry], engine.flight[1, entry], engine.flight[2, entry]
        if call == NONE:
            continue
        prompt_tokens = calls.prompt_tokens[call]
        if known < prompt_tokens:
            engine.filled[0, state.filled], engine.filled[1, state.filled] = call, known + new
            state.filled += 1
        if known + new == prompt_tokens + calls.produced_tokens[call]:
            if calls.produced_tokens[call] == 0:
                calls.first_token_s[call] = state.clock_s
            calls.produced_tokens[call] += 1
            calls.pending_tokens[call] -= 1
            state.decoded_tokens += 1
            if calls.produced_tokens[call] == calls.output_tokens[call]:
                calls.finished_s[call] = state.clock_s
                engine.finished[state.finished] = call
                state.finished += 1
                ended = True
    state.in_flight = 0
    if ended:
        _leave(engine, calls)


@compiled
def _leave(engine: Engine, calls: Calls) -> None:
    state, kept = engine.state[0], 0
    for place in range(state.running):
        call = engine.running[place]
        if calls.produced_tokens[call] == calls.output_tokens[call]:
            _free(engine, place)
        else:
            _move(engine, place, kept)
            kept += 1
    state.running = kept


@compiled
def _move(engine: Engine, place: int, to: int) -> None:
    if place != to:
        engine.running[to], engine.row[to] = engine.running[place], engine.row[place]
        engine.held[to], engine.registered[to] = engine.held[place], engine.registered[place]


@compiled
def _allocate(engine: Engine, calls: Calls, place: int, tokens: int) -> bool:
    """Blocks for so many tokens of a running call, full ones into the prefix cache; False if too few are free."""
    state = engine.state[0]
    needed, held = _blocks(tokens, engine.block_tokens), engine.held[place]
    if needed - held > state.free_blocks:
        return False
    row = engine.rows[engine.row[place]]
    for index in range(held, needed):
        block = engine.newer[len(engine.users)]
        _take(engine, block)
        if engine.key[block] != NONE:
            _forget(engine, block)
        row[index] = block
    engine.held[place] = max(held, needed)
    call = engine.running[place]
    first, last = calls.offsets[call], calls.offsets[call + 1]
    full = min(tokens // engine.block_tokens, last - first)
    for index in range(engine.registered[place], full):
        _register(engine, row, index, calls.keys[first + index])
    engine.registered[place] = max(engine.registered[place], full)
    return True


@compiled
def _register(engine: Engine, row: Int32s, index: int, key: int) -> None:
    block, other = row[index], engine.holder[key]
    if other == NONE:
        engine.holder[key], engine.key[block] = block, key
    elif other != block:
        # Two calls computed the same block: the second one goes on with the first one's.
        _take(engine, other)
        row[index] = other
        engine.users[block] = 0
        _append_free(engine, block)


@compiled
def _forget(engine: Engine, block: int) -> None:
    state = engine.state[0]
    engine.holder[engine.key[block]] = NONE
    if state.evicted < len(engine.evicted):
        engine.evicted[state.evicted] = engine.key[block]
        state.evicted += 1
    engine.key[block] = NONE


@compiled
def _take(engine: Engine, block: int) -> None:
    """One more call uses the block."""
    if engine.users[block] == 0:
        newer, older = engine.newer[block], engine.older[block]
        engine.newer[older], engine.older[newer] = newer, older
        engine.newer[block] = engine.older[block] = NONE
        engine.state[0].free_blocks -= 1
    engine.users[block] += 1


@compiled
def _append_free(engine: Engine, block: int) -> None:
    end = len(engine.users)
    newest = engine.older[end]
    engine.newer[newest], engine.older[block] = block, newest
    engine.newer[block], engine.older[end] = end, block
    engine.state[0].free_blocks += 1


@compiled
def _free(engine: Engine, place: int) -> None:
    """A call's blocks return tail first, so that the tail is evicted first."""
    state, row = engine.state[0], engine.row[place]
    for index in range(engine.held[place] - 1, -1, -1):
        block = engine.rows[row, index]
        engine.users[block] -= 1
        if engine.users[block] == 0:
            _append_free(engine, block)
    engine.held[place] = engine.registered[place] = 0
    engine.free_rows[state.free_rows] = row
    state.free_rows += 1


@compiled
def cached_blocks(engine: Engine, keys: Ints) -> int:
    """How many leading keys are cached."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if engine.holder[keys[middle]] == NONE:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _unused(engine: Engine, keys: Ints) -> int:
    """How many of a cached run's blocks, its last ones, nobody runs with."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if engine.users[engine.holder[keys[middle]]] == 0:
            high = middle
        else:
            low = middle + 1
    return len(keys) - low


@compiled
def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
