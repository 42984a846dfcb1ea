"""Two tiers with a decision each, inside real vLLM with real LMCache: a CPU tier of 16 chunks, prompts of six."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh_process
import pytest
from redis_process import RedisProcess

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.redis_tier import RedisTierReader, RemoteChunks, redis_address

pytestmark = pytest.mark.integration

PROMPT_TOKENS = 6 * 256
CHUNK_BYTES = 256 * 1024


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path)
    yield process
    process.kill()


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_a_refill_enters_redis_and_not_the_cpu_tier_as_long_as_redis_has_room(small_model, redis, tmp_path):
    result = fresh_process.run(
        "remote_tier_scenarios:redis_tier",
        model=small_model,
        redis_url=redis.url,
        kill_pid=redis.process.pid,
        decision_log=str(tmp_path / "decisions.jsonl"),
    )
    assert column(result["filling"], "cpu") == ["no_pressure"] * 3 + ["refill"]

    # A Redis without a limit is under no pressure.
    declined, again = result["declined"], result["again"]
    assert column(declined, "cpu") == ["refill"] * 2
    assert column(declined, "remote") == ["no_pressure"] * 2
    assert column(declined, "remote_capacity_bytes") == [None] * 2
    assert column(declined, "residents_changed") == [False] * 2
    assert result["declined_keys"] == 2 * 6 * 2  # a chunk has two keys

    # They come back from Redis and stay out of the CPU tier; what that holds comes from there.
    assert column(again, "restored_tokens") == [PROMPT_TOKENS] * 3
    assert column(again, "cpu_match_tokens") == [0, 0, PROMPT_TOKENS]
    assert column(again, "remote_match_tokens") == [PROMPT_TOKENS] * 3
    assert column(again, "cpu") == ["refill", "refill", "extension"]
    assert column(again, "residents_changed") == [False] * 3
    assert column(again, "output") == [*column(declined, "output"), result["filling"][2]["output"]]

    # A Redis that is full and evicting declines refills as well; with more memory it takes them again.
    assert column(result["thrashing"], "remote") == ["refill"] * 3
    assert column(result["thrashing"], "remote_capacity_bytes") == [8 * 1024**2] * 3
    assert column(result["ample"], "remote") == ["no_pressure"]

    # Dead, it costs no request.
    assert column(result["dead"], "restored_tokens") == [0, 0]
    assert result["dead"][0]["output"] == declined[0]["output"]

    metrics = {name.removeprefix("efficient_lmcache:"): value for name, value in result["metrics"].items()}
    assert metrics["remote_decisions_total[refill]"] == 3
    assert metrics["remote_declined_chunks_total"] == 3 * 6
    assert metrics["unpromoted_chunks_total"] == 2 * 6
    assert metrics["remote_dropped_stores_total"] == 0
    assert metrics["evicted_chunks_total"] == 2  # by the third task, before there was pressure
    assert metrics["remote_evicted_chunks_window"] > 0
    assert set(result["state"].values()) == {0}


def test_a_disk_which_reports_nothing_takes_what_the_cpu_tier_declines(small_model, tmp_path):
    directory = tmp_path / "disk"
    result = fresh_process.run(
        "remote_tier_scenarios:local_disk",
        model=small_model,
        directory=str(directory),
        decision_log=str(tmp_path / "decisions.jsonl"),
    )
    rows = result["rows"]
    assert column(rows, "cpu") == ["no_pressure"] * 3 + ["refill"] * 4
    assert column(rows, "remote") == ["no_pressure"] * 7
    assert column(rows, "remote_capacity_bytes") == [None] * 7
    assert column(rows[3:], "residents_changed") == [False] * 4
    assert result["files"] == 6 * 6
    assert rows[-1]["restored_tokens"] == PROMPT_TOKENS
    assert rows[-1]["output"] == rows[4]["output"]


class TestARedisSaysOfItself:
    def read(self, redis: RedisProcess, capacity_bytes: int | None = None, ranks: int = 1) -> RedisTierReader:
        chunks = RemoteChunks("engine", 256, CHUNK_BYTES, ranks, capacity_bytes)
        address = redis_address(redis.url, {})
        assert address is not None
        return RedisTierReader(address, chunks, window_s=60.0)

    def report(self, reader: RedisTierReader, now_s: float = 0.0) -> TierReport:
        report = reader.latest(now_s)
        assert report is not None
        return report

    def test_nothing_where_it_has_no_limit_and_nobody_knows_one(self, redis):
        assert self.read(redis).latest(0.0) is None

    def test_the_configured_capacity_where_it_has_no_limit(self, redis):
        report = self.report(self.read(redis, capacity_bytes=400 * CHUNK_BYTES, ranks=4))
        assert (report.capacity_chunks, report.evicted_chunks) == (100, 0)
        assert not report.full_and_evicting(0.0)

    def test_its_own_limit_before_the_configured_one_and_its_evictions_in_the_window(self, redis):
        redis.cli("config", "set", "maxmemory", "10mb")
        redis.cli("config", "set", "maxmemory-policy", "allkeys-lru")
        reader = self.read(redis, capacity_bytes=1)
        assert self.report(reader).capacity_chunks == 40
        assert self.report(reader).occupancy < 0.3
        for chunk in range(60):
            redis.cli("setrange", f"chunk-{chunk}", str(CHUNK_BYTES - 1), "x")
        full = self.report(reader, now_s=1.0)
        assert full.occupancy >= 0.95
        assert full.evicted_chunks == full.evicted_chunks_total > 0
        assert full.full_and_evicting(0.95)
        later = self.report(reader, now_s=100.0)
        assert (later.evicted_chunks, later.evicted_chunks_total) == (0, full.evicted_chunks_total)

    def test_the_same_to_a_login_as_lmcache_has_it_for_resp(self, redis):
        redis.cli("config", "set", "maxmemory", "10mb")
        redis.cli("acl", "setuser", "engines", "on", ">hunter2", "+info")
        address = redis_address(
            redis.url.replace("redis://", "resp://"), {"username": "engines", "password": "hunter2"}
        )
        assert address is not None
        reader = RedisTierReader(address, RemoteChunks("engine", 256, CHUNK_BYTES, 1, None), window_s=60.0)
        assert self.report(reader).capacity_chunks == 40

    def test_an_old_report_stays_while_it_is_gone_and_evictions_count_on_after_a_restart(self, redis):
        redis.cli("config", "set", "maxmemory", "10mb")
        reader = self.read(redis)
        before = self.report(reader, now_s=1.0)
        redis.kill()
        assert reader.latest(2.0) == before
        redis.restart()
        redis.cli("config", "set", "maxmemory", "20mb")
        after = self.report(reader, now_s=3.0)
        assert (after.capacity_chunks, after.received_s) == (80, 3.0)
