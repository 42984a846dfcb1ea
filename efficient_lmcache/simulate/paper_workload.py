"""The paper's replayed workload, synthesised: agents whose published statistics are those of its 4,427 calls.

Met exactly (Section 5.1, Appendix B): tasks, calls, prompt and output tokens, the longest prompt, and both sums of
longest common prefixes. Met by the shape: range and median of calls per task, the median of an agent's own time, the
share of new KV that the next call reuses (Section 1).

Four properties follow from published sums rather than from a distribution:

    append only     If every prompt begins with the whole previous prompt, a task's last prompts sum to 147,124,984 -
                    142,541,707. What is new in last calls and what outputs lose is then the 2.7 % of new KV that is not
                    reused; no loss of earlier history is left to assume.
    lost outputs    Some 55,000 tokens of outputs, 3 %, are not in the next prompt. Assumed: some outputs are rendered
                    anew from a uniformly chosen token on (a tool call parsed and printed again), as long as before.
    shared prefix   Tiers that lose nothing stored 4.06 M tokens (Table 3), 0.48 M fewer than last prompts have in full
                    chunks: six chunks that 78 tasks find stored. They are the system prompt and the tools.
    big readers     The fixed rule at 40 GiB declined 290 requests and 20,234 chunks, 4.8 % of them never asked for
                    again, and stored 1.00 M tokens less (Table 3, Appendix D). A tier that holds the pool's contexts
                    sees more than kappa new chunks only where one turn adds them, and misses them in all later turns:
                    a few tasks read nine chunks or more at once, make 290 calls from there on and grow by 1.00 M
                    tokens. The others never read so much.

Assumed, as nothing is published: seven big readers, at random, and the order of tasks, at random but for one draw's
(`paper_order`). Shapes, not sizes, are those of mini-swe-agent's SWE-bench Verified
trajectories: log-normal observations (sigma 1.5 within a task, their sum as calls to the power 0.9) and outputs (1.2);
first prompts with log-normal tasks (0.28) of 1,800 tokens behind the shared prefix. Observations shrink or grow
exponentially over a task, at the rate that gives the published prompt tokens: they stay about level, and shrink by half
there. Each of the 115 failed calls lengthens one interval by an exponential time whose mean is an agent's cycle in the
recorded run, 46 s (Table 3).

Fitted to Table 3's rows at A = 16 without a tier and at 20 GiB (computed, restored, preemptions): tasks differ in what
they say and read by a sigma of 1.0 (0.45 there), and 99 % of an agent's own times are below 6 s (28 s there). With the
shapes' own values the GPU's cache finds 5 to 12 M tokens more than the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.simulate.paper_order import FITTED_ORDER, FITTED_SEED
from efficient_lmcache.simulate.shares import filled, rising_to, scaled, whole

SHARED_PREFIX_TOKENS = 6_208
BIG_READERS = 7
_OWN_FIRST_TOKENS = (1_100, 1_800, 2_950)  # least, mean, most; with the shared prefix less than nine chunks
_FIRST_SIGMA = 0.28
_OUTPUT_TOKENS_RANGE = (16, 6_144)
_OUTPUT_SIGMA = 1.2
_OBSERVATION_TOKENS_RANGE = (16, 20_480)
_OBSERVATION_SIGMA = 1.5
_TASK_SIGMA = 1.0
_TASK_POWER = 0.9
_FIRST_BIG_READ_TOKENS = 14_000  # at most
_INTERVAL_P99_S = 6.0
_DECAYS = (-12.0, 12.0)  # over a task, as logarithms

Bools = npt.NDArray[np.bool_]


@cache
def published() -> dict[str, Any]:
    """The paper's numbers, `paper.yaml`; not to be changed."""
    document: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("paper.yaml").read_text())
    return document


