"""Synthetic agent traces, shaped by the published figures of the paper's workload.

The figures (paper, Section 5.1 and Appendix B: 79 SWE-bench Verified tasks of OpenHands with Qwen3-Coder-30B-A3B):
56.0 calls a task (median 51, range 32 to 100); mean prompt 33,234 tokens, longest 238,105; 23.2 K output tokens a
task, hence 415 a call; 98.1 % of prompt tokens cache-stable; a median of 0.64 s from a response to the next call
(Section 1: 9.0 s is 14 times the agent's own time). Assumed, because unpublished: the lengths of system prompt, issue
and observation, chosen so that mean prompt and cache-stable share come out right, and the log-normal shape of every
distribution.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

from efficient_lmcache.replay.spelling import option
from efficient_lmcache.replay.trace import MAX_VOCAB_SIZE, Call, Manifest, Tokens, TraceWriter

PAPER_TASKS = 79
PAPER_CALLS_PER_TASK = 56.0
_CALLS_RANGE = (32 / 56.0, 100 / 56.0)  # of the mean
_CALLS_MEDIAN = 51 / 56.0  # of the mean
_CALLS_SIGMA = math.sqrt(2 * math.log(56.0 / 51))  # a log-normal's mean over its median is exp(sigma^2 / 2)
_ISSUE_SIGMA = 0.5
_OUTPUT_SIGMA = 0.8
_OBSERVATION_SIGMA = 1.3  # most tool outputs are short, a few are whole files
_OBSERVATION_CAP = 25  # times the mean: agents cut what is longer
_TASK_SIGMA = 0.5  # some tasks read much more than others
_GAP_SIGMA = 1.0
_LARGEST = 10_000_000  # mean or count; far above any agent's, and its arrays still fit into memory


@dataclass(frozen=True, slots=True)
class Workload:
    """What to synthesize; the defaults are the paper's workload. Lengths are means in tokens, unless said otherwise.

    Attributes:
        system_tokens: the prefix that every task shares, exactly this long.
        max_output_tokens: no output is longer, where given.
        max_prompt_tokens: a task ends before a prompt would be longer.
        median_gap_s: the agent's own time between a response and the next call.
    """

    tasks: int = PAPER_TASKS
    calls_per_task: float = PAPER_CALLS_PER_TASK
    vocab_size: int = 16_384
    seed: int = 0
    system_tokens: int = 3_072
    issue_tokens: float = 600.0
    output_tokens: float = 415.0
    observation_tokens: float = 560.0
    max_output_tokens: int | None = None
    max_prompt_tokens: int = 238_105
    median_gap_s: float = 0.64

    def __post_init__(self) -> None:
        for name in ("tasks", "calls_per_task", "system_tokens", "issue_tokens", "output_tokens", "observation_tokens"):
            if not 1 <= getattr(self, name) <= _LARGEST:
                raise ValueError(f"{option(name)} is {getattr(self, name)}; it must be from 1 to {_LARGEST}")
        if not 2 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"--vocab is {self.vocab_size}; it must be from 2 to {MAX_VOCAB_SIZE}")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ValueError(f"--max-output is {self.max_output_tokens}; it must be at least 1")
        if self.max_prompt_tokens <= self.system_tokens:
            raise ValueError(
                f"--max-prompt is {self.max_prompt_tokens}; it must exceed --system-tokens, {self.system_tokens}"
            )
        if not (math.isfinite(self.median_gap_s) and self.median_gap_s >= 0):
            raise ValueError(f"--median-gap is {self.median_gap_s}; it must be a finite number >= 0")
        if self.seed < 0:
            raise ValueError(f"--seed is {self.seed}; it must not be negative")


def synthesize(
    path: str | os.PathLike[str], workload: Workload, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a trace of `workload` to `path`; the same workload gives the same bytes.

    Task k depends on the seed and on k alone, so that a trace of more tasks starts with the tasks of a smaller one.
    `progress` is called with (tasks written, tasks in all).
    """
    manifest = Manifest(
        vocab_size=workload.vocab_size,
        tokenizer="synthetic",
        source="synthesize",
        assumptions=(
            "token ids are uniform random; lengths and gaps are log-normal around the recorded means",
            "every prompt extends the previous prompt and output of its task",
        ),
        history=({"step": "synthesize", **asdict(workload)},),
    )
    system = np.random.default_rng([workload.seed, 0]).integers(
        workload.vocab_size, size=workload.system_tokens, dtype=np.uint32
    )
    with TraceWriter(path, manifest) as writer:
        for number in range(workload.tasks):
            task_id = f"synthetic-{number:04d}"
            writer.write_task(task_id, _task(workload, number, system))
            if progress is not None:
                progress(number + 1, workload.tasks)


def _task(workload: Workload, number: int, system: Tokens) -> Iterator[Call]:
    rng = np.random.default_rng([workload.seed, 1 + number])

    def text(length: int) -> Tokens:
        return rng.integers(workload.vocab_size, size=length, dtype=np.uint32)

    calls_normal, reads_normal = _spread_normals(workload.seed, number)
    lowest, highest = (max(1, round(share * workload.calls_per_task)) for share in _CALLS_RANGE)
    median_calls = _CALLS_MEDIAN * workload.calls_per_task
    calls = min(max(round(median_calls * math.exp(_CALLS_SIGMA * calls_normal)), lowest), highest)
    reads = workload.observation_tokens * math.exp(_TASK_SIGMA * reads_normal - _TASK_SIGMA**2 / 2)
    cap = math.ceil(_OBSERVATION_CAP * workload.observation_tokens)
    issue = min(_length(rng, workload.issue_tokens, _ISSUE_SIGMA), workload.max_prompt_tokens - len(system))
    prompt = np.concatenate((system, text(issue)))
    for turn in range(calls):
        output = text(_length(rng, workload.output_tokens, _OUTPUT_SIGMA, workload.max_output_tokens))
        interval_s = 0.0 if turn == 0 else workload.median_gap_s * rng.lognormal(0.0, _GAP_SIGMA)
        yield Call(prompt, output, float(interval_s))
        observation = text(_length(rng, reads, _OBSERVATION_SIGMA, cap))
        prompt = np.concatenate((prompt, output, observation))
        if len(prompt) > workload.max_prompt_tokens:
            return


def _spread_normals(seed: int, number: int) -> tuple[float, float]:
    """Two standard normal numbers of task `number`, spread more evenly over the tasks than independent draws.

    An additive (Kronecker) sequence of the plastic number from a random start: a trace of twenty tasks then has
    about the mean that was asked for, whatever the seed.
    """
    starts = np.random.default_rng([seed, 0]).random(2)
    shares = ((starts + number * np.array([0.7548776662466927, 0.5698402909980532])) % 1.0).clip(1e-9, 1 - 1e-9)
    first, second = (NormalDist().inv_cdf(float(share)) for share in shares)
    return first, second


def _length(rng: np.random.Generator, mean: float, sigma: float, highest: int | None = None) -> int:
    """A log-normal length of the given mean, at least 1."""
    length = max(1, round(mean * rng.lognormal(-sigma * sigma / 2, sigma)))
    return length if highest is None else min(length, highest)
