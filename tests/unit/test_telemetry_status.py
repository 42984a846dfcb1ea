"""A deployment in a table and for Prometheus."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.cells import cell_len
from rich.console import Console

from efficient_lmcache.core.observation import HASH_RANGE, Observation
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import observation, redis_keys, report
from efficient_lmcache.telemetry.cluster import ClusterView
from efficient_lmcache.telemetry.exporter import POOL_GAUGES, RANK_COUNTERS, RANK_GAUGES, ClusterCollector
from efficient_lmcache.telemetry.shared_probe import SHARED_TIER_PREFIX
from efficient_lmcache.telemetry.status import ClusterStatus, cluster_status
from efficient_lmcache.telemetry.watch import notes, table

REPORT = TierReport("engine", 1, 256, 1024, 90, 100, 3, 40)
SEEN = Observation("engine", 1, 60.0, (1, 2), HASH_RANGE, 4, 4, 400, True)


def hear(view: ClusterView, engine: str, age_s: float = 0.0, rank: int = 0, tasks: tuple[int, ...] = (1, 2)) -> None:
    tier = replace(REPORT, engine_id=engine, rank=rank)
    view.receive(redis_keys.tier_key("default", engine, rank), report.encode(tier), age_s)
    seen = replace(SEEN, engine_id=engine, task_hashes=tasks)
    view.receive(redis_keys.pool_key("default", engine), observation.encode(seen), age_s)


def printed(status: ClusterStatus, width: int = 80, max_rows: int | None = None) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width).print(table(status, max_rows))
    return output.getvalue().splitlines()


@pytest.fixture
def view() -> ClusterView:
    return ClusterView()


def test_a_tier_that_engines_share_is_a_row_of_its_own_and_no_engine(view):
    for engine in "ab":
        view.receive(redis_keys.pool_key("default", engine), observation.encode(replace(SEEN, engine_id=engine)))
    name = SHARED_TIER_PREFIX + "7c1f/1x262144"
    view.receive(redis_keys.tier_key("default", name, 0), report.encode(replace(REPORT, engine_id=name)))
    status = cluster_status(view, 10.0)
    assert [row.engine_id for row in status.engines] == ["a", "b", name]
    assert (status.engine_count, status.capacity_chunks) == (2, 100)


def test_an_empty_table_says_what_may_be_wrong_and_garbage_is_not_silent(view):
    (empty,) = notes(cluster_status(view, 10.0))
    assert "no engine has said anything yet" in empty.plain
    hear(view, "a")
    assert not notes(cluster_status(view, 10.0))
    view.receive(redis_keys.pool_key("default", "a"), b"garbage", 0.0)
    (garbage,) = notes(cluster_status(view, 10.0))
    assert garbage.plain.startswith("1 messages were no telemetry")


def test_rows_are_joined_by_engine_and_the_pool_is_summed(view):
    hear(view, "b", tasks=(2, 3))
    hear(view, "a", rank=1)
    hear(view, "a", rank=0)
    view.receive(redis_keys.pool_key("default", "c"), observation.encode(replace(SEEN, engine_id="c", pressure=None)))
    status = cluster_status(view, 10.0)
    assert [(row.engine_id, row.rank, row.tier is not None) for row in status.engines] == [
        ("a", 0, True),
        ("a", 1, True),
        ("b", 0, True),
        ("c", 0, False),
    ]
    record = status.record("default")
    assert record["pool"] == {
        "engines": 3,
        "engines_under_pressure": 2,
        "active_tasks": 3,
        "mean_prompt_tokens": 100.0,
        "window_lookups": 12,
        "tier_registered_chunks": 270,
        "tier_capacity_chunks": 300,
        "tier_evicted_chunks_window": 9,
    }
    assert json.loads(json.dumps(record)) == record
    assert record["engines"][3]["tier_occupancy_ratio"] is None
    assert record["engines"][3]["active_pool_tasks"] == 2


def test_who_is_silent_too_long_is_left_out(view):
    hear(view, "old", age_s=20.0)
    hear(view, "new", age_s=2.0)
    assert [row.engine_id for row in cluster_status(view, 10.0).engines] == ["new"]
    assert cluster_status(view, 10.0).engines[0].age_s >= 2.0
    assert cluster_status(view, 30.0).engine_count == 2
    assert cluster_status(view, 1.0).record("default")["engines"] == []


def test_the_table_fits_80_columns_whatever_the_engines_are_called(view):
    hear(view, "[bold]not markup[/]")
    hear(view, "x" * 300)
    hear(view, "zwei\nZeilen\x1b[2J")
    lines = printed(cluster_status(view, 10.0))
    assert max(map(cell_len, lines)) <= 80
    assert any("zwei·Zeilen·[2J" in line for line in lines)
    assert any("[bold]not mar" in line for line in lines)
    assert any(line.split() == ["pool", "of", "3", "90%", "9", "3", "of", "3", "2", "100"] for line in lines)


def test_an_empty_deployment_has_a_table_too(view):
    assert any("pool of 0" in line for line in printed(cluster_status(view, 10.0)))


def test_more_engines_than_lines_leave_room_for_the_pool(view):
    for number in range(64):
        hear(view, f"engine-{number:02}")
    lines = printed(cluster_status(view, 10.0), max_rows=5)
    assert sum("engine-" in line for line in lines) == 5
    assert any("59 more" in line for line in lines)
    assert any("pool of 64" in line for line in lines)


def test_prometheus_reads_every_metric_and_stale_engines_have_none(view):
    registry = CollectorRegistry()
    registry.register(ClusterCollector("default", lambda: cluster_status(view, 10.0), lambda: True))
    hear(view, 'na"me\\\n')
    hear(view, "stale", age_s=11.0)
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    prefix = "efficient_lmcache:cluster_"
    expected = {*RANK_GAUGES, *RANK_COUNTERS, *(f"pool_{name}" for name in POOL_GAUGES), "redis_up", "bad_messages"}
    assert set(families) == {prefix + name for name in expected}
    assert all(family.documentation for family in families.values())
    labels = {"deployment": "default", "engine": 'na"me\\\n', "rank": "0"}
    for name in (*RANK_GAUGES, *RANK_COUNTERS):
        assert [sample.labels for sample in families[prefix + name].samples] == [labels], name
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values[prefix + "tier_occupancy_ratio"] == 0.9
    assert values[prefix + "tier_evicted_chunks"] == 40
    assert (values[prefix + "pressure"], values[prefix + "pool_active_tasks"]) == (1.0, 2.0)
    assert families[prefix + "pool_engines"].samples[0].labels == {"deployment": "default"}


def test_the_age_grows_between_scrapes(view):
    hear(view, "engine")
    first = cluster_status(view, 60.0).engines[0].age_s
    time.sleep(0.01)
    assert cluster_status(view, 60.0).engines[0].age_s > first