@dataclass(frozen=True, slots=True, eq=False)
class PaperCalls:
    """The calls, task after task in order of start; arrays int64 [calls] unless said otherwise.

    Attributes:
        task: 0 and up.
        prompt_tokens: n.
        output_tokens: m.
        previous_prompt_shared_tokens: longest common prefix with the task's previous prompt; 0 for its first call.
        cache_stable_tokens: the same with that prompt followed by its output.
        interval_s: float64, own time before the call; 0 for a task's first.
    """

    task: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    previous_prompt_shared_tokens: Ints
    cache_stable_tokens: Ints
    interval_s: Floats


def paper_workload(seed: int = FITTED_SEED, block_tokens: int = 16) -> References:
    """The workload in blocks, with the errors of `paper_calls` and `workload_blocks`."""
    return workload_blocks(paper_calls(seed), block_tokens)


def workload_blocks(calls: PaperCalls, block_tokens: int = 16) -> References:
    """Calls in blocks: keys go on to the full blocks that a call's output leaves behind.

    Tasks are lanes and sessions and follow one another: how their calls interleave is the closed loop's to find.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
    ends = (calls.prompt_tokens + calls.output_tokens) // block_tokens
    shared = SHARED_PREFIX_TOKENS // block_tokens
    known = np.where(_firsts(calls.task), shared, calls.cache_stable_tokens // block_tokens)
    offsets = np.concatenate(([0], np.cumsum(ends)))
    numbered = shared + np.concatenate(([0], np.cumsum(ends - known)))
    keys = np.empty(offsets[-1], np.int64)
    # The latest block at every place of the task so far; a call replaces those from where it is new.
    path = np.arange(ends.max())
    for call, (begin, end) in enumerate(zip(known.tolist(), ends.tolist(), strict=True)):
        path[begin:end] = np.arange(numbered[call], numbered[call + 1])
        keys[offsets[call] : offsets[call + 1]] = path[:end]
    return References(
        chunk_tokens=block_tokens,
        keys=keys,
        offsets=offsets,
        lookup_chunks=calls.prompt_tokens // block_tokens,
        prompt_tokens=calls.prompt_tokens,
        output_tokens=calls.output_tokens,
        lane=calls.task,
        session=calls.task,
        start_s=np.full(len(calls.task), np.nan),
        interval_s=calls.interval_s,
    )


def paper_calls(seed: int = FITTED_SEED) -> PaperCalls:
    """The calls' lengths and intervals. Every seed gives another workload of the same statistics.

    Raises:
        ValueError: the seed's draws cannot be brought to the published sums.
    """
    drawn = drawn_calls(seed)
    return in_order(drawn, FITTED_ORDER) if seed == FITTED_SEED else drawn


def in_order(calls: PaperCalls, order: Sequence[int]) -> PaperCalls:
    """The same tasks, which enter the pool in another order."""
    begins = np.searchsorted(calls.task, np.arange(len(order) + 1))
    moved = np.concatenate([np.arange(begins[task], begins[task + 1]) for task in order])
    columns = {each.name: getattr(calls, each.name)[moved] for each in fields(calls)}
    return PaperCalls(**columns | {"task": np.repeat(np.arange(len(order)), np.diff(begins)[list(order)])})


def drawn_calls(seed: int) -> PaperCalls:
    """`paper_calls` in the order in which tasks are drawn."""
    rng = np.random.default_rng(seed)
    paper = published()["workload"]
    per_task = _calls_per_task(rng)
    task = np.repeat(np.arange(len(per_task)), per_task)
    firsts, lasts = _firsts(task), _firsts(task[::-1])[::-1]
    talkative = rng.lognormal(0.0, _TASK_SIGMA, len(per_task))[task]
    outputs = scaled(
        talkative * rng.lognormal(0.0, _OUTPUT_SIGMA, len(task)), paper["output_tokens"], *_OUTPUT_TOKENS_RANGE
    )
    lost = _lost(outputs, ~lasts, int(outputs[~lasts].sum()) - _found_again_tokens(), rng)
    turns = _Turns(task, firsts, lasts, _previous(outputs, firsts), _previous(lost, firsts))
    prompts = _prompt_tokens(turns, _big_readers(per_task, rng), rng)
    before = _previous(prompts, firsts)
    if before.sum() != paper["previous_prompt_shared_tokens"]:
        raise ValueError(f"seed is {seed}; its draws cannot be brought to the published sums, another seed's can")
    return PaperCalls(
        task=task,
        prompt_tokens=prompts,
        output_tokens=outputs,
        previous_prompt_shared_tokens=before,
        cache_stable_tokens=before + turns.said - turns.lost,
        interval_s=_intervals_s(firsts, rng),
    )


class _Turns(NamedTuple):
    """What precedes every call; arrays [calls].

    Attributes:
        task: int64.
        firsts, lasts: bool, a task's first and last call.
        said: int64, the previous call's output tokens; 0 for first calls.
        lost: int64, those of them that the prompt does not contain.
    """

    task: Ints
    firsts: Bools
    lasts: Bools
    said: Ints
    lost: Ints


class _BigReaders(NamedTuple):
    """The tasks that read nine chunks or more at once; arrays int64 [big readers] unless said otherwise.

    Attributes:
        task: their numbers.
        calls: how many each makes from its first such turn on, its suffix.
        begin: the call that its suffix begins with.
        suffix: int64 [all calls]: the big reader whose suffix the call is in; -1 elsewhere.
    """

    task: Ints
    calls: Ints
    begin: Ints
    suffix: Ints


def _calls_per_task(rng: np.random.Generator) -> Ints:
    """Log-normal around the median; wider above it, where the agents' limit of iterations cuts."""
    paper = published()["workload"]
    tasks = paper["tasks"]
    median, least, most = (paper[f"calls_per_task_{each}"] for each in ("median", "least", "most"))
    normals = np.array([NormalDist().inv_cdf((place + 0.5) / tasks) for place in range(tasks)])
    below = math.log(least / median) / normals[0]

    def calls(above: float) -> Ints:
        spread = median * np.exp(np.where(normals < 0, below, above) * normals)
        return whole(spread.clip(least, most))

    above = rising_to(paper["calls"], lambda above: float(calls(above).sum()), 0.0, 2.0)
    return rng.permutation(calls(above))


