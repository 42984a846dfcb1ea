"""Engines, compiled: vLLM's scheduler and its paged KV cache, one iteration after the other.

    block       KV of `block_tokens` tokens; full ones have a key that identifies all tokens up to their end
    holder      the block that holds a key; a key has one at most (vLLM keeps duplicates until one is evicted)
    free list   blocks that nobody runs with, in the order in which they are taken: those without a key, then the prefix
                cache, least recently used first (vLLM 0.13: both in one order of use)
    row         one running call's block table

A call's blocks return to the free list tail first, so a block never outlives its predecessor there: what is cached of a
prompt is a leading run, found by bisection. A kernel calls compiled functions of its own file only.
"""

from __future__ import annotations

import numpy as np

from efficient_lmcache.core._compiled import compiled_in_place, compiled_part
from efficient_lmcache.core.references import Ints
from efficient_lmcache.simulate._engine_state import (
    LOOKUP,
    NONE,
    NOTHING,
    STEPPED,
    STUCK,
    Calls,
    Engine,
    Int32s,
    Records,
    StepCosts,
)


@compiled_in_place
def advance(engines: Engine, calls: Calls, costs: StepCosts, until_s: float) -> tuple[int, int]:
    """Plan and end engines' steps in the order of time, until one of these turns needs the caller.

    Returns:
        The engine, and what for: STUCK (nothing runs, and the first waiting call does not fit), LOOKUP (`state.call`
        waits for its `host_tokens`) or STEPPED (a step ended that finished calls or continued prompts, or the list of
        evicted keys is half full). NONE and NOTHING when every engine is idle or has no turn before `until_s`.
    """
    while True:
        number = _next(engines.state, until_s)
        if number == NONE:
            return NONE, NOTHING
        stop = _turn(_of(engines, number), calls, costs)
        if stop != NOTHING:
            return number, stop


def engine_of(engines: Engine, number: int) -> Engine:
    """One of several engines: views of its own."""
    state = engines.state[number]
    blocks, seqs = state["gpu_blocks"], state["max_num_seqs"]
    return Engine(
        engines.state[number : number + 1],
        engines.blocks[number, : blocks + 1],
        engines.holder[number],
        engines.rows[number],
        engines.free_rows[number],
        engines.places[number, :seqs],
        engines.planned[number],
        engines.flight[number],
        engines.finished[number],
        engines.filled[number],
        engines.evicted[number],
        engines.block_tokens,
    )


_of = compiled_part(engine_of)


@compiled_part
def _next(states: Records, until_s: float) -> int:
    """The engine amid a plan, if one is; else of those with calls the one whose turn is first and before `until_s`."""
    found, first_s = NONE, until_s
    for number in range(len(states)):
        state = states[number]
        if state.amid_plan:
            return number
        turn_s = state.end_s if state.awaits_end else state.clock_s
        if turn_s < first_s and (state.running or state.waiting):
            found, first_s = number, turn_s
    return found


@compiled_part
def _turn(engine: Engine, calls: Calls, costs: StepCosts) -> int:
    """A step's end, or else a step's plan or what is left of it after a lookup."""
    state = engine.state[0]
    if state.awaits_end:
        return _end(engine, calls, costs)
    if not state.amid_plan:
        state.budget_tokens = state.max_batched_tokens
        state.preempted = state.restores = state.restored_tokens = 0
        _schedule_running(engine, calls)
        state.amid_plan = True
    call = _admit_waiting(engine, calls)
    if call != NONE:
        state.call = call
        return LOOKUP
    state.amid_plan = False
    _plan(engine, calls)
    state.awaits_end = state.in_flight > 0 or not state.plans_ahead
    if state.in_flight == 0:
        if state.planned == 0:
            return STUCK
        _launch(engine, calls, costs)
    return NOTHING


@compiled_part
def _end(engine: Engine, calls: Calls, costs: StepCosts) -> int:
    """The step in flight ends, and the one that was planned ahead begins."""
    state = engine.state[0]
    state.awaits_end = False
    state.finished = state.filled = 0
    _complete(engine, calls)
    if state.planned:
        _launch(engine, calls, costs)
    if state.finished or state.filled or 2 * state.evicted > len(engine.evicted):
        return STEPPED
    return NOTHING


@compiled_part
def _schedule_running(engine: Engine, calls: Calls) -> None:
    """Running calls first, in order; for want of blocks the last one is preempted, if need be the asking one."""
    state = engine.state[0]
    place = 0
    while place < state.running and state.budget_tokens > 0:
        call = engine.places[place].call
        produced = calls.produced_tokens[call] + calls.pending_tokens[call]
        if produced == calls.output_tokens[call]:
            place += 1
            continue
        known = calls.computed_tokens[call]
        new = min(calls.prompt_tokens[call] + produced - known, state.budget_tokens)
        while not (_has(engine, place, known + new) or _allocate(engine, calls, place, known + new)):
            _preempt_last(engine, calls)
            if state.running <= place:
                return
        engine.places[place].scheduled = new
        state.budget_tokens -= new
        place += 1


