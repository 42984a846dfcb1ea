"""One replay, from a trace to a run directory: a fresh server, the closed loop, the record."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from efficient_lmcache.core.workingset import gamma_g
from efficient_lmcache.replay.driver import CallRow, Driver, ReplayOptionError, ServerLost, Tally
from efficient_lmcache.replay.metrics import (
    COMPUTED_PREFILL,
    KV_CACHE_INFO,
    PREEMPTIONS,
    TIER_METRICS,
    MetricsError,
    Snapshot,
    increase,
    scrape,
)
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.preflight import (
    ModelFacts,
    initial_record,
    longest_call_tokens,
    max_model_len_tokens,
    read_model,
)
from efficient_lmcache.replay.progress import ReplayProgress
from efficient_lmcache.replay.rundir import DecisionCounts, RunDirectory, RunRecord
from efficient_lmcache.replay.server import (
    Server,
    ServerError,
    ServerOptions,
    environment,
    free_port,
    is_cpu_build,
    serve_command,
)
from efficient_lmcache.replay.signals import interrupt, on_ending_signal
from efficient_lmcache.replay.trace import NoTraceError, TraceError, TraceReader


def run_replay(
    options: RunOptions, console: Console, command_of: Callable[[ServerOptions, int], list[str]] = serve_command
) -> RunRecord:
    """Replay a trace against a fresh server and fill `options.out`.

    `command_of` gives the server's command line for its options and port. A run that ends early is returned too: its
    record says `interrupted` or `failed`, and why. So does that of a damaged trace, for which no server is started.

    Raises:
        ReplayOptionError, RunDirectoryError, NoTraceError: nothing was started, and nothing created, so that the same
            call can be repeated once what the message names is mended.
    """
    model = read_model(options.model, options.tensor_parallel)
    RunDirectory.require_new(options.out)
    try:
        reader = TraceReader(options.trace)
    except NoTraceError:
        raise
    except TraceError as error:
        return _failed_run(options, initial_record(options, model, None), error)
    with reader as trace:
        if not trace.tasks:
            raise ReplayOptionError(f"{options.trace}: has no tasks; there is nothing to replay")
        record = initial_record(options, model, trace)
        try:
            longest_tokens = longest_call_tokens(trace, model.vocab_size)
        except TraceError as error:
            return _failed_run(options, record, error)
        context_tokens = max_model_len_tokens(options, model, longest_tokens)
        directory = RunDirectory.create(options.out)
        run = _Run(options, model, context_tokens, trace, directory, record, console, command_of)
        directory.write_record(record)
        with on_ending_signal(interrupt):
            try:
                outcome = run.attempt()
            except Exception as error:
                run.finish("failed", f"{type(error).__name__}: {error}")
                raise
            run.finish(*outcome)
    return run.record


def _failed_run(options: RunOptions, record: RunRecord, error: TraceError) -> RunRecord:
    failed = replace(record, status="failed", error=str(error))
    RunDirectory.create(options.out).write_record(failed)
    return failed


def server_options(
    options: RunOptions, model: ModelFacts, context_tokens: int, directory: RunDirectory, metrics_dir: Path
) -> ServerOptions:
    """What a run's server is started with."""
    return ServerOptions(
        compile_model=not is_cpu_build(),
        model=options.model,
        vocab_size=model.vocab_size,
        connector=options.connector if options.has_tier else "none",
        admission=options.admission,
        host_gib=options.host_gib,
        chunk_tokens=options.chunk_tokens,
        max_model_len_tokens=context_tokens,
        bytes_per_token=model.bytes_per_token,
        decision_log=directory.decisions.resolve(),
        metrics_dir=metrics_dir,
        gpu_kv_tokens=options.gpu_kv_tokens,
        block_tokens=options.block_tokens,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        write_threshold_chunks=options.write_threshold_chunks,
        occupancy_threshold=options.occupancy_threshold,
        activity_window_s=options.activity_window_s,
        tensor_parallel=options.tensor_parallel,
        gpu_memory_utilization=options.gpu_memory_utilization,
        prefix_caching=options.prefix_caching,
        vllm_args=options.vllm_args,
    )


