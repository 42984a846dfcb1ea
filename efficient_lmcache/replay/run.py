"""One replay, from a trace to a run directory: fresh servers, the closed loop, the record."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from efficient_lmcache.core.workingset import gamma_g
from efficient_lmcache.replay.deployment import CommandOf, Deployment, Ports, plan_deployment
from efficient_lmcache.replay.driver import CallRow, Driver, ReplayOptionError, ServerLost, Tally
from efficient_lmcache.replay.metrics import (
    COMPUTED_PREFILL,
    KV_CACHE_INFO,
    PREEMPTIONS,
    MetricsError,
    ServerCounts,
    Snapshot,
    increase,
    scrape,
    tier_metrics,
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
from efficient_lmcache.replay.redis_server import require_redis
from efficient_lmcache.replay.routing import Router
from efficient_lmcache.replay.rundir import DecisionCounts, EngineRecord, RunDirectory, RunRecord
from efficient_lmcache.replay.server import Server, ServerError, serve_command
from efficient_lmcache.replay.signals import interrupt, on_ending_signal
from efficient_lmcache.replay.trace import NoTraceError, TraceError, TraceReader

# Of `EngineRecord`, and summed in `RunRecord`.
_SUMMED = (
    "gpu_kv_tokens",
    "computed_prefill_tokens",
    "preemptions",
    "stored_tokens_per_rank",
    "restored_tokens_per_rank",
    "evicted_chunks_per_rank",
    "dedup_chunks_per_rank",
)


def run_replay(options: RunOptions, console: Console, command_of: CommandOf = serve_command) -> RunRecord:
    """Replay a trace against fresh servers and fill `options.out`.

    `command_of` gives an engine's command line for its options and port. A run that ends early is returned too: its
    record says `interrupted` or `failed`, and why. So does that of a damaged trace, for which no server is started.

    Raises:
        ReplayOptionError, RunDirectoryError, NoTraceError: nothing was started, and nothing created, so that the same
            call can be repeated once what the message names is mended.
    """
    model = read_model(options.model, options.tensor_parallel)
    if options.has_redis:
        require_redis()
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


_Snapshots = tuple[list[Snapshot], Snapshot | None]  # of the engines, and of an LMCache server


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
    command_of: CommandOf
    tally: Tally = field(default_factory=Tally)
    engines: list[EngineRecord] = field(default_factory=list)
    answered: Counter[int | None] = field(default_factory=Counter)

    def attempt(self) -> tuple[str, str | None]:
        """Run it; returns the status and, unless complete, why it ended."""
        try:
            with tempfile.TemporaryDirectory(prefix="efficient-lmcache-metrics-") as metrics_dir:
                return self._serve_and_drive(self._plan(Path(metrics_dir)))
        except KeyboardInterrupt:
            return "interrupted", "interrupted before the replay ended"
        except (ServerLost, ServerError, MetricsError, TraceError) as error:
            return "failed", str(error)

    def finish(self, status: str, error: str | None) -> None:
        tally = self.tally
        if len(self.engines) > 1:
            self._know_of_engines()
        decisions = DecisionCounts.of(self.directory.decision_rows())
        if status == "complete" and self.record.connector == "efficient" and decisions.total < tally.answered:
            # The connector rather serves without admission than not at all; such a run says nothing of the admission.
            status = "failed"
            error = (
                f"{tally.answered} calls were answered but {decisions.total} have an admission decision; "
                f"{self._first_log} says why"
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

    def _know_of_engines(self) -> None:
        """What each of several engines answered and decided."""
        self.directory.merge_decisions(len(self.engines))
        rows = list(self.directory.decision_rows())
        for number, engine in enumerate(self.engines):
            decisions = DecisionCounts.of(row for row in rows if row["engine"] == number)
            self.engines[number] = replace(engine, answered=self.answered[number], decisions=decisions)
        self._update(engines=self.engines)

    def _plan(self, metrics_dir: Path) -> Deployment:
        ports = Ports.free(self.options)
        facts = self.model, self.context_tokens, self.directory
        deployment = plan_deployment(self.options, *facts, metrics_dir, ports, os.environ, self.command_of)
        for number in range(self.options.engines):
            (metrics_dir / f"engine-{number}").mkdir()
        self.engines = [EngineRecord(part.command) for part in deployment.engines]
        lmcache = deployment.lmcache
        self._update(
            server_command=deployment.engines[0].command,
            lmcache_server_command=[] if lmcache is None else lmcache.command,
        )
        return deployment

    def _serve_and_drive(self, deployment: Deployment) -> tuple[str, str | None]:
        logs = ", ".join(str(part.log) for part in (*deployment.shared, *deployment.engines))
        several = len(deployment.engines) + len(deployment.shared) > 1
        starting = (
            f"starting the servers; their logs are {logs}" if several else f"starting the server; its log is {logs}"
        )
        self.console.print(starting, highlight=False, soft_wrap=True)
        with ExitStack() as stopping:
            with self.console.status("starting"):
                servers = stopping.enter_context(deployment.started(self.options.start_timeout_s))
            before = self._scrape("before", servers, deployment)
            self._know_gpu_kv_tokens(before[0])
            try:
                completed = asyncio.run(self._drive([server.base_url for server in servers]))
            except ServerLost as error:
                raise ServerLost(f"{error}; {_log_tails(servers, error.engine)}", error.engine) from error
            time.sleep(tier_metrics(self.record.connector, self.record.mode).lag_s)
            self._read_metrics(before, self._scrape("after", servers, deployment))
        return ("complete", None) if completed else ("interrupted", "interrupted before the replay ended")

    async def _drive(self, base_urls: Sequence[str]) -> bool:
        """False if a signal ended the replay."""
        loop, main_task = asyncio.get_running_loop(), asyncio.current_task()
        assert main_task is not None
        with (
            on_ending_signal(lambda: loop.call_soon_threadsafe(main_task.cancel)),
            open(self.directory.calls, "wb") as calls,
            ReplayProgress(self.tally, self.record.calls, self.console) as progress,
        ):

            def on_row(row: CallRow) -> None:
                calls.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
                calls.flush()
                self.tally.add(row)
                self.answered[row.engine] += row.status == "answered"
                progress.update()

            try:
                await Driver(self.trace, Router(base_urls, self.options.route), self.options.driver, on_row).run()
                return True
            except asyncio.CancelledError:
                return False

    def _scrape(self, moment: str, servers: Sequence[Server], deployment: Deployment) -> _Snapshots:
        directories = [self.directory.of_engine(number, len(servers)) for number in range(len(servers))]
        engines = [
            scrape(server.base_url, directory.metrics(moment))
            for server, directory in zip(servers, directories, strict=True)
        ]
        lmcache = deployment.lmcache
        if lmcache is None:
            return engines, None
        return engines, scrape(f"http://127.0.0.1:{lmcache.port}", self.directory.lmcache_metrics(moment))

    def _know_gpu_kv_tokens(self, engines: Sequence[Snapshot]) -> None:
        for number, before in enumerate(engines):
            blocks, tokens = (int(before.label(KV_CACHE_INFO, name)) for name in ("num_gpu_blocks", "block_size"))
            self.engines[number] = replace(self.engines[number], gpu_kv_tokens=blocks * tokens)
        self._sum_up()
        working_set = self.record.working_set
        assert working_set.mean_prompt_tokens is not None
        assert self.record.gpu_kv_tokens is not None
        gamma = gamma_g(working_set.pool, working_set.mean_prompt_tokens, self.record.gpu_kv_tokens)
        self._update(working_set=replace(working_set, gamma_g=gamma))

    def _read_metrics(self, before: _Snapshots, after: _Snapshots) -> None:
        for number, (engine, first, last) in enumerate(zip(self.engines, before[0], after[0], strict=True)):
            self.engines[number] = replace(engine, **self._engine_counts(first, last))
        self._sum_up()
        if before[1] is not None and after[1] is not None:
            counts = ServerCounts.between(before[1], after[1], self.options.chunk_tokens, self.options.tensor_parallel)
            self._update(
                stored_tokens_per_rank=counts.stored_tokens,
                evicted_chunks_per_rank=counts.evicted_chunks,
                dropped_chunks_per_rank=counts.dropped_chunks,
            )

    def _engine_counts(self, before: Snapshot, after: Snapshot) -> dict[str, Any]:
        names = tier_metrics(self.record.connector, self.record.mode)
        ranks = self.options.tensor_parallel if names.summed_over_ranks else 1
        uncounted = None if self.record.mode == "server" else 0

        def tier_increase(name: str | None) -> int | None:
            return uncounted if name is None else round(increase(before, after, name) / ranks)

        return {
            "computed_prefill_tokens": increase(before, after, COMPUTED_PREFILL),
            "preemptions": increase(before, after, PREEMPTIONS),
            "stored_tokens_per_rank": tier_increase(names.stored_tokens),
            "restored_tokens_per_rank": tier_increase(names.restored_tokens),
            "evicted_chunks_per_rank": tier_increase(names.evicted_chunks),
            "dedup_chunks_per_rank": tier_increase(names.deduplicated_chunks),
        }

    def _sum_up(self) -> None:
        """The engines' numbers so far in the run's record; None where an engine's is."""
        values = {name: [getattr(engine, name) for engine in self.engines] for name in _SUMMED}
        self._update(**{name: None if None in each else sum(each) for name, each in values.items()})

    @property
    def _first_log(self) -> Path:
        return self.directory.of_engine(0, len(self.engines)).server_log


def _log_tails(servers: Sequence[Server], lost: int) -> str:
    """Of the one that was lost, and of others that are gone."""
    gone = (server for number, server in enumerate(servers) if number == lost or server.exit_status is not None)
    return "; ".join(server.log_tail() for server in gone)