def _big_readers(per_task: Ints, rng: np.random.Generator) -> _BigReaders:
    declined = published()["admission_counters"]["fixed_40_gib"]["skipped_requests"]
    task = rng.choice(len(per_task), BIG_READERS, replace=False)
    calls = scaled(per_task[task] * rng.uniform(0.3, 0.9, len(task)), declined, 8, per_task[task] - 8)
    begin = np.cumsum(per_task)[task] - calls
    suffix = np.full(per_task.sum(), -1)
    for reader, first in enumerate(begin):
        suffix[first : first + calls[reader]] = reader
    return _BigReaders(task, calls, begin, suffix)


def _lost(outputs: Ints, may_lose: Bools, total: int, rng: np.random.Generator) -> Ints:
    """What calls lose of their outputs, int64 [calls]: a uniform share of some, `total` tokens in all."""
    order = rng.permutation(np.flatnonzero(may_lose))
    losses = rng.integers(1, outputs[order], endpoint=True)
    lost = np.zeros_like(outputs)
    lost[order] = np.minimum(losses, (total - np.cumsum(losses) + losses).clip(0))
    return lost


def _prompt_tokens(turns: _Turns, readers: _BigReaders, rng: np.random.Generator) -> Ints:
    """Prompt lengths, int64 [calls]: each is the previous one, its output, and an observation.

    A task's turns are one segment, a big reader's suffix another. Their ends are drawn first, then how a segment's
    observations share what it adds.
    """
    paper, chunk = published()["workload"], published()["serving"]["chunk_tokens"]
    declined = published()["admission_counters"]["fixed_40_gib"]["skipped_chunks"]
    tasks, in_suffix = int(turns.task[-1]) + 1, readers.suffix >= 0
    segment = np.where(in_suffix, tasks + readers.suffix, turns.task)
    fixed = _first_and_last_observations(turns, rng)
    inner = ~turns.firsts & ~turns.lasts
    observed = _observed_by_segment(segment, turns.said + fixed, inner, readers, rng)
    least, most = _observation_bounds(turns, readers, rng)
    logs = _OBSERVATION_SIGMA * rng.standard_normal(len(segment))
    calls = np.bincount(turns.task)
    starts = np.repeat(np.cumsum(calls) - calls, calls)
    position = (np.arange(len(segment)) - starts) / calls[turns.task]

    def lengths(decay: float, suffix_decay: float) -> Ints:
        weights = np.exp(logs - np.where(in_suffix, suffix_decay, decay) * position)
        growth = (turns.said + fixed).astype(np.float64)
        growth[inner] += filled(weights[inner], segment[inner], observed, least[inner], most[inner])
        total = np.concatenate(([0.0], np.cumsum(growth)))
        return whole(total[1:] - total[starts])

    def declined_chunks(suffix_decay: float) -> float:
        chunks = lengths(0.0, suffix_decay) // chunk
        return float((chunks - chunks[readers.begin - 1][readers.suffix])[in_suffix].sum())

    def prompt_tokens(decay: float) -> float:
        return float(lengths(decay, suffix_decay).sum())

    suffix_decay = rising_to(declined, declined_chunks, *_DECAYS)
    prompts = lengths(rising_to(paper["prompt_tokens"], prompt_tokens, *_DECAYS), suffix_decay)
    # Lengths that round up at the same decay leave a token or two.
    left = int(paper["prompt_tokens"] - prompts.sum())
    prompts[np.flatnonzero(inner & ~in_suffix)[: abs(left)]] += np.sign(left)
    return prompts


