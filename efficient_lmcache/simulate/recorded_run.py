"""A replay's run directory, as far as a simulation can repeat the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints
from efficient_lmcache.replay.run_fields import OptionFields
from efficient_lmcache.replay.rundir import RunDirectory, RunDirectoryError, read_record, run_directories
from efficient_lmcache.replay.shapes import Count, Number, Shape
from efficient_lmcache.replay.stored import read_rows
from efficient_lmcache.simulate.costs import ModelShape, costs
from efficient_lmcache.simulate.deployment import RECOMPUTE, Configuration, Deployment
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.profiles import Profile
from efficient_lmcache.simulate.simulation import Pool
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload

# vLLM's own defaults for its API server, on CPUs and on GPUs of 70 GiB and more (vllm/engine/arg_utils.py).
_CPU_BATCHED_TOKENS, _GPU_BATCHED_TOKENS = 2048, 8192


class _Sent(Shape):
    """What is read of a row of calls.jsonl."""

    task: str
    call: Count
    dispatched_s: Number | None
    finished_s: Number | None
    cached_tokens: Count | None


class _Matched(Shape):
    """What is read of a row of decisions.jsonl."""

    task: str
    host_match_tokens: Count
    now_s: Number


class RecordedCalls(NamedTuple):
    """What the run's rows say of its calls; arrays [calls], seconds since the run's start.

    Attributes:
        sent_s: float64.
        reached_s: float64, when the engine looked the call up; when it was sent, if nobody noted that.
        finished_s: float64.
        cached_tokens: int64, that the server did not compute.
        host_match_tokens: int64; -1 where nobody noted them.
    """

    sent_s: Floats
    reached_s: Floats
    finished_s: Floats
    cached_tokens: Ints
    host_match_tokens: Ints


class RecordedRun(NamedTuple):
    """A complete run of one engine in in-process mode.

    Attributes:
        record: run.json's.
        options: the replay's.
    """

    path: Path
    record: dict[str, Any]
    options: OptionFields

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a chunk and of a GPU block."""
        return self.options.chunk_tokens, self.options.block_tokens

    @property
    def configuration(self) -> Configuration:
        """Its tier and what may enter it."""
        name, options = self.record["admission"], self.options
        names = ("write_threshold_chunks", "occupancy_threshold", "activity_window_s")
        # 0 is a value, None the default's place.
        given = {key: value for key in names if (value := getattr(options, key)) is not None}
        admission = Admission("none" if name == RECOMPUTE else name, **given)
        return Configuration(self.record["host_gib_per_rank"], admission)

    def deployment(self, profile: Profile, shape: ModelShape) -> Deployment:
        """Its engine and pool on such hardware with such a model."""
        options, ranks = self.options, self.options.tensor_parallel
        on_cpu = "+cpu" in self.record["versions"].get("torch", "")
        engine = EngineSettings(
            gpu_kv_tokens=self.record["gpu_kv_tokens"],
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_num_batched_tokens
            or (_CPU_BATCHED_TOKENS if on_cpu else _GPU_BATCHED_TOKENS),
            plans_ahead=profile.async_scheduling,
        )
        return Deployment(
            engine,
            costs(profile, shape, ranks),
            shape.footprint.bytes_per_token_per_rank(ranks),
            Pool(self.record["active_pool"], options.time_scale),
        )

    def calls(self, workload: Workload) -> RecordedCalls:
        """Its calls, in the order of the workload's.

        Raises:
            RunDirectoryError: the run is of another trace, or a row of its files is not as it must be.
        """
        numbers = self._call_numbers(workload)
        count = len(workload.chunks)
        sent_s, finished_s, looked_up_s = np.zeros(count), np.zeros(count), np.full(count, math.nan)
        cached, matched = np.zeros(count, np.int64), np.full(count, -1)
        for row in read_rows(RunDirectory(self.path).calls, _Sent, RunDirectoryError):
            call = self._call(numbers, row["task"], row["call"])
            sent_s[call], finished_s[call] = row["dispatched_s"] or 0.0, row["finished_s"] or 0.0
            cached[call] = row["cached_tokens"] or 0
        for call, row in self.decisions(workload):
            looked_up_s[call], matched[call] = row["now_s"], row["host_match_tokens"]
        return RecordedCalls(sent_s, _reached_s(sent_s, looked_up_s), finished_s, cached, matched)

    def decisions(self, workload: Workload) -> Iterator[tuple[int, dict[str, Any]]]:
        """The decision log's rows, each with its call: a task's decisions are on its calls, one after the other."""
        numbers = self._call_numbers(workload)
        seen: Counter[str] = Counter()
        for row in read_rows(RunDirectory(self.path).decisions, _Matched, RunDirectoryError):
            yield self._call(numbers, row["task"], seen[row["task"]]), row
            seen[row["task"]] += 1

    def _call_numbers(self, workload: Workload) -> dict[str, Ints]:
        """Each task's calls in the workload's numbering."""
        calls, prompt_tokens = len(workload.chunks), int(workload.chunks.prompt_tokens.sum())
        trace = self.record["trace"]
        if (trace["calls"], trace["prompt_tokens"]) != (calls, prompt_tokens):
            raise RunDirectoryError(
                f"{self.path}: is a run of {trace['calls']} calls with {trace['prompt_tokens']} prompt tokens; "
                f"{workload.name} has {calls} with {prompt_tokens}; give the run's own trace"
            )
        return {name: np.flatnonzero(workload.chunks.lane == lane) for lane, name in enumerate(workload.lanes)}

    def _call(self, numbers: dict[str, Ints], task: str, number: int) -> int:
        """A task's call in the workload's numbering."""
        if number >= len(numbers.get(task, ())):
            raise RunDirectoryError(
                f"{self.path}: has a call {number} of task {task!r}, which the trace lacks; give the run's own trace, "
                "and a run with labelled tasks"
            )
        return int(numbers[task][number])


def recorded_runs(path: Path) -> list[RecordedRun]:
    """A run, or the complete ones of a sweep or of a directory of runs.

    Raises:
        RunDirectoryError: one cannot be read, is of a kind that is not modelled here, or was named and is not complete.
    """
    records = {run: read_record(run) for run in run_directories(path)}
    return [_checked(run, record) for run, record in records.items() if run == path or record["status"] == "complete"]


def _checked(path: Path, record: dict[str, Any]) -> RecordedRun:
    options = OptionFields.model_validate(record["options"])
    for wrong, what in (
        (record["status"] != "complete", f"is {record['status']}, not complete"),
        (record["answered"] != record["calls"], f"answered {record['answered']} of {record['calls']} calls"),
        (record["mode"] != "in_process", f"has its tier in mode {record['mode']}"),
        (options.engines != 1, f"has {options.engines} engines"),
        (options.link_gb_s, "has a store behind a link"),
        (record["gpu_kv_tokens"] is None, "does not say how many tokens the GPU's KV cache holds"),
    ):
        if wrong:
            raise RunDirectoryError(
                f"{path}: {what}; what is simulated again are complete runs of one engine in in-process mode, "
                "without a link"
            )
    return RecordedRun(path, record, options)


def _reached_s(sent_s: Floats, looked_up_s: Floats) -> Floats:
    since_sent_s = looked_up_s - sent_s
    if np.isnan(since_sent_s).all():
        return sent_s
    # Two clocks: the call that was looked up soonest was looked up at once.
    return np.where(np.isnan(since_sent_s), sent_s, looked_up_s - np.nanmin(since_sent_s))
