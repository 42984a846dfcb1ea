"""One engine's telemetry and admission as the connector puts them together, without vLLM and LMCache."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from efficient_lmcache.connector.admission import RequestAdmission
from efficient_lmcache.connector.options import parse_options
from efficient_lmcache.connector.telemetry import SchedulerTelemetry, worker_sink
from efficient_lmcache.core.admission import AdmissionParameters, ConditionedAdmission, Decision
from efficient_lmcache.core.tasks import TaskInference
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.publisher import ReportPublisher

CHUNK_TOKENS = 256


class Stats:
    """Stands in for the collector of the connector's metrics, which is vLLM's; collects the same."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.gauges: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add_decision(self, decision: Decision, remote: Decision | None = None) -> None:
        self.decisions.append(decision)

    def set_gauges(self, gauges: dict[str, float]) -> None:
        self.gauges.update(gauges)

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


class TelemetryEngine:
    """Worker rank 0 and the scheduler of one engine, with a tier that is full and evicting."""

    def __init__(self, engine_id: str, redis_url: str, **options: Any) -> None:
        given = {
            "telemetry.transport": "redis",
            "telemetry.redis_url": redis_url,
            "report_interval_s": 0.1,
            "report_read_interval_s": 0.05,
            "report_max_age_s": 1.5,
            **options,
        }
        parsed = parse_options({f"efficient.{name}": value for name, value in given.items()})
        self.stats: Any = Stats()
        self.telemetry = SchedulerTelemetry(parsed, engine_id, self.stats)
        sink = worker_sink(parsed, engine_id)
        assert sink is not None
        self._report = TierReport(engine_id, 0, CHUNK_TOKENS, CHUNK_TOKENS * 1024, 100, 100, 7, 7)
        self.publisher = ReportPublisher(lambda: self._report, sink, parsed.report_interval_s)
        policy = ConditionedAdmission(AdmissionParameters(CHUNK_TOKENS, 1024, 100 * CHUNK_TOKENS * 1024))
        self.admission = RequestAdmission(
            policy,
            TaskInference(128),
            reports=self.telemetry.reports,
            clock=time.monotonic,
            stats=self.stats,
            pool_lookups=self.telemetry.lookups,
        )
        self._requests = 0

    def decide(self, task: str, prompt_tokens: int = 10_000) -> Decision:
        """Serves one request of a task whose context the tier has lost."""
        self.admission.on_lookup(self.request(task, prompt_tokens), lambda _: 0)
        decision: Decision = self.stats.decisions[-1]
        return decision

    def request(self, task: str, prompt_tokens: int = 10_000) -> Any:
        self._requests += 1
        return SimpleNamespace(
            request_id=f"request-{self._requests}",
            sampling_params=SimpleNamespace(extra_args=None),
            kv_transfer_params={"efficient_lmcache.task_id": task},
            cache_salt=None,
            num_prompt_tokens=prompt_tokens,
        )

    @property
    def pool(self) -> tuple[float, float, float]:
        """A, N and the engines that they come from."""
        gauges = self.stats.gauges
        return tuple(gauges.get(f"pool_{name}", 0) for name in ("active_tasks", "mean_prompt_tokens", "engines"))  # type: ignore[return-value]

    def close(self) -> None:
        self.publisher.close()
        self.telemetry.close()


def files_run_by_a_lookup(engine: TelemetryEngine) -> set[str]:
    """The modules whose code runs between a lookup and its decision, on the thread that decides."""
    request = engine.request("profiled")
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files.add(Path(frame.f_code.co_filename).name)

    sys.setprofile(note)
    try:
        engine.admission.on_lookup(request, lambda _: 0)
    finally:
        sys.setprofile(None)
    return files


def telemetry_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("efficient-lmcache"))
