"""Agents for the simulator's tests: prompts that grow by what was answered and observed."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from efficient_lmcache.core.references import References
from efficient_lmcache.simulate._engine_state import StepCosts
from efficient_lmcache.simulate.costs import Costs
from efficient_lmcache.simulate.deployment import Deployment
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.simulation import Pool
from efficient_lmcache.sizing.workload import Workload

BLOCK, CHUNK, BETA = 4, 8, 2
FREE = StepCosts(0, 0, 0, 0, 0, 0, 1, 0, 0, 0)
COSTS = Costs(
    FREE._replace(step_s=0.01, sequence_s=0.001, token_s=1e-3, pair_s=1e-6, restored_token_s=1e-4), 1e-3, 1e-4
)

#: Each task's calls: (tokens that its prompt adds, output tokens).
Tasks = list[list[tuple[int, int]]]
any_tasks = st.lists(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=5), min_size=1)


def agents(tasks: Tasks, interval_s: float = 0.5, shared_blocks: int = 1) -> Workload:
    """Every prompt extends its task's previous prompt and output; all begin with the same blocks.

    A call's keys are blocks of prompt and output; a task's own blocks are numbered one after the other.
    """
    keys: list[np.ndarray] = []
    rows: list[tuple[int, int, int, float]] = []
    unused = shared_blocks
    for task, calls in enumerate(tasks):
        path: list[int] = list(range(shared_blocks))
        length = shared_blocks * BLOCK
        for number, (added, output_tokens) in enumerate(calls):
            prompt_tokens = length + added
            length = prompt_tokens + output_tokens
            while len(path) < length // BLOCK:
                path.append(unused)
                unused += 1
            keys.append(np.array(path, np.int64))
            rows.append((task, prompt_tokens, output_tokens, interval_s if number else 0.0))
    task_of, prompts, outputs, intervals = (np.array(column) for column in zip(*rows, strict=True))
    references = References(
        chunk_tokens=BLOCK,
        keys=np.concatenate(keys),
        offsets=np.concatenate(([0], np.cumsum([len(path) for path in keys]))).astype(np.int64),
        lookup_chunks=prompts // BLOCK,
        prompt_tokens=prompts,
        output_tokens=outputs,
        lane=task_of,
        session=task_of,
        start_s=np.full(len(prompts), np.nan),
        interval_s=intervals.astype(np.float64),
    )
    return Workload.of(references, CHUNK, gpu_block_tokens=BLOCK)


def longest_call_tokens(workload: Workload) -> int:
    return int((workload.blocks.prompt_tokens + workload.blocks.output_tokens).max())


def deployment(
    workload: Workload,
    *,
    spare_tokens: int = 0,
    active_pool: int = 4,
    max_num_seqs: int = 3,
    max_batched_tokens: int = 16,
    reserves_prompt: bool = True,
    engines: int = 1,
    route: str = "load",
    shared_tier: bool = False,
) -> Deployment:
    """Engines whose cache holds the longest call and `spare_tokens` more."""
    gpu_kv_tokens = longest_call_tokens(workload) + spare_tokens + 2 * BLOCK
    return Deployment(
        EngineSettings(gpu_kv_tokens, max_num_seqs, max_batched_tokens, reserves_prompt),
        COSTS,
        BETA,
        Pool(active_pool),
        engines,
        route,
        shared_tier,
    )


def host_gib(chunks: int) -> float:
    """A tier of so many chunks."""
    return chunks * CHUNK * BETA / (1 << 30)
