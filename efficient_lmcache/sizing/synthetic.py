"""A pool without a recording: agents of the shape of the paper's workload, scaled to a mean prompt.

From Section 5.1 and Appendix B: 56 calls a task (median 51, 32 to 100), mean prompt 33,234 tokens, outputs of 415, 98.1
% of prompt tokens cache-stable, a median of 0.64 s from a response to the next call. Mean prompt and stable share give
the two lengths that are unpublished: a task's first prompt and what its tools add per call. All lengths scale with the
mean prompt. Assumed: tasks share nothing, prompts only grow, and log-normal spreads of calls, of what tasks read, and
of pauses. Pauses have a mean of 9 s: at 20 GiB (Table 3) an agent makes a call every 28 s, and 415 output tokens do not
take all of that.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.sizing.workload import VLLM_BLOCK_TOKENS, Workload

CALLS_PER_TASK = 56.0
CACHE_STABLE_SHARE = 0.981
_MEDIAN_CALLS = 51.0
_CALLS_RANGE = (32, 100)
_MEAN_PROMPT_TOKENS = 33_234
_OUTPUT_TOKENS = 415
_MEDIAN_INTERVAL_S = 0.64
_INTERVAL_SIGMA = 2.3
_TASK_SIGMA = 0.5  # some tasks read much more than others
_CALLS_SIGMA = math.sqrt(2 * math.log(CALLS_PER_TASK / _MEDIAN_CALLS))
_SEED = 0
_TASKS_PER_AGENT = (2, 5)
_ENOUGH_TASKS = 80
_MOST_REFERENCES = 100_000_000  # a few GiB
NOTE = (
    "assumed, as there is no recording: agents shaped by the paper's published figures, scaled to the mean prompt "
    f"({CALLS_PER_TASK:.0f} calls a task, {CACHE_STABLE_SHARE:.0%} of prompt tokens cache-stable, tasks share nothing)"
)


def synthetic_workload(mean_prompt_tokens: float, active_pool: int, chunk_tokens: int) -> Workload:
    """The same arguments give the same workload: two to five tasks for each of A agents, mean prompt N.

    Args:
        mean_prompt_tokens: N, at least 100.
        active_pool: A, at least 1.
    """
    if not 100 <= mean_prompt_tokens < 1e8:
        raise ValueError(f"--mean-prompt-tokens is {mean_prompt_tokens:g}; it must be from 100 to 100,000,000")
    if active_pool < 1:
        raise ValueError(f"--active-pool is {active_pool}; it must be at least 1")
    fewest, most = (share * active_pool for share in _TASKS_PER_AGENT)
    tasks = max(fewest, min(most, _ENOUGH_TASKS))
    block_tokens = math.gcd(chunk_tokens, 8 * VLLM_BLOCK_TOKENS)
    if (count := tasks * CALLS_PER_TASK * mean_prompt_tokens / block_tokens) > _MOST_REFERENCES:
        raise ValueError(
            f"--active-pool {active_pool} and --mean-prompt-tokens {mean_prompt_tokens:g} in blocks of {block_tokens} "
            f"(what --chunk-tokens {chunk_tokens} and 128 share) make {count:,.0f} block references; without a "
            f"trace at most {_MOST_REFERENCES:,} are simulated"
        )
    rng = np.random.default_rng(_SEED)
    calls = np.rint(_MEDIAN_CALLS * np.exp(_CALLS_SIGMA * _normals(tasks, rng))).clip(*_CALLS_RANGE).astype(np.int64)
    reads = np.exp(_TASK_SIGMA * _normals(tasks, rng))
    output_tokens = max(1, round(_OUTPUT_TOKENS * mean_prompt_tokens / _MEAN_PROMPT_TOKENS))
    prompts = _prompt_tokens(mean_prompt_tokens, calls, reads)
    intervals_s = _MEDIAN_INTERVAL_S * rng.lognormal(0, _INTERVAL_SIGMA, calls.sum())
    intervals_s[np.cumsum(calls) - calls] = 0.0
    references = _grow(prompts, calls, output_tokens, intervals_s, block_tokens)
    return Workload.of(references, chunk_tokens, "synthetic", (NOTE,))


def _normals(tasks: int, rng: np.random.Generator) -> Floats:
    """Standard normal numbers at even quantiles, shuffled: few tasks then have the shape of many."""
    normal = NormalDist()
    return rng.permutation([normal.inv_cdf((task + 0.5) / tasks) for task in range(tasks)])


def _prompt_tokens(mean: float, calls: Ints, reads: Floats) -> Ints:
    """Every call's prompt length: linear growth whose mean and new share are the published ones; int64 [calls]."""
    turns = CALLS_PER_TASK - 1
    output = _OUTPUT_TOKENS / _MEAN_PROMPT_TOKENS
    # First prompt p and observation o in mean prompts: p + turns o is what is new in a task, p + turns (o + output) / 2
    # its mean prompt.
    new = (1 - CACHE_STABLE_SHARE) * CALLS_PER_TASK
    observation = 2 * (new - 1) / turns + output
    first = new - turns * observation
    turn = np.arange(calls.sum()) - np.repeat(np.cumsum(calls) - calls, calls)
    heard = first + turn * np.repeat(reads, calls) * observation
    said = turn * output
    heard *= (1 - said.mean()) / heard.mean()
    lengths: Ints = np.maximum(np.rint(mean * (heard + said)), 1).astype(np.int64)
    return lengths


def _grow(prompt_tokens: Ints, calls: Ints, output_tokens: int, intervals_s: Floats, block_tokens: int) -> References:
    """References of tasks that only append; blocks are named by task and place."""
    task = np.repeat(np.arange(len(calls)), calls)
    lookup = prompt_tokens // block_tokens
    lengths = (prompt_tokens + output_tokens) // block_tokens
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    longest = np.maximum.reduceat(lengths, np.cumsum(calls) - calls)
    starts = np.repeat(np.cumsum(longest) - longest, calls)
    keys = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, lengths)
    return References(
        chunk_tokens=block_tokens,
        keys=keys,
        offsets=offsets,
        lookup_chunks=lookup,
        prompt_tokens=prompt_tokens,
        output_tokens=np.full(len(task), output_tokens, np.int64),
        lane=task,
        session=task,
        start_s=np.full(len(task), np.nan),
        interval_s=intervals_s,
    )
