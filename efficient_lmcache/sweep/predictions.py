"""What each run of a sweep is expected to measure, written down before the first one starts (paper, Section 5.4)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.progress_bar import progress_bar
from efficient_lmcache.sweep.expand import PlannedRun, Subject
from efficient_lmcache.sweep.plan import Plan, PlanError
from efficient_lmcache.sweep.state import SweepState, now

if TYPE_CHECKING:
    from efficient_lmcache.sizing.prediction import Predictor
    from efficient_lmcache.sizing.workload import Workload

_UNPREDICTED = (
    "not predicted: runs whose GPU cache vLLM sizes itself (give gpu_kv_tokens) or does not use, of several engines, "
    "or with their host tier in an LMCache server"
)


def predict_runs(state: SweepState, plan: Plan, subject: Subject, runs: Sequence[PlannedRun]) -> None:
    """Fill `state.predictions` and let every run that can be predicted point to its own; repeats share one.

    Not predicted are runs whose GPU cache vLLM sizes itself, and those that do not use it.

    Raises:
        PlanError: the extra that predicts is not installed.
    """
    if importlib.util.find_spec("numba") is None:
        raise PlanError("predictions need numba; pip install 'efficient-lmcache[sizing]'")
    workload: Workload | None = None
    predictors: dict[tuple[int, int], Predictor] = {}
    known: dict[tuple[Any, ...], int] = {}
    with progress_bar("predicting", "runs") as progress:
        for done, (planned, run) in enumerate(zip(runs, state.runs, strict=True), 1):
            options = planned.options
            if options.gpu_kv_tokens is None or not _is_predictable(options):
                continue
            configuration = _configuration(options)
            if configuration not in known:
                pool = (options.active_pool, options.gpu_kv_tokens)
                if workload is None:
                    workload = _workload(subject, options)
                    state.prediction_notes += workload.notes
                if pool not in predictors:
                    predictors[pool] = _predictor(workload, plan, subject, options)
                known[configuration] = len(state.predictions)
                state.predictions.append(_predict(predictors[pool], options))
            run.prediction = known[configuration]
            progress(done, len(runs))
    if any(run.prediction is None for run in state.runs):
        state.prediction_notes.append(_UNPREDICTED)


def _is_predictable(options: RunOptions) -> bool:
    """The prediction is of one engine with LMCache's in-process tier."""
    return options.prefix_caching and options.engines == 1 and not options.has_lmcache_server


def _configuration(options: RunOptions) -> tuple[Any, ...]:
    return (
        options.active_pool,
        options.gpu_kv_tokens,
        options.admission,
        options.host_gib,
        options.write_threshold_chunks,
        options.occupancy_threshold,
    )


def _workload(subject: Subject, options: RunOptions) -> Workload:
    """The trace in the chunks and blocks that all runs of a plan have."""
    from efficient_lmcache.sizing.workload import open_workload

    return open_workload(subject.trace.path, options.chunk_tokens, gpu_block_tokens=options.block_tokens)


def _predictor(workload: Workload, plan: Plan, subject: Subject, options: RunOptions) -> Predictor:
    from efficient_lmcache.sizing.pool import PoolModel
    from efficient_lmcache.sizing.prediction import Predictor

    model = PoolModel(
        active_pool=options.active_pool,
        slots=options.max_num_seqs,
        prefill_tokens_per_s=plan.predict.prefill_tokens_per_s,
        output_s_per_token=plan.predict.output_s_per_token,
        gpu_kv_tokens=options.gpu_kv_tokens,
        time_scale=options.time_scale,
    )
    assert options.gpu_kv_tokens is not None
    return Predictor(workload, model, options.gpu_kv_tokens, subject.model.bytes_per_token)


def _predict(predictor: Predictor, options: RunOptions) -> dict[str, Any]:
    from efficient_lmcache.sizing.policy_tier import Admission

    thresholds = {
        name: value
        for name in ("write_threshold_chunks", "occupancy_threshold", "activity_window_s")
        if (value := getattr(options, name)) is not None
    }
    admission = Admission("none" if options.admission == "recompute" else options.admission, **thresholds)
    predicted = predictor.predict(options.host_gib if options.has_tier else 0.0, admission)
    spans = ("computed_prefill_tokens", "restored_tokens", "stored_tokens", "declined_calls", "makespan_s")
    per_rank = {"restored_tokens": "restored_tokens_per_rank", "stored_tokens": "stored_tokens_per_rank"}
    return {
        "created_at": now(),
        "active_pool": options.active_pool,
        "admission": options.admission,
        "host_gib": options.host_gib if options.has_tier else 0.0,
        **thresholds,
        "capacity_chunks": predicted.capacity_chunks,
        **{per_rank.get(name, name): getattr(predicted, name)._asdict() for name in spans},
    }


def prediction_text(prediction: dict[str, Any]) -> str:
    """Computed prefill and makespan, for a person."""
    computed, makespan = prediction["computed_prefill_tokens"], prediction["makespan_s"]
    expected, low, high = (computed[name] / 1e6 for name in ("expected", "low", "high"))
    return (
        f"predicted {expected:.3f} M tokens of computed prefill ({low:.3f} to {high:.3f}), "
        f"{makespan['expected']} s ({makespan['low']} to {makespan['high']})"
    )
