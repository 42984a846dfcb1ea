"""One decision per request and tier, by the same law, and how the workers hear of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.connector.admission import DecisionLog, NoReports, RequestAdmission
from efficient_lmcache.connector.remote import RemoteAdmission
from efficient_lmcache.connector.tier_writes import ON, SKIP_SAVE_KEY, TierWrites
from efficient_lmcache.core.admission import ADMISSIONS, AdmissionParameters
from efficient_lmcache.core.observation import PoolEstimate
from efficient_lmcache.core.tasks import TaskInference
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.redis_tier import RemoteChunks, redis_address

CHUNK_TOKENS = 256
BETA = 1024
CHUNK_BYTES = CHUNK_TOKENS * BETA
CPU_TIER = AdmissionParameters(CHUNK_TOKENS, BETA, 16 * CHUNK_BYTES, write_threshold_chunks=2)


class Counted:
    """Stands in for `StatsCollector`, which needs vLLM."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []

    def add_decision(self, *decisions: Any) -> None:
        self.decisions.append(decisions)


class Scheduler:
    """Lookups of one engine, which has a remote tier unless `remote_bytes` is 0."""

    def __init__(
        self,
        remote_bytes: int | None,
        admission: str = "conditioned",
        cpu_match_tokens: int | None = None,
        pool: PoolEstimate | None = None,
        log: str | None = None,
    ) -> None:
        policy = ADMISSIONS[admission](CPU_TIER)
        remote = None
        if remote_bytes != 0:
            parameters = replace(CPU_TIER, configured_capacity_bytes=remote_bytes)
            remote = RemoteAdmission(
                ADMISSIONS[admission](parameters), NoReports(), lambda: pool, lambda _: cpu_match_tokens
            )
        self.counted = Counted()
        self.admission = RequestAdmission(
            policy,
            TaskInference(CHUNK_TOKENS),
            NoReports(),
            clock=lambda: 0.0,
            stats=self.counted,  # type: ignore[arg-type]
            decision_log=DecisionLog(log, policy, lambda: 0.0, "engine-7") if log else None,
            remote=remote,
        )
        self._requests = 0

    def look_up(self, task: int, prompt_tokens: int, match_tokens: int = 0) -> Any:
        self._requests += 1
        request = SimpleNamespace(
            request_id=f"request-{self._requests}",
            kv_transfer_params={"efficient_lmcache.task_id": f"task-{task}"},
            cache_salt=None,
            num_prompt_tokens=prompt_tokens,
            sampling_params=SimpleNamespace(extra_args=None),
        )
        self.admission.on_lookup(request, lambda _: match_tokens)
        self.admission.on_scheduled(request)
        return request


def params(request: Any) -> dict[str, Any]:
    return (request.sampling_params.extra_args or {}).get("kv_transfer_params", {})


def fill_pool(scheduler: Scheduler, tasks: int = 8) -> None:
    for task in range(tasks):
        scheduler.look_up(task, 10 * CHUNK_TOKENS, 10 * CHUNK_TOKENS)


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("remote", [True, False])
def test_workers_hear_what_the_tiers_decided(cpu, remote):
    writes = TierWrites(cpu, remote)
    sent = writes.transfer_params()
    assert TierWrites.of({"lmcache.tag.any": "thing", **sent}) == writes
    assert (SKIP_SAVE_KEY in sent) == (not cpu and not remote)
    assert all(key.startswith("lmcache.") and not key.startswith("lmcache.tag.") for key in sent)


def test_plain_lmcache_is_both_tiers():
    both = TierWrites(cpu=True, remote=True)
    assert both.transfer_params() == {}
    assert TierWrites.of(None) == TierWrites.of({}) == both


@pytest.mark.parametrize(
    ("remote_chunks", "expected"),
    [
        (None, TierWrites(cpu=False, remote=True)),  # nobody knows
        (1000, TierWrites(cpu=False, remote=True)),
        (20, TierWrites(cpu=False, remote=False)),
    ],
)
def test_a_refill_is_declined_by_the_tiers_that_the_pool_exceeds(remote_chunks, expected):
    scheduler = Scheduler(None if remote_chunks is None else remote_chunks * CHUNK_BYTES)
    fill_pool(scheduler)
    request = scheduler.look_up(0, 10 * CHUNK_TOKENS)
    assert params(request) == expected.transfer_params()
    assert [decision.save for decision in scheduler.counted.decisions[-1]] == list(expected)


def test_without_a_remote_tier_a_declined_request_is_told_lmcaches_own_switch_alone():
    scheduler = Scheduler(remote_bytes=0)
    fill_pool(scheduler)
    assert params(scheduler.look_up(0, 10 * CHUNK_TOKENS)) == {SKIP_SAVE_KEY: ON}