@dataclass
class _Run:
    """The state that survives however a run ends."""

    options: RunOptions
    model: ModelFacts
    context_tokens: int
    trace: TraceReader
    directory: RunDirectory
    record: RunRecord
    console: Console
    command_of: Callable[[ServerOptions, int], list[str]]
    tally: Tally = field(default_factory=Tally)

    def attempt(self) -> tuple[str, str | None]:
        """Run it; returns the status and, unless complete, why it ended."""
        try:
            with tempfile.TemporaryDirectory(prefix="efficient-lmcache-metrics-") as metrics_dir:
                return self._serve_and_drive(self._server_options(Path(metrics_dir)))
        except KeyboardInterrupt:
            return "interrupted", "interrupted before the replay ended"
        except (ServerLost, ServerError, MetricsError, TraceError) as error:
            return "failed", str(error)

    def finish(self, status: str, error: str | None) -> None:
        tally, decisions = self.tally, DecisionCounts.of(self.directory.decision_rows())
        if status == "complete" and self.record.connector == "efficient" and decisions.total < tally.answered:
            # The connector rather serves without admission than not at all; such a run says nothing of the admission.
            status = "failed"
            error = (
                f"{tally.answered} calls were answered but {decisions.total} have an admission decision; "
                f"{self.directory.server_log} says why"
            )
        self._update(
            status=status,
            error=error,
            answered=tally.answered,
            outputs_exact=tally.exact,
            errors=tally.failed,
            skipped=tally.skipped,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=tally.output_tokens,
            makespan_s=tally.makespan_s,
            decisions=decisions,
        )
        self.directory.write_record(self.record)

    def _update(self, **changed: Any) -> None:
        self.record = replace(self.record, **changed)

    def _server_options(self, metrics_dir: Path) -> ServerOptions:
        return server_options(self.options, self.model, self.context_tokens, self.directory, metrics_dir)

    def _serve_and_drive(self, options: ServerOptions) -> tuple[str, str | None]:
        port = free_port()
        command = self.command_of(options, port)
        self._update(server_command=command)
        with Server(command, environment(options, os.environ), port, self.directory.server_log) as server:
            self.console.print(f"starting the server; its log is {server.log}", highlight=False, soft_wrap=True)
            with self.console.status("starting"):
                server.wait_until_ready(self.options.start_timeout_s)
            before = scrape(server.base_url, self.directory.metrics("before"))
            self._know_gpu_kv_tokens(before)
            try:
                completed = asyncio.run(self._drive(server.base_url))
            except ServerLost as error:
                raise ServerLost(f"{error}; {server.log_tail()}") from error
            time.sleep(TIER_METRICS[options.connector].lag_s)
            after = scrape(server.base_url, self.directory.metrics("after"))
            self._read_metrics(before, after, options.connector)
        return ("complete", None) if completed else ("interrupted", "interrupted before the replay ended")

    async def _drive(self, base_url: str) -> bool:
        """False if a signal ended the replay."""
        loop, main_task = asyncio.get_running_loop(), asyncio.current_task()
        assert main_task is not None
        with (
            on_ending_signal(lambda: loop.call_soon_threadsafe(main_task.cancel)),
            open(self.directory.calls, "w") as calls,
            ReplayProgress(self.tally, self.record.calls, self.console) as progress,
        ):

            def on_row(row: CallRow) -> None:
                calls.write(json.dumps(asdict(row)) + "\n")
                calls.flush()
                self.tally.add(row)
                progress.update()

            try:
                await Driver(self.trace, base_url, self.options.driver, on_row).run()
                return True
            except asyncio.CancelledError:
                return False

    def _know_gpu_kv_tokens(self, before: Snapshot) -> None:
        tokens = int(before.label(KV_CACHE_INFO, "num_gpu_blocks")) * int(before.label(KV_CACHE_INFO, "block_size"))
        working_set = self.record.working_set
        assert working_set.mean_prompt_tokens is not None
        gamma = gamma_g(working_set.pool, working_set.mean_prompt_tokens, tokens)
        self._update(gpu_kv_tokens=tokens, working_set=replace(working_set, gamma_g=gamma))

    def _read_metrics(self, before: Snapshot, after: Snapshot, connector: str) -> None:
        names = TIER_METRICS[connector]
        ranks = self.options.tensor_parallel if names.summed_over_ranks else 1

        def tier_increase(name: str | None) -> int:
            return 0 if name is None else round(increase(before, after, name) / ranks)

        self._update(
            computed_prefill_tokens=increase(before, after, COMPUTED_PREFILL),
            preemptions=increase(before, after, PREEMPTIONS),
            stored_tokens_per_rank=tier_increase(names.stored_tokens),
            restored_tokens_per_rank=tier_increase(names.restored_tokens),
            evicted_chunks_per_rank=tier_increase(names.evicted_chunks),
            dedup_chunks_per_rank=tier_increase(names.deduplicated_chunks),
        )