def _first_and_last_observations(turns: _Turns, rng: np.random.Generator) -> Ints:
    """First prompts, and what is read before tasks' last calls; int64 [calls], 0 for all others."""
    paper = published()["workload"]
    least, mean, most = _OWN_FIRST_TOKENS
    tasks = int(turns.firsts.sum())
    own = scaled(rng.lognormal(0.0, _FIRST_SIGMA, tasks), mean * tasks, least, most)
    # New KV that no later call reuses: last outputs, what outputs lose, and what is new in last prompts.
    new_kv = paper["prompt_tokens"] - paper["cache_stable_tokens"] + paper["output_tokens"]
    unused = round((1 - paper["reused_share_of_new_kv"]) * new_kv)
    new_in_last = unused - (paper["output_tokens"] - _found_again_tokens())
    observations = new_in_last - int(turns.lost[turns.lasts].sum())
    fixed = np.zeros(len(turns.task), np.int64)
    fixed[turns.firsts] = SHARED_PREFIX_TOKENS + own
    fixed[turns.lasts] = scaled(
        rng.lognormal(0.0, _OBSERVATION_SIGMA, tasks), observations, _OBSERVATION_TOKENS_RANGE[0], _most_at_once() // 4
    )
    return fixed


def _observed_by_segment(
    segment: Ints, known: Ints, inner: Bools, readers: _BigReaders, rng: np.random.Generator
) -> Ints:
    """Tokens of a segment's inner observations, int64 [segments]: those of tasks, then those of suffixes.

    Args:
        segment: [calls].
        known: [calls], what each adds besides its inner observation.
        inner: [calls], whether it has one.
    """
    paper = published()["workload"]
    segments = int(segment.max()) + 1
    tasks = segments - len(readers.task)
    adds = np.bincount(segment, known, minlength=segments).astype(np.int64)
    turns = np.bincount(segment[inner], minlength=segments)[:tasks]
    suffixes = round(1e6 * (_stored_mtok_at_40_gib("none") - _stored_mtok_at_40_gib("fixed")))
    last_prompts = paper["prompt_tokens"] - paper["previous_prompt_shared_tokens"]
    of_tasks = scaled(
        turns**_TASK_POWER * rng.lognormal(0.0, _TASK_SIGMA, tasks),
        last_prompts - suffixes - int(adds[:tasks].sum()),
        2 * _OBSERVATION_TOKENS_RANGE[0] * turns,
        _most_at_once() // 4 * turns,
    )
    # The longest prompt ends the longest suffix.
    begun = (adds[:tasks] + of_tasks)[readers.task]
    grown = np.zeros_like(begun)
    longest = np.argmax(readers.calls)
    others = np.delete(np.arange(len(begun)), longest)
    grown[longest] = paper["max_prompt_tokens"] - begun[longest]
    grown[others] = scaled(
        (readers.calls * rng.lognormal(0.0, _TASK_SIGMA, len(begun)))[others],
        suffixes - int(grown[longest]),
        adds[tasks:][others] + 2 * _FIRST_BIG_READ_TOKENS,
        paper["max_prompt_tokens"] - 1 - begun[others],
    )
    return np.concatenate((of_tasks, grown - adds[tasks:]))


