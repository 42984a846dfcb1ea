from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from efficient_lmcache.telemetry.eviction_window import RESOLUTION_S, EvictionWindow

WINDOW_S = 60.0
# Multiples of 1/64 s: sums and differences are exact, so the bounds below can be checked to the last bit.
TICKS = st.one_of(st.integers(0, 32), st.integers(59 * 64, 61 * 64))
GAPS_S = TICKS.map(lambda ticks: ticks / 64)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(GAPS_S, st.integers(0, 5), st.booleans()), max_size=60))
def test_an_eviction_counts_for_the_window_and_at_most_one_resolution_longer(
    steps: list[tuple[float, int, bool]],
) -> None:
    window = EvictionWindow(WINDOW_S)
    history: list[tuple[float, int]] = []
    now_s = 1000.0
    for gap_s, count, look in steps:
        now_s += gap_s
        window.add(count, now_s)
        history.append((now_s, count))
        if look:
            at_least = sum(count for time_s, count in history if now_s - time_s <= WINDOW_S)
            at_most = sum(count for time_s, count in history if now_s - time_s < WINDOW_S + RESOLUTION_S)
            assert at_least <= window.total(now_s) <= at_most
    assert window.total(now_s + WINDOW_S + RESOLUTION_S) == 0
    assert window.grand_total == sum(count for _, count in history)


def test_the_last_eviction_of_a_bucket_counts_for_the_whole_window() -> None:
    window = EvictionWindow(WINDOW_S)
    window.add(1, 0.0)
    window.add(2, 0.125)
    assert [window.total(0.125), window.total(60.125), window.total(60.25)] == [3, 3, 0]


def test_memory_is_bounded_whatever_the_rate_and_without_anyone_looking() -> None:
    window = EvictionWindow(WINDOW_S)
    for millisecond in range(200_000):
        window.add(1, millisecond / 1000)
    assert len(window._buckets) <= WINDOW_S / RESOLUTION_S + 2
    assert window.grand_total == 200_000


def test_threads_that_arrive_out_of_order_lose_no_eviction() -> None:
    window = EvictionWindow(WINDOW_S)

    def evict(thread: int) -> None:
        for step in range(10_000):
            window.add(1, 100.0 + step / 1000 - thread)

    threads = [threading.Thread(target=evict, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert window.total(110.0) == window.grand_total == 40_000


def test_nothing_evicted_is_zero() -> None:
    window = EvictionWindow()
    window.add(0, 5.0)
    assert (window.total(5.0), window.grand_total) == (0, 0)


def test_a_negative_count_and_an_empty_window_are_refused() -> None:
    with pytest.raises(ValueError, match="count is -1"):
        EvictionWindow().add(-1, 0.0)
    with pytest.raises(ValueError, match="window_s is 0"):
        EvictionWindow(0)
