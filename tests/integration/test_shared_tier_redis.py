"""Engines that share an LMCache server, with a real Redis between them: who probes, and what they know of the pool."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis_process import RedisProcess, wait_until
from telemetry_engine import CHUNK_TOKENS, Stats, TelemetryEngine

from efficient_lmcache.connector.options import parse_options
from efficient_lmcache.connector.server_admission import ServerAdmission
from efficient_lmcache.connector.telemetry import SchedulerTelemetry
from efficient_lmcache.core.admission import AdmissionParameters, ConditionedAdmission, Decision
from efficient_lmcache.core.tasks import TaskInference
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import local
from efficient_lmcache.telemetry.shared_probe import SHARED_TIER_PREFIX, SharedProbe

pytestmark = pytest.mark.integration


@dataclass
class Tier:
    """Stands in for the server, which `test_server_mode.py` has: full and evicting, and counts its probes."""

    probes: int = 0

    def identify(self) -> str:
        return SHARED_TIER_PREFIX + "server/1x262144"

    def resume(self, report: TierReport | None) -> None:
        pass

    def probe(self) -> TierReport:
        self.probes += 1
        return TierReport("unnamed", 0, CHUNK_TOKENS, CHUNK_TOKENS * 1024, 100, 100, 7, 7)


class SharingEngine:
    """The scheduler of one engine in server mode. No worker of it has anything to say."""

    def __init__(self, engine_id: str, redis_url: str) -> None:
        options = {
            "mode": "server",
            "telemetry.transport": "redis",
            "telemetry.redis_url": redis_url,
            "report_interval_s": 0.1,
            "report_max_age_s": 1.5,
        }
        parsed = parse_options({f"efficient.{name}": value for name, value in options.items()})
        self.tier = Tier()
        self.stats: Any = Stats()
        self.telemetry = SchedulerTelemetry(parsed, engine_id, self.stats, shared_tier=self.tier)
        policy = ConditionedAdmission(AdmissionParameters(CHUNK_TOKENS, 1024, None))
        self.admission = ServerAdmission(
            lambda request: None,
            self.telemetry.pool,
            policy,
            TaskInference(128),
            reports=self.telemetry.reports,
            clock=time.monotonic,
            stats=self.stats,
            pool_lookups=self.telemetry.lookups,
        )
        self._requests = 0

    request = TelemetryEngine.request

    @property
    def probe(self) -> SharedProbe:
        assert isinstance(self.telemetry.reports, SharedProbe)
        return self.telemetry.reports

    def decide(self, task: str, prompt_tokens: int = 10_000) -> Decision:
        self.admission.on_lookup(self.request(task, prompt_tokens), lambda _: 0)  # type: ignore[arg-type]
        decision: Decision = self.stats.decisions[-1]
        return decision


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def engines(redis: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SharingEngine]]:
    """Three engines, each in a container of its own: none sees another's memory."""
    containers = iter(tmp_path / f"shm-{number}" for number in range(100))
    monkeypatch.setattr(local, "runtime_directory", lambda: next(containers))
    with ExitStack() as stack:
        started = []
        for number in range(3):
            started.append(SharingEngine(f"engine/{number}", redis.url))
            stack.callback(started[-1].telemetry.close)
        yield started


def probing(engines: list[SharingEngine]) -> list[bool]:
    return [engine.probe.probing for engine in engines]


def fresh(engines: list[SharingEngine]) -> bool:
    now_s = time.monotonic()
    return all(engine.probe.report and engine.probe.report.age_s(now_s) < 1.0 for engine in engines)


def test_one_engine_probes_for_all_and_another_one_when_it_is_gone(engines):
    wait_until(lambda: fresh(engines) and probing(engines).count(True) == 1)
    before = [engine.tier.probes for engine in engines]
    time.sleep(1.0)
    assert [engine.tier.probes > seen for engine, seen in zip(engines, before, strict=True)] == probing(engines)
    first = probing(engines).index(True)
    engines[first].telemetry.close()
    others = [engine for number, engine in enumerate(engines) if number != first]
    wait_until(lambda: probing(others).count(True) == 1)
    wait_until(lambda: fresh(others))


def test_without_redis_every_host_probes_for_itself_and_with_it_again_one_for_all(engines, redis):
    wait_until(lambda: fresh(engines) and probing(engines).count(True) == 1)
    redis.kill()
    wait_until(lambda: all(probing(engines)))
    wait_until(lambda: fresh(engines))
    redis.restart()
    wait_until(lambda: probing(engines).count(True) == 1)
    wait_until(lambda: fresh(engines))


def test_every_decision_knows_the_pool_within_five_per_cent(engines):
    """16 tasks whose requests go to whichever engine, as a router by load sends them."""
    chance = random.Random(0)
    wait_until(lambda: all(engine.telemetry.pool_estimate for engine in engines))
    wait_until(lambda: all(engine.stats.gauges.get("pool_engines") == 3 for engine in engines))
    tasks = {f"task-{number}": 1000 * (number + 1) for number in range(16)}
    for task, tokens in tasks.items():
        chance.choice(engines).decide(task, tokens)
    time.sleep(1.0)
    for _ in range(25):
        # In rounds: drawn independently, 416 lookups would themselves stray from 8,500 by 2.7 %.
        for task in chance.sample(list(tasks), len(tasks)):
            decision = chance.choice(engines).decide(task, tasks[task])
            assert decision.estimate.active_pool == 16
            time.sleep(0.002)
    assert decision.estimate.mean_prompt_tokens == pytest.approx(8_500, rel=0.05)
    assert decision.capacity_bytes == 100 * CHUNK_TOKENS * 1024
    assert decision.report_fresh
