"""A and N of the pool at a lookup: the newest snapshot, and this engine's lookups since."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.observation import MAX_TASK_HASHES, pool_estimate, pool_tasks
from efficient_lmcache.telemetry.pool import Lookup, Observer, PoolSnapshot, TaskHasher
from efficient_lmcache.telemetry.pool_now import PoolNow

SALT = b"salt of sixteen."


class Pool:
    """Some engines, whose observations each hears of when `exchange` says so."""

    def __init__(self, engines: int) -> None:
        self.observers = [Observer(f"engine-{number}", 60.0, 256) for number in range(engines)]
        self.sources = [SimpleNamespace(snapshot=None) for _ in range(engines)]
        self.now = [PoolNow(source) for source in self.sources]
        self.sequence = 0

    def look_up(self, engine: int, task: str, prompt_tokens: int, now_s: float, named: bool = True):
        estimate = self.now[engine].at_lookup(task, None, named, prompt_tokens, now_s)
        self.observers[engine].lookups.append(Lookup(task, None, named, prompt_tokens, now_s, False))
        return estimate

    def exchange(self, now_s: float, salt: bytes = SALT) -> None:
        self.sequence += 1
        seen = [observer.observation(self.sequence, salt, now_s) for observer in self.observers]
        for number, source in enumerate(self.sources):
            hasher = TaskHasher(salt, f"engine-{number}")
            source.snapshot = PoolSnapshot(pool_estimate(seen), pool_tasks(seen), hasher, now_s)


def test_nothing_is_known_before_the_first_snapshot():
    assert Pool(1).look_up(0, "task", 1000, 0.0) is None


def test_a_task_that_moves_to_another_engine_is_not_counted_twice():
    pool = Pool(2)
    for task in range(10):
        pool.look_up(task % 2, str(task), 1000, 0.0)
    pool.exchange(1.0)
    for task in range(10):
        estimate = pool.look_up((task + 1) % 2, str(task), 1000, 2.0)
    assert (estimate.active_pool, estimate.mean_prompt_tokens, estimate.engines) == (10, 1000.0, 2)
    assert pool.look_up(0, "new", 1000, 2.5).active_pool == 11
    assert pool.look_up(0, "new", 1000, 2.6).active_pool == 11


def test_a_lookup_that_a_snapshot_has_missed_still_counts_after_it():
    pool = Pool(1)
    pool.look_up(0, "old", 1000, 0.0)
    pool.exchange(1.0)
    # Looked up while the observation was on its way: the next snapshot is of an earlier moment.
    pool.look_up(0, "late", 3000, 2.0)
    source = pool.sources[0]
    source.snapshot = source.snapshot._replace(seen_s=1.5)
    estimate = pool.look_up(0, "old", 1000, 2.1)
    assert estimate.active_pool == 2
    assert estimate.mean_prompt_tokens == pytest.approx((1000 + 3000 + 1000) / 3)


def test_after_a_new_salt_tasks_are_known_again():
    pool = Pool(2)
    pool.look_up(0, "task", 1000, 0.0)
    pool.exchange(1.0)
    pool.look_up(0, "task", 1000, 1.5)
    pool.exchange(2.0, salt=b"another salt")
    assert pool.look_up(1, "task", 1000, 2.5).active_pool == 1


def test_an_extrapolated_pool_is_not_counted_up_by_tasks_that_no_message_lists():
    pool = Pool(1)
    for task in range(2 * MAX_TASK_HASHES):
        pool.look_up(0, str(task), 1000, 0.0)
    pool.exchange(1.0)
    before = pool.sources[0].snapshot.estimate.active_pool
    assert before == pytest.approx(2 * MAX_TASK_HASHES, rel=0.1)
    for task in range(2 * MAX_TASK_HASHES):
        after = pool.look_up(0, str(task), 1000, 2.0)
    assert after.active_pool == before


steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(1, 9000), st.booleans(), st.booleans()), max_size=60
)


@given(steps)
def test_it_counts_what_the_snapshot_and_the_engines_own_lookups_hold_together(rows):
    """A is exact for whoever knows all lookups up to the last exchange and this engine's since."""
    pool = Pool(3)
    pool.exchange(0.0)
    known: set[tuple[str, bool]] = set()
    own: list[set[tuple[str, bool]]] = [set(), set(), set()]
    for number, (engine, task, prompt_tokens, named, exchanged) in enumerate(rows, start=1):
        now_s = 0.1 * number
        name = str(task) if named else f"{engine}-{task}"
        own[engine].add((name, named))
        estimate = pool.look_up(engine, name, prompt_tokens, now_s, named)
        assert estimate.active_pool == len(known | own[engine])
        assert 0 < estimate.mean_prompt_tokens <= 9000
        if exchanged:
            pool.exchange(now_s + 0.05)
            known = set().union(known, *own)
