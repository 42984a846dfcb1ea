"""What a process knows of its deployment's engines, message by message."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.observation import HASH_RANGE, Observation
from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import observation, redis_keys, report
from efficient_lmcache.telemetry.cluster import FORGET_AFTER_S, ClusterView, OwnReports

REPORT = TierReport("engine", 1, 256, 262_144, 90, 100, 3, 40)
SEEN = Observation("engine", 1, 60.0, (1, 2), HASH_RANGE, 4, 4, 400)
TIER = redis_keys.tier_key("default", "engine", 0)
POOL = redis_keys.pool_key("default", "engine")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> ClusterView:
    return ClusterView(clock)


engine_ids = st.text(min_size=1, max_size=60).filter(lambda name: name.isprintable())


@given(engine_ids, st.integers(0, 999))
def test_keys_name_any_engine(engine_id: str, rank: int) -> None:
    assert redis_keys.parse(redis_keys.tier_key("a.b-c", engine_id, rank)) == ("tier", engine_id, rank)
    assert redis_keys.parse(redis_keys.pool_key("a.b-c", engine_id)) == ("pool", engine_id, 0)


@given(st.text(max_size=60))
def test_no_other_key_is_taken_for_one(key: str) -> None:
    assert redis_keys.parse(key) is None
    assert redis_keys.parse("efficient-lmcache:default:index" + key) is None


@pytest.mark.parametrize("deployment", ["", "a:b", "a*", "a b", "ä", "x" * 65, "a\n"])
def test_a_deployment_that_could_mean_other_channels_is_refused(deployment: str) -> None:
    with pytest.raises(ValueError, match="deployment is"):
        redis_keys.prefix(deployment)


def test_messages_are_stamped_with_the_receivers_clock(view: ClusterView, clock: Clock) -> None:
    view.receive(TIER, report.encode(REPORT))
    view.receive(POOL, observation.encode(SEEN), 2.0)
    assert view.tier("engine") == replace(REPORT, received_s=1000.0)
    assert view.observations(60.0) == [replace(SEEN, received_s=998.0)]
    clock.now_s = 1004.0
    assert view.tiers(5.0) != []
    assert view.observations(5.0) == []


def test_a_sequence_already_seen_does_not_become_fresh(view: ClusterView, clock: Clock) -> None:
    view.receive(TIER, report.encode(replace(REPORT, sequence=5)))
    clock.now_s += 3
    for sequence in (5, 4):
        view.receive(TIER, report.encode(replace(REPORT, sequence=sequence)))
    assert view.tiers(2.0) == []
    view.receive(TIER, report.encode(replace(REPORT, sequence=6)))
    assert [seen.sequence for seen in view.tiers(2.0)] == [6]


def test_ranks_and_engines_are_kept_apart(view: ClusterView) -> None:
    for engine, rank in (("b", 0), ("a", 1), ("a", 0)):
        payload = report.encode(replace(REPORT, engine_id=engine, rank=rank))
        view.receive(redis_keys.tier_key("default", engine, rank), payload)
    assert [(seen.engine_id, seen.rank) for seen in view.tiers(1.0)] == [("a", 0), ("a", 1), ("b", 0)]


def test_an_empty_message_withdraws(view: ClusterView) -> None:
    view.receive(TIER, report.encode(REPORT))
    view.receive(POOL, observation.encode(SEEN))
    view.receive(TIER, b"")
    assert view.tier("engine") is None
    assert len(view.observations(1.0)) == 1
    view.receive(POOL, b"")
    assert view.observations(1.0) == []


def test_what_is_long_silent_is_forgotten_and_may_start_over(view: ClusterView, clock: Clock) -> None:
    view.receive(TIER, report.encode(replace(REPORT, sequence=50)))
    clock.now_s += FORGET_AFTER_S + 1
    other = replace(REPORT, engine_id="other")
    view.receive(redis_keys.tier_key("default", "other", 0), report.encode(other))
    assert view.tier("engine") is None
    view.receive(TIER, report.encode(REPORT))
    assert view.tier("engine") is not None


@pytest.mark.parametrize(
    ("key", "payload"),
    [
        (TIER, b"garbage"),
        (TIER, b"\x00" * 100_000),
        (TIER, report.encode(replace(REPORT, engine_id="stranger"))),
        (TIER, report.encode(replace(REPORT, rank=1))),
        (TIER, observation.encode(SEEN)),
        (POOL, report.encode(REPORT)),
        (POOL, b"\xc1"),
        ("efficient-lmcache:default:else:engine", b"x"),
        ("unrelated", b""),
    ],
)
def test_what_is_no_message_of_its_key_is_counted_and_said_once(
    key: str, payload: bytes, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []
    view = ClusterView(clock, on_bad_message=lambda: heard.append(1))
    view.receive(TIER, report.encode(REPORT))
    view.receive(POOL, observation.encode(SEEN))
    known = view.tiers(1.0), view.observations(1.0)
    for _ in range(3):
        view.receive(key, payload)
        view.receive(TIER, report.encode(REPORT))
    assert (view.tiers(1.0), view.observations(1.0)) == known
    assert (view.bad_messages, len(heard)) == (3, 3)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_made_up_engines_do_not_fill_the_memory(view: ClusterView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efficient_lmcache.telemetry.cluster._MAX_MESSAGES", 10)
    for number in range(30):
        seen = replace(REPORT, engine_id=f"engine-{number}")
        view.receive(redis_keys.tier_key("default", seen.engine_id, 0), report.encode(seen))
    assert len(view.tiers(1.0)) == 10
    assert view.bad_messages == 20


def test_an_engine_reads_its_own_reports_only(view: ClusterView) -> None:
    reader = OwnReports(view, "engine")
    view.receive(redis_keys.tier_key("default", "other", 0), report.encode(replace(REPORT, engine_id="other")))
    assert reader.latest(0.0) is None
    view.receive(TIER, report.encode(REPORT))
    assert reader.latest(0.0) == view.tier("engine")
    reader.close()