def _observation_bounds(turns: _Turns, readers: _BigReaders, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Fewest and most tokens of every observation, float64 [calls]: who adds more than kappa chunks, and who never."""
    fewest, largest = _OBSERVATION_TOKENS_RANGE
    added = rng.uniform(
        _most_at_once() + published()["serving"]["chunk_tokens"] + 1, _FIRST_BIG_READ_TOKENS, BIG_READERS
    )
    least = np.full(len(turns.task), float(fewest))
    least[readers.begin] = added - turns.said[readers.begin]
    # Rounding lengths can add two tokens.
    most = np.where(readers.suffix < 0, _most_at_once() - 2 - turns.said, largest)
    return least, most.astype(np.float64)


def _intervals_s(firsts: Bools, rng: np.random.Generator) -> Floats:
    paper, recorded = published()["workload"], published()["table3"][0]
    median_s = paper["median_gap_s"] / paper["median_gap_over_own_time"]
    later = np.flatnonzero(~firsts)
    failed, others = np.split(rng.permutation(later), [paper["failed_calls"]])
    intervals_s = np.zeros(len(firsts))
    sigma = math.log(_INTERVAL_P99_S / median_s) / NormalDist().inv_cdf(0.99)
    intervals_s[later] = rng.lognormal(0.0, sigma, len(later))
    # Nearly all intervals with a failed call are above the median of all, so it is a higher quantile of the others.
    intervals_s *= median_s / np.quantile(intervals_s[others], len(later) / 2 / len(others))
    cycle_s = recorded["makespan_min"] * 60 * recorded["active_pool"] / paper["calls"]
    intervals_s[failed] += rng.exponential(cycle_s, len(failed))
    return intervals_s


def _found_again_tokens() -> int:
    """Output tokens that the next prompt contains, of all calls."""
    paper = published()["workload"]
    return int(paper["cache_stable_tokens"] - paper["previous_prompt_shared_tokens"])


def _most_at_once() -> int:
    """Tokens that a turn can add without more than kappa new chunks, wherever chunks end."""
    serving = published()["serving"]
    return int(serving["write_threshold_chunks"] * serving["chunk_tokens"])


def _stored_mtok_at_40_gib(admission: str) -> float:
    rows = published()["table3"]
    return float(next(row["stored_mtok"] for row in rows if row["admission"] == admission and row["host_gib"] == 40))


def _firsts(task: Ints) -> Bools:
    return np.concatenate(([True], task[1:] != task[:-1]))


def _previous(values: Ints, firsts: Bools) -> Ints:
    """The previous call's value; 0 for a task's first call."""
    return np.where(firsts, 0, np.roll(values, 1))
