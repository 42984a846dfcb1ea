"""Scheduler side: one write-admission decision per request, remembered until the request ends."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from efficient_lmcache.connector import vllm_adapter
from efficient_lmcache.connector.tier_writes import ON, SKIP_SAVE_KEY, TierWrites
from efficient_lmcache.core.admission import AdmissionPolicy, Decision, RequestFacts
from efficient_lmcache.core.tasks import TaskInference
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.pool import Lookup
from efficient_lmcache.telemetry.pool_now import PoolNow

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from efficient_lmcache.connector.metrics import StatsCollector
    from efficient_lmcache.connector.remote import RemoteAdmission

_logger = logging.getLogger(__name__)
# What the decision to save tells the workers.
_SAVED: dict[str, str] = {}
# Makes a named tuple of its values, without the function that calling its class runs.
_new = tuple.__new__


class HasReport(Protocol):
    """Holds the newest tier report: an attribute, as reading it must cost nothing."""

    report: TierReport | None


class NoReports:
    """Of an engine without telemetry."""

    report: TierReport | None = None


class RequestAdmission:
    """Asks the policy at a request's first resolved lookup and never again, whatever happens to the request.

    Args:
        policy: decides.
        tasks: names the task of a request whose client did not.
        reports: has the newest tier report.
        clock: seconds, the clock of `TierReport.received_s`.
        stats: counts the decisions.
        decision_log: receives every decision; None for none.
        pool_lookups: receives every lookup, for the pool's A and N; None for none.
        remote: decides for the remote tier, and `policy` for the CPU tier alone; None without a remote tier.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        tasks: TaskInference,
        reports: HasReport,
        clock: Callable[[], float],
        stats: StatsCollector,
        decision_log: DecisionLog | None = None,
        pool_lookups: deque[Lookup] | None = None,
        remote: RemoteAdmission | None = None,
    ) -> None:
        self._policy = policy
        self._tasks = tasks
        self._reports = reports
        self._clock = clock
        self._stats = stats
        self._decision_log = decision_log
        self._pool_lookups = pool_lookups
        self._remote = remote
        # A and N of all engines that share the policy's tier; None where this engine has it for itself.
        self._pool: PoolNow | None = None
        # The transfer parameters that carry the request's decision.
        self._decided: dict[str, dict[str, str]] = {}
        self._failures = FailureLog(_logger, "Deciding on a write admission")

    def __len__(self) -> int:
        """Requests whose decision is remembered."""
        return len(self._decided)

    def on_lookup(self, request: Request, host_match_tokens: Callable[[str], int]) -> None:
        """Decide if this is the request's first resolved lookup; what follows from it waits for `on_scheduled`.

        Never raises: a request that cannot be decided on is served by plain LMCache, and so is a pooling request, which
        has no sampling parameters to carry a decision.
        """
        # As in `core.admission`: what counts is how many functions run and objects are touched.
        request_id, decided = request.request_id, self._decided
        if request_id in decided or request.sampling_params is None:
            return
        decided[request_id] = _SAVED
        try:
            named = vllm_adapter.task_and_tenant(request)
            if named is None:
                prefix_keys, prompt_tokens, salt = vllm_adapter.prompt(request)
                task, tenant = self._tasks.assign(prefix_keys, prompt_tokens, salt), None
            else:
                task, tenant = named
            qualified_task = task if tenant is None else vllm_adapter.qualified_task(task, tenant)
            facts = _new(RequestFacts, (qualified_task, request.num_prompt_tokens, host_match_tokens(request_id)))
            in_pool = (task, tenant, named is not None)
            now_s = self._clock()
            pool = remote = None
            if self._pool is not None:
                pool = self._pool.at_lookup(*in_pool, facts.prompt_tokens, now_s)
            if self._remote is not None:
                remote = self._remote.decide(facts, now_s)
                facts = self._remote.facts_of_cpu_tier(request_id, facts)
            decision = self._policy.decide(facts, self._reports.report, now_s, pool)
            if remote is not None or not decision.save:
                decided[request_id] = _transfer_params(decision, remote)
            self._stats.add_decision(decision, remote)
            if self._pool_lookups is not None:
                self._pool_lookups.append(Lookup(*in_pool, facts.prompt_tokens, now_s, decision.pressure))
            if self._decision_log is not None:
                self._decision_log.write(request_id, decision, remote)
        except Exception as error:
            self._failures.failed(error)
        else:
            if self._failures.failures:
                self._failures.succeeded()

    def on_scheduled(self, request: Request) -> None:
        """Carry out the decision: a declined request stores nothing. Also after a preemption, and again with the next
        input of a streaming session, which brings parameters of its own.
        """
        try:
            self._tasks.remember()
            if self._decided.get(request.request_id):
                self._carry_out(request)
        except Exception as error:
            self._failures.failed(error)

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted."""
        self._decided.pop(request_id, None)

    def close(self) -> None:
        if self._decision_log is not None:
            self._decision_log.close()
        if self._remote is not None:
            self._remote.close()

    def _carry_out(self, request: Request) -> None:
        for key, value in self._decided[request.request_id].items():
            vllm_adapter.set_kv_transfer_param(request, key, value)


def _transfer_params(decision: Decision, remote: Decision | None) -> dict[str, str]:
    """What carries a decision that declines, or two tiers' decisions."""
    if remote is None:
        return {SKIP_SAVE_KEY: ON}
    return TierWrites(cpu=decision.save, remote=remote.save).transfer_params()


class DecisionLog:
    """Decisions as lines of JSON, with the policy that took them."""

    def __init__(self, path: str | Path, policy: AdmissionPolicy, clock: Callable[[], float], engine_id: str) -> None:
        """`engine_id` says whose a row is: data-parallel engines, started as one, write to one file."""
        self._policy = policy.name
        self._engine_id = engine_id
        self._clock = clock
        self._file: TextIO = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()

    def write(self, request_id: str, decision: Decision, remote: Decision | None = None) -> None:
        row = {
            "request_id": request_id,
            "engine_id": self._engine_id,
            "now_s": self._clock(),
            "admission": self._policy,
            **decision.record(),
        }
        if remote is not None:
            row["remote"] = remote.record()
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()
