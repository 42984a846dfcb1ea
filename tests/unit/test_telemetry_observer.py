"""What an engine says of the lookups it saw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.observation import pool_estimate
from efficient_lmcache.telemetry.observation import encode
from efficient_lmcache.telemetry.pool import MAX_WAITING_LOOKUPS, Lookup, Observer

SALT = b"salt of sixteen."


def looked_up(*tasks: str, engine: str = "engine", tenant: str | None = None, named: bool = True) -> Observer:
    observer = Observer(engine, 60.0, 256)
    observer.lookups.extend(Lookup(task, tenant, named, 1000, 0.0, False) for task in tasks)
    return observer


def test_a_named_task_is_one_task_on_all_engines() -> None:
    seen = [looked_up("fix-1", "fix-2", engine=engine).observation(0, SALT, 1.0) for engine in ("a", "b")]
    assert seen[0].task_hashes == seen[1].task_hashes
    assert pool_estimate(seen).active_pool == 2


def test_an_inferred_name_means_nothing_elsewhere() -> None:
    seen = [looked_up("inferred-1", engine=engine, named=False).observation(0, SALT, 1.0) for engine in ("a", "b")]
    assert pool_estimate(seen).active_pool == 2
    named = looked_up("inferred-1", engine="a").observation(0, SALT, 1.0)
    assert pool_estimate([named, seen[0]]).active_pool == 2


def test_tenants_who_use_the_same_name_have_two_tasks() -> None:
    seen = [looked_up("fix-1", tenant=tenant).observation(0, SALT, 1.0) for tenant in (None, "", "x", "y")]
    assert pool_estimate(seen).active_pool == 4


def test_neither_names_nor_tenants_travel_and_another_salt_gives_other_hashes() -> None:
    observer = looked_up("a-secret-task", tenant="a-secret-tenant")
    seen = observer.observation(0, SALT, 1.0)
    assert b"secret" not in encode(seen)
    resalted = observer.observation(1, b"another salt", 1.0)
    assert set(resalted.task_hashes).isdisjoint(seen.task_hashes)
    assert observer.observation(2, SALT, 1.0).task_hashes == seen.task_hashes


lookups = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9000), st.floats(0, 30)), max_size=60)


@given(lookups, st.integers(1, 9), st.floats(0, 90))
def test_an_observation_is_a_recount_of_its_window(rows, prompt_window, idle_s):
    observer, now_s, history = Observer("engine", 60.0, prompt_window), 0.0, []
    for number, (task, prompt_tokens, wait_s) in enumerate(rows):
        now_s += wait_s
        history.append((task, prompt_tokens, now_s))
        observer.lookups.append(Lookup(str(task), None, True, prompt_tokens, now_s, number % 2 == 0))
        if number % 7 == 0:
            observer.observation(number, SALT, now_s)
    now_s += idle_s
    seen = observer.observation(100, SALT, now_s)
    prompts = [prompt_tokens for _, prompt_tokens, _ in history[-prompt_window:]]
    assert len(seen.task_hashes) == len({task for task, _, seen_s in history if seen_s >= now_s - 60.0})
    assert (seen.prompt_lookups, seen.prompt_tokens) == (len(prompts), sum(prompts))
    inside = [sum(seen_s > now_s - 60.0 - slack_s for _, _, seen_s in history) for slack_s in (0.0, 0.5)]
    assert inside[0] <= seen.window_lookups <= inside[1]
    assert seen.pressure == (len(rows) % 2 == 1 if seen.window_lookups else None)


def test_a_queue_that_nobody_empties_stays_bounded() -> None:
    observer = looked_up(*("task" for _ in range(MAX_WAITING_LOOKUPS + 10)))
    assert len(observer.lookups) == MAX_WAITING_LOOKUPS
    assert observer.observation(0, SALT, 1.0).window_lookups == MAX_WAITING_LOOKUPS


@pytest.mark.parametrize("task", ["", "a/b c", "\udc80", "x" * 10_000])
def test_any_task_name_has_a_hash(task: str) -> None:
    assert len(looked_up(task).observation(0, SALT, 1.0).task_hashes) == 1
