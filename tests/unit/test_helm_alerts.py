"""Alerts fire on what they are about and on nothing else, as Prometheus' own `promtool test rules` decides."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from metric_queries import RULES, alerts

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH (apt-get install prometheus)"
)

_GIB = 2**30
_MINUTES = 90
_LABELS = 'instance="node:8000",model_name="m",engine="0"'


@dataclass(frozen=True)
class Engine:
    """What an engine shows, in GiB and per minute.

    Attributes:
        decisions: by outcome.
    """

    working_set_gib: float = 8
    tier_gib: float = 16
    evicted: int = 0
    stored: int = 100
    restored: int = 1000
    declined: int = 0
    mean_prompt_tokens: int = 30_000
    decisions: dict[str, int] = field(default_factory=lambda: {"no_pressure": 10, "extension": 0, "refill": 0})
    under_pressure: int = 0
    stale: int = 0
    requests: int = 10
    redis_up: int = 0
    pool_engines: int = 0
    exporter_hears: int = 1

    def series(self) -> list[dict[str, str]]:
        gauges = {
            "working_set_bytes": self.working_set_gib * _GIB,
            "tier_capacity_bytes": self.tier_gib * _GIB,
            "mean_prompt_tokens": self.mean_prompt_tokens,
            "telemetry_redis_up": self.redis_up,
            "pool_engines": self.pool_engines,
        }
        counters = {
            "evicted_chunks_total": self.evicted,
            "stored_tokens_total": self.stored,
            "restored_tokens_total": self.restored,
            "declined_chunks_total": self.declined,
            "deduplicated_chunks_total": 0,
            "decisions_pressure_total": self.under_pressure,
            "decisions_stale_report_total": self.stale,
        }
        values = {f"efficient_lmcache:{name}{{{_LABELS}}}": f"{value:.0f}x{_MINUTES}" for name, value in gauges.items()}
        values['efficient_lmcache:cluster_redis_up{instance="exporter:9400",deployment="d"}'] = (
            f"{self.exporter_hears}x{_MINUTES}"
        )
        rates = {f"efficient_lmcache:{name}{{{_LABELS}}}": rate for name, rate in counters.items()}
        for outcome, rate in self.decisions.items():
            rates[f'efficient_lmcache:decisions_total{{{_LABELS},outcome="{outcome}"}}'] = rate
        for reason, rate in {"stop": self.requests, "abort": 0}.items():
            rates[f'vllm:request_success_total{{{_LABELS},finished_reason="{reason}"}}'] = rate
        values.update({name: f"0+{rate}x{_MINUTES}" for name, rate in rates.items()})
        return [{"series": name, "values": text} for name, text in values.items()]


PRESSED = {"no_pressure": 0, "extension": 6, "refill": 4}
SCENES = {
    "healthy": (Engine(), set()),
    "large and full": (Engine(working_set_gib=15, evicted=20), set()),
    "thrashing under plain offload": (
        Engine(working_set_gib=22, tier_gib=10, evicted=50, stored=1000, restored=10),
        {"EfficientLMCacheTierThrashing"},
    ),
    "small, and conditioned admission keeps it useful": (
        Engine(working_set_gib=22, tier_gib=10, evicted=5, stored=100, decisions=PRESSED, under_pressure=10),
        {"EfficientLMCacheTierTooSmall"},
    ),
    "no reports": (Engine(stale=9), {"EfficientLMCacheStaleTelemetry"}),
    "a report missing now and then": (Engine(stale=1), set()),
    "LMCache did not start": (Engine(stored=0, restored=0, decisions={"refill": 0}), {"EfficientLMCacheTierUnused"}),
    "LMCache did not start in the workers": (
        Engine(stored=0, restored=0, stale=10),
        {"EfficientLMCacheTierUnused", "EfficientLMCacheStaleTelemetry"},
    ),
    "prompts shorter than a chunk": (Engine(stored=0, restored=0, mean_prompt_tokens=500), set()),
    "everything declined": (
        Engine(working_set_gib=22, stored=0, restored=0, declined=40, decisions={"refill": 10}, under_pressure=10),
        {"EfficientLMCacheTierTooSmall"},
    ),
    "idle": (Engine(stored=0, restored=0, decisions={"refill": 0}, requests=0), set()),
    "Redis heard": (Engine(redis_up=1, pool_engines=3), set()),
    "Redis down": (Engine(redis_up=0, pool_engines=1), {"EfficientLMCacheRedisDown"}),
    "Redis was down when the last agent left": (
        Engine(redis_up=0, pool_engines=1, decisions={"refill": 0}, requests=0),
        set(),
    ),
    "Redis down, says the exporter": (Engine(exporter_hears=0), {"EfficientLMCacheRedisDown"}),
}


def promtool_says(engine: Engine, directory: Path) -> str:
    """Its report on the claim that no alert fires in the end: it names those that do, with their texts."""
    checks = [{"eval_time": f"{_MINUTES}m", "alertname": name, "exp_alerts": []} for name in alerts()]
    tests = [{"interval": "1m", "input_series": engine.series(), "alert_rule_test": checks}]
    file = directory / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    result = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    said = result.stdout + result.stderr
    assert ("SUCCESS" in said) == (result.returncode == 0)
    assert "SUCCESS" in said or 'alertname="' in said, said
    return said


@pytest.mark.parametrize("scene", SCENES)
def test_what_fires(scene: str, tmp_path: Path) -> None:
    engine, expected = SCENES[scene]
    said = promtool_says(engine, tmp_path)
    assert {name for name in alerts() if f'alertname="{name}"' in said} == expected


def test_the_alert_on_thrashing_prints_the_memory_that_is_needed(tmp_path: Path) -> None:
    engine, _ = SCENES["thrashing under plain offload"]
    assert "give the tier at least 22.0 GiB per rank" in promtool_says(engine, tmp_path)
