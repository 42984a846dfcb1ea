"""A simulation of a real run, held against what the run measured.

Twice: in a closed loop of its own, where every difference in time changes who meets whom in the caches; and with each
call sent when the run sent it, which leaves the caches' behaviour alone to differ.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from efficient_lmcache.core.footprint import KVFootprint
from efficient_lmcache.core.references import Floats, Ints
from efficient_lmcache.replay.run_fields import OptionFields
from efficient_lmcache.replay.rundir import RunDirectory, RunDirectoryError, read_record
from efficient_lmcache.replay.shapes import Count, Number, Shape
from efficient_lmcache.replay.stored import read_rows
from efficient_lmcache.simulate.costs import Costs
from efficient_lmcache.simulate.deployment import RECOMPUTE, Configuration, Deployment, Simulated, simulate
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.simulation import Pool
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload

# vLLM's own default for its API server on CPUs (vllm/engine/arg_utils.py).
_CPU_BATCHED_TOKENS = 2048


class _Sent(Shape):
    """What is read of a row of calls.jsonl."""

    task: str
    call: Count
    dispatched_s: Number | None
    cached_tokens: Count | None


class _Matched(Shape):
    """What is read of a row of decisions.jsonl."""

    task: str
    host_match_tokens: Count


class Comparison(NamedTuple):
    """One run and its simulations.

    Attributes:
        run: the directory's name.
        measured: run.json's record.
        simulated: in a closed loop.
        in_order: with each call sent when the run sent it.
        equal_cached: share of calls whose cached tokens (GPU and host together) are the run's, `in_order`.
        equal_host_match: share of calls whose host match is the run's, `in_order`; None without a decision log.
    """

    run: str
    measured: dict[str, Any]
    simulated: Simulated
    in_order: Simulated
    equal_cached: float
    equal_host_match: float | None

    def to_json(self) -> dict[str, Any]:
        """Measured and simulated totals, and the ratios that say how far they are apart."""
        names = ("computed_prefill_tokens", "restored_tokens_per_rank", "stored_tokens_per_rank", "makespan_s")
        measured = {name: self.measured[name] for name in (*names, "preemptions")}
        return {
            "run": self.run,
            "admission": self.measured["admission"],
            "active_pool": self.measured["active_pool"],
            "gamma_h": self.measured["working_set"]["gamma_h"],
            "measured": measured,
            "simulated": self.simulated.to_json(),
            "in_order": self.in_order.to_json(),
            "computed_ratio": _ratio(self.simulated.computed_prefill_tokens, measured["computed_prefill_tokens"]),
            "computed_ratio_in_order": _ratio(
                self.in_order.computed_prefill_tokens, measured["computed_prefill_tokens"]
            ),
            "makespan_ratio": _ratio(self.simulated.makespan_s, measured["makespan_s"]),
            "equal_cached": self.equal_cached,
            "equal_host_match": self.equal_host_match,
        }


def read_comparable(path: Path) -> tuple[dict[str, Any], OptionFields]:
    """The record and the options of a run that `compare_run` can simulate.

    Raises:
        RunDirectoryError: it cannot be read, is not complete, or of a kind that is not modelled here.
    """
    record = read_record(path)
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
                f"{path}: {what}; --compare takes complete runs of one engine in in-process mode, without a link"
            )
    return record, options


def compare_run(path: Path, workload: Workload, model: Path, costs: Costs) -> Comparison:
    """Simulate what a run of one engine in in-process mode did.

    Args:
        workload: of the run's own trace, with the run's chunk and block sizes.
        model: its config.json, or the directory it is in.
        costs: with the run's ranks.

    Raises:
        RunDirectoryError: as `read_comparable`, or the run is of another trace.
    """
    record, options = read_comparable(path)
    deployment = Deployment(
        engine=EngineSettings(
            gpu_kv_tokens=record["gpu_kv_tokens"],
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_num_batched_tokens or _CPU_BATCHED_TOKENS,
        ),
        costs=costs,
        bytes_per_token=KVFootprint.from_config_file(model).bytes_per_token_per_rank(options.tensor_parallel),
        pool=Pool(record["active_pool"], options.time_scale),
    )
    configuration = Configuration(record["host_gib_per_rank"], _admission(record["admission"], options))
    numbers = _call_numbers(path, record, workload)
    sent_s, cached = _sent(path, numbers)
    in_order = simulate(workload, deployment, configuration, sent_s=sent_s)
    calls = in_order.outcome.calls
    return Comparison(
        run=path.name,
        measured=record,
        simulated=simulate(workload, deployment, configuration),
        in_order=in_order,
        equal_cached=float(np.mean(calls.gpu_tokens + calls.restored_tokens == cached)),
        equal_host_match=_equal_host_match(path, numbers, in_order.outcome.host_tokens),
    )


def _admission(name: str, options: OptionFields) -> Admission:
    names = ("write_threshold_chunks", "occupancy_threshold", "activity_window_s")
    # 0 is a value, None the default's place.
    given = {key: value for key in names if (value := getattr(options, key)) is not None}
    return Admission("none" if name == RECOMPUTE else name, **given)


def _call_numbers(path: Path, record: dict[str, Any], workload: Workload) -> dict[str, Ints]:
    """Each task's calls in the workload's numbering."""
    calls, prompt_tokens = len(workload.chunks), int(workload.chunks.prompt_tokens.sum())
    trace = record["trace"]
    if (trace["calls"], trace["prompt_tokens"]) != (calls, prompt_tokens):
        raise RunDirectoryError(
            f"{path}: is a run of {trace['calls']} calls with {trace['prompt_tokens']} prompt tokens; {workload.name} "
            f"has {calls} with {prompt_tokens}; give the run's own trace"
        )
    return {name: np.flatnonzero(workload.chunks.lane == lane) for lane, name in enumerate(workload.lanes)}


def _sent(path: Path, numbers: dict[str, Ints]) -> tuple[Floats, Ints]:
    """When each call was sent, and how many of its tokens the server did not compute."""
    count = sum(len(calls) for calls in numbers.values())
    sent_s, cached = np.zeros(count), np.zeros(count, np.int64)
    for row in read_rows(RunDirectory(path).calls, _Sent, RunDirectoryError):
        call = _call(path, numbers, row["task"], row["call"])
        sent_s[call], cached[call] = row["dispatched_s"] or 0.0, row["cached_tokens"] or 0
    return sent_s, cached


def _equal_host_match(path: Path, numbers: dict[str, Ints], simulated: Ints) -> float | None:
    seen: defaultdict[str, int] = defaultdict(int)
    equal = total = 0
    for row in read_rows(RunDirectory(path).decisions, _Matched, RunDirectoryError):
        task = row["task"]
        call = _call(path, numbers, task, seen[task])
        seen[task] += 1
        total += 1
        equal += int(simulated[call]) == row["host_match_tokens"]
    return equal / total if total else None


def _call(path: Path, numbers: dict[str, Ints], task: str, number: int) -> int:
    """A task's call in the workload's numbering."""
    if number >= len(numbers.get(task, ())):
        raise RunDirectoryError(
            f"{path}: has a call {number} of task {task!r}, which the trace lacks; give the run's own trace, and a run "
            "with labelled tasks"
        )
    return int(numbers[task][number])


def _ratio(simulated: float, measured: float | None) -> float | None:
    return simulated / measured if measured else None
