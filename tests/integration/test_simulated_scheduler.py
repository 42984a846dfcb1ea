"""The simulator's engine does to every call what vLLM's own scheduler does to it, step for step."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")
pytest.importorskip("numba", reason="needs the extra sizing")

from vllm_scheduler import Call, ClosedLoop, FixedConnector, Seen, new_scheduler

from efficient_lmcache.core.references import Ints, References
from efficient_lmcache.simulate._engine_state import StepCosts
from efficient_lmcache.simulate.costs import Costs
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.simulation import Pool, Simulation
from efficient_lmcache.sizing.workload import Workload

pytestmark = pytest.mark.integration

WORKLOADS = 80
A_SECOND_A_STEP = Costs(StepCosts(1, 0, 0, 0, 0, 0, 1, 0, 0, 0))


class FixedTier:
    """Holds of every call what it is told."""

    stored_tokens = 0

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        return self._calls[call].host_tokens

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        return 0

    def evicted(self, blocks: Ints, now_s: float) -> int:
        return 0


def agents(rng: random.Random, block_tokens: int) -> list[Call]:
    """Lanes whose prompts extend the last prompt and output, now and then rewritten, behind a shared beginning."""
    fresh = count(1)

    def tokens(number: int) -> list[int]:
        return [next(fresh) for _ in range(number)]

    longest, shared = rng.choice([6, 20, 30]), tokens(rng.choice([0, 3, 17]))
    calls = []
    for lane in range(rng.randint(2, 7)):
        context = list(shared)
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.15 and len(context) > 2:
                context = context[: rng.randrange(1, len(context))]
            whole_blocks = block_tokens * rng.randint(1, max(1, longest // block_tokens))
            context = context + tokens(rng.choice([rng.randint(1, longest), whole_blocks]))
            output = tokens(rng.choice([1, rng.randint(1, 12)]))
            chunk_tokens = 2 * block_tokens
            held = chunk_tokens * rng.randint(0, len(context) // chunk_tokens) if rng.random() < 0.5 else 0
            calls.append(Call(lane, context, output, rng.choice([0.0, 0.5, 1.0, 7.3]), held))
            context = context + output
    return calls


def settings(rng: random.Random, calls: list[Call], block_tokens: int, plans_ahead: bool) -> EngineSettings:
    """Caches that hold the longest call and hardly more."""
    longest = max(-(-(len(call.prompt) + len(call.output) - 1) // block_tokens) for call in calls)
    step_tokens = rng.choice([1, 2, 3, 7, 8, 16, 64])
    return EngineSettings(
        gpu_kv_tokens=(longest + 1 + rng.choice([0, 0, 0, 1, 2, 3, 6, 20])) * block_tokens,
        max_num_seqs=min(rng.choice([1, 2, 3, 6]), step_tokens),
        max_batched_tokens=step_tokens,
        reserves_prompt=rng.random() < 0.5,
        plans_ahead=plans_ahead,
    )


def workload_of(calls: list[Call], block_tokens: int) -> Workload:
    numbers: dict[tuple[int, ...], int] = {}
    keys: list[int] = []
    offsets = [0]
    for call in calls:
        known = (*call.prompt, *call.output[:-1])
        for end in range(block_tokens, len(known) + 1, block_tokens):
            keys.append(numbers.setdefault(known[:end], len(numbers)))
        offsets.append(len(keys))
    lanes, prompts, outputs, pauses_s = (
        np.array([value(call) for call in calls])
        for value in (
            lambda call: call.lane,
            lambda call: len(call.prompt),
            lambda call: len(call.output),
            lambda call: call.pause_s,
        )
    )
    references = References(
        chunk_tokens=block_tokens,
        keys=np.array(keys, np.int64),
        offsets=np.array(offsets, np.int64),
        lookup_chunks=prompts // block_tokens,
        prompt_tokens=prompts,
        output_tokens=outputs,
        lane=lanes,
        session=lanes,
        start_s=np.full(len(calls), np.nan),
        interval_s=pauses_s,
    )
    return Workload.of(references, 2 * block_tokens, gpu_block_tokens=block_tokens)


def simulated(calls: list[Call], engine: EngineSettings, block_tokens: int, active_pool: int) -> list[Seen]:
    workload = workload_of(calls, block_tokens)
    made = Simulation(workload, Pool(active_pool), [engine], [FixedTier(calls)], A_SECOND_A_STEP).run().calls
    columns = (
        made.admitted_s,
        made.first_token_s,
        made.finished_s,
        made.gpu_tokens + made.restored_tokens,
        made.preemptions,
    )
    return [Seen(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@pytest.mark.parametrize("plans_ahead", [True, False])
def test_every_call_is_admitted_preempted_and_answered_as_by_vllm(small_model, plans_ahead):
    preemptions = 0
    for seed in range(WORKLOADS):
        rng = random.Random(seed)
        block_tokens, active_pool = rng.choice([2, 4, 8]), rng.randint(2, 8)
        calls = agents(rng, block_tokens)
        engine = settings(rng, calls, block_tokens, plans_ahead)
        scheduler = new_scheduler(small_model, engine, block_tokens, FixedConnector(calls))
        real = ClosedLoop(scheduler, calls, engine, block_tokens, active_pool).run()
        assert simulated(calls, engine, block_tokens, active_pool) == real, (seed, engine)
        preemptions += sum(each.preemptions for each in real)
    assert preemptions >= 5