def test_what_would_be_restored_from_the_remote_tier_counts_as_written_to_the_cpu_tier():
    scheduler = Scheduler(1000 * CHUNK_BYTES, cpu_match_tokens=5 * CHUNK_TOKENS)
    fill_pool(scheduler)
    scheduler.look_up(0, 10 * CHUNK_TOKENS, match_tokens=9 * CHUNK_TOKENS)
    cpu, remote = scheduler.counted.decisions[-1]
    assert (cpu.new_full_chunks, remote.new_full_chunks) == (5, 1)
    assert (cpu.save, remote.save) == (False, True)


def test_the_remote_tier_is_held_against_the_pool_and_the_cpu_tier_against_this_engine():
    pool = PoolEstimate(active_pool=100, mean_prompt_tokens=10.0 * CHUNK_TOKENS, window_lookups=100, engines=10)
    scheduler = Scheduler(500 * CHUNK_BYTES, pool=pool)
    request = scheduler.look_up(0, 10 * CHUNK_TOKENS)
    assert params(request) == TierWrites(cpu=True, remote=False).transfer_params()


def test_a_decision_stays_for_the_next_inputs_of_a_streaming_session():
    scheduler = Scheduler(None)
    fill_pool(scheduler)
    request = scheduler.look_up(0, 10 * CHUNK_TOKENS)
    decided = params(request)
    request.sampling_params = SimpleNamespace(extra_args=None)
    scheduler.admission.on_scheduled(request)
    assert params(request) == decided != {}


def test_the_decision_log_has_both_decisions(tmp_path):
    log = tmp_path / "decisions.jsonl"
    scheduler = Scheduler(None, log=str(log))
    fill_pool(scheduler)
    scheduler.look_up(0, 10 * CHUNK_TOKENS)
    row = json.loads(log.read_text().splitlines()[-1])
    assert (row["outcome"], row["remote"]["outcome"]) == ("refill", "no_pressure")
    assert row["remote"].keys() == row.keys() - {"request_id", "engine_id", "now_s", "admission", "remote"}
    assert row["engine_id"] == "engine-7"


lookups = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 16), st.integers(0, 16)), max_size=40)


@given(lookups, st.sampled_from(sorted(ADMISSIONS)))
def test_tiers_of_the_same_size_decide_alike(turns, admission):
    scheduler = Scheduler(CPU_TIER.configured_capacity_bytes, admission)
    for task, prompt, match in turns:
        scheduler.look_up(task, prompt * CHUNK_TOKENS, min(prompt, match) * CHUNK_TOKENS)
    for cpu, remote in scheduler.counted.decisions:
        assert cpu.record() == remote.record()


@given(lookups, st.sampled_from([None, CHUNK_BYTES, 2**40]))
def test_a_remote_tier_changes_nothing_of_what_the_cpu_tier_decides(turns, remote_bytes):
    alone, beside = Scheduler(0), Scheduler(remote_bytes)
    for scheduler in (alone, beside):
        for task, prompt, match in turns:
            scheduler.look_up(task, prompt * CHUNK_TOKENS, min(prompt, match) * CHUNK_TOKENS)
    assert [cpu for cpu, _ in alone.counted.decisions] == [cpu for cpu, _ in beside.counted.decisions]


def test_a_capacity_is_shared_by_the_ranks_that_store():
    chunks = RemoteChunks("engine", CHUNK_TOKENS, CHUNK_BYTES, ranks=4, capacity_bytes=4 * 2**30)
    assert chunks.capacity_bytes_per_rank == 2**30
    assert replace(chunks, capacity_bytes=None).capacity_bytes_per_rank is None


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("redis://host:6379", "redis://host:6379"),
        ("rediss://user:secret@host:6380/1", "rediss://user:secret@host:6380/1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("resp://host:6379", "redis://host:6379"),
        ("redis-cluster://host:7000,other:7000", None),
        ("redis-sentinel://host:26379", None),
        ("fs://host:0/directory", None),
        (None, None),
    ],
)
def test_a_single_redis_is_asked_and_nothing_else(url, asked):
    address = redis_address(url, {"username": "", "password": "hunter2"})
    assert (address.url if address else None) == asked
    assert "secret" not in repr(address)
    assert "hunter2" not in repr(address)


def test_lmcaches_login_for_resp_is_used_where_it_is():
    address = redis_address("resp://host:6379", {"username": "", "password": "hunter2"})
    assert address is not None
    assert dict(address.login) == {"password": "hunter2"}
    assert address.keys_per_chunk == 1


def test_reports_of_a_remote_tier_are_tier_reports():
    report = TierReport("engine", 1, CHUNK_TOKENS, CHUNK_BYTES, 16, 16, 1, 1, received_s=0.0)
    policy = ADMISSIONS["conditioned"](replace(CPU_TIER, configured_capacity_bytes=None))
    remote = RemoteAdmission(policy, SimpleNamespace(report=report), lambda: None, lambda _: None)
    scheduler = Scheduler(0)
    fill_pool(scheduler)
    for decision, _ in scheduler.counted.decisions:
        latest = remote.decide(decision.request._replace(host_match_tokens=0), 0.0)
    assert latest.pressure
    assert latest.capacity_bytes == 16 * CHUNK_BYTES