@compiled_part
def _preempt_last(engine: Engine, calls: Calls) -> None:
    state = engine.state[0]
    place = state.running - 1
    call = engine.places[place].call
    _free(engine, place)
    state.running = place
    # What of it is in flight is lost.
    for entry in range(state.in_flight):
        if engine.flight[entry].call == call:
            engine.flight[entry].call = NONE
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


@compiled_part
def _admit_waiting(engine: Engine, calls: Calls) -> int:
    """Waiting calls, first come first served, unless this step preempted one. Returns a call that must be looked up."""
    state = engine.state[0]
    while state.waiting and state.budget_tokens > 0 and state.running < len(engine.places) and not state.preempted:
        call = state.first_waiting
        if calls.host_tokens[call] == NONE:
            return int(call)
        if not _admit(engine, calls, call):
            break
        state.first_waiting = calls.next_waiting[call]
        state.waiting -= 1
    return NONE


@compiled_part
def _admit(engine: Engine, calls: Calls, call: int) -> bool:
    """Give a call its cached blocks and those of its first step; False if they do not fit."""
    state, block_tokens = engine.state[0], engine.block_tokens
    total = calls.prompt_tokens[call] + calls.produced_tokens[call]
    keys = calls.keys[calls.offsets[call] : calls.offsets[call + 1]]
    found = cached_blocks(engine.holder, keys[: (total - 1) // block_tokens])
    # The last token is always computed: its logits are what the call is for.
    restored = max(min(calls.host_tokens[call], total - 1) - found * block_tokens, 0)
    known = found * block_tokens + restored
    new = min(total - known, state.budget_tokens)
    must_fit = total if state.reserves_prompt else known + new
    needed = -(-must_fit // block_tokens) - found + _unused(engine, keys[:found])
    if needed > state.free_blocks:
        return False
    state.free_rows -= 1
    row = engine.free_rows[state.free_rows]
    for index in range(found):
        block = engine.holder[keys[index]]
        _take(engine, block)
        engine.rows[row, index] = block
    place = engine.places[state.running]
    place.call, place.row, place.scheduled = call, row, new
    place.held = place.registered = found
    _allocate(engine, calls, state.running, known + new)
    state.running += 1
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


@compiled_part
def _plan(engine: Engine, calls: Calls) -> None:
    """What was scheduled counts as computed from now on."""
    state, planned = engine.state[0], 0
    for place in range(state.running):
        call, new = engine.places[place].call, engine.places[place].scheduled
        if new == 0:
            continue
        engine.places[place].scheduled = 0
        known = calls.computed_tokens[call]
        work = engine.planned[planned]
        work.call, work.new, work.known = call, new, known
        planned += 1
        calls.computed_tokens[call] = known + new
        if known + new == calls.prompt_tokens[call] + calls.produced_tokens[call] + calls.pending_tokens[call]:
            calls.pending_tokens[call] += 1
    state.planned = planned


@compiled_part
def _launch(engine: Engine, calls: Calls, costs: StepCosts) -> None:
    """The planned step begins; what it computes is computed, even for a call that is preempted meanwhile."""
    state = engine.state[0]
    tokens = pairs = contexts = 0
    for entry in range(state.planned):
        work = engine.planned[entry]
        new, known = work.new, work.known
        engine.flight[entry] = work
        prompt_left = calls.prompt_tokens[work.call] - known
        state.prefilled_tokens += max(min(new, prompt_left), 0)
        tokens += new
        pairs += new * known + new * (new + 1) // 2
        contexts += known + new
    compute_s = tokens * costs.token_s + pairs * costs.pair_s
    experts = 1.0 - (1.0 - costs.expert_share) ** tokens
    memory_s = costs.dense_s + costs.experts_s * experts + contexts * costs.context_s
    restores_s = state.restores * costs.restore_s + state.restored_tokens * costs.restored_token_s
    step_s = costs.step_s + state.planned * costs.sequence_s + max(compute_s, memory_s) + restores_s
    state.in_flight, state.planned = state.planned, 0
    state.end_s = state.clock_s + step_s
    state.busy_s += step_s
    state.steps += 1


@compiled_part
def _complete(engine: Engine, calls: Calls) -> None:
    """The step in flight ends; calls with their last token leave."""
    state = engine.state[0]
    state.clock_s = state.end_s
    for entry in range(state.in_flight):
        work = engine.flight[entry]
        call, new, known = work.call, work.new, work.known
        if call == NONE:
            continue
        prompt_tokens = calls.prompt_tokens[call]
        if known < prompt_tokens:
            filled = engine.filled[state.filled]
            filled.call, filled.tokens = call, known + new
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
    state.in_flight = 0
    if state.finished:
        _leave(engine, calls)


@compiled_part
def _leave(engine: Engine, calls: Calls) -> None:
    state, kept = engine.state[0], 0
    for place in range(state.running):
        call = engine.places[place].call
        if calls.produced_tokens[call] == calls.output_tokens[call]:
            _free(engine, place)
        else:
            engine.places[kept] = engine.places[place]
            kept += 1
    state.running = kept


@compiled_part
def _has(engine: Engine, place: int, tokens: int) -> bool:
    """Whether so many tokens need no further block, and fill none that was not offered to the prefix cache."""
    holds = engine.places[place]
    return bool(tokens <= holds.held * engine.block_tokens and tokens < (holds.registered + 1) * engine.block_tokens)


@compiled_part
def _allocate(engine: Engine, calls: Calls, place: int, tokens: int) -> bool:
    """Blocks for so many tokens of a running call, full ones into the prefix cache; False if too few are free."""
    holds = engine.places[place]
    needed = -(-tokens // engine.block_tokens)
    if needed - holds.held > engine.state[0].free_blocks:
        return False
    row = engine.rows[holds.row]
    for index in range(holds.held, needed):
        block = engine.blocks[len(engine.blocks) - 1].newer
        _take(engine, block)
        if engine.blocks[block].key != NONE:
            _forget(engine, block)
        row[index] = block
    holds.held = max(holds.held, needed)
    first, last = calls.offsets[holds.call], calls.offsets[holds.call + 1]
    full = min(tokens // engine.block_tokens, last - first)
    for index in range(holds.registered, full):
        _register(engine, row, index, calls.keys[first + index])
    holds.registered = max(holds.registered, full)
    return True


@compiled_part
def _register(engine: Engine, row: Int32s, index: int, key: int) -> None:
    block, other = row[index], engine.holder[key]
    if other == NONE:
        engine.holder[key], engine.blocks[block].key = block, key
    elif other != block:
        # Two calls computed the same block: the second one goes on with the first one's.
        _take(engine, other)
        row[index] = other
        engine.blocks[block].users = 0
        _put_back(engine, block)


@compiled_part
def _forget(engine: Engine, block: int) -> None:
    state, key = engine.state[0], engine.blocks[block].key
    engine.holder[key] = NONE
    if state.evicted < len(engine.evicted):
        engine.evicted[state.evicted] = key
        state.evicted += 1
    engine.blocks[block].key = NONE


@compiled_part
def _take(engine: Engine, block: int) -> None:
    """One more call uses the block."""
    taken = engine.blocks[block]
    if taken.users == 0:
        engine.blocks[taken.older].newer, engine.blocks[taken.newer].older = taken.newer, taken.older
        taken.newer = taken.older = NONE
        engine.state[0].free_blocks -= 1
    taken.users += 1


@compiled_part
def _put_back(engine: Engine, block: int) -> None:
    """Nobody runs with the block any more. One without a key is of use to nobody: vLLM takes it before all others."""
    blocks, end = engine.blocks, len(engine.blocks) - 1
    first = engine.state[0].keyless_first and blocks[block].key == NONE
    older = end if first else blocks[end].older
    newer = blocks[older].newer
    blocks[older].newer = blocks[newer].older = block
    blocks[block].older, blocks[block].newer = older, newer
    engine.state[0].free_blocks += 1


@compiled_part
def _free(engine: Engine, place: int) -> None:
    """A call's blocks return tail first, so that the tail is evicted first."""
    state, left = engine.state[0], engine.places[place]
    for index in range(left.held - 1, -1, -1):
        block = engine.rows[left.row, index]
        engine.blocks[block].users -= 1
        if engine.blocks[block].users == 0:
            _put_back(engine, block)
    engine.free_rows[state.free_rows] = left.row
    state.free_rows += 1


@compiled_in_place
def cached_blocks(holder: Int32s, keys: Ints) -> int:
    """How many leading keys an engine's cache holds."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if holder[keys[middle]] == NONE:
            high = middle
        else:
            low = middle + 1
    return low


@compiled_part
def _unused(engine: Engine, keys: Ints) -> int:
    """How many of a cached run's blocks, its last ones, nobody runs with."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if engine.blocks[engine.holder[keys[middle]]].users == 0:
            high = middle
        else:
            low = middle + 1
    return len(keys) - low
