"""What a server's counters say of evictions, and where it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.connector.lmcache_server_adapter import ServerError, ServerUse, default_http_url, instance_id
from efficient_lmcache.connector.server_tier import RoomMade


def use(removed: int, evictions: int) -> ServerUse:
    return ServerUse(used_bytes=50, removed_objects=removed, evictions=evictions)


def test_what_was_removed_before_the_first_look_does_not_count():
    assert RoomMade().since_last(use(1000, 7)) == 0


def test_a_cleared_cache_is_no_eviction():
    room_made = RoomMade()
    for removed in (0, 500, 500, 700):
        assert room_made.since_last(use(removed, 0)) == 0


def test_an_eviction_counts_also_where_its_two_counters_are_seen_apart():
    room_made = RoomMade()
    room_made.since_last(use(0, 0))
    assert room_made.since_last(use(10, 0)) == 0
    assert room_made.since_last(use(10, 1)) == 10
    assert room_made.since_last(use(30, 2)) == 20


def test_a_restarted_server_starts_anew():
    room_made = RoomMade()
    room_made.since_last(use(900, 9))
    assert room_made.since_last(use(100, 1)) == 0
    assert room_made.since_last(use(120, 2)) == 20


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=40))
def test_every_eviction_counts_once_however_often_one_looks(rounds):
    """Each eviction moves the removals first, then the evictions; a look falls between them or not."""
    room_made, removed, counted = RoomMade(), 0, 0
    room_made.since_last(use(0, 0))
    for evictions, (objects, looked_between) in enumerate(rounds, start=1):
        removed += objects
        if looked_between:
            counted += room_made.since_last(use(removed, evictions - 1))
        counted += room_made.since_last(use(removed, evictions))
    assert counted == removed


@pytest.mark.parametrize(
    ("server_url", "http_url"),
    [
        ("tcp://localhost:5555", "http://localhost:8080"),
        ("10.0.0.7:6000", "http://10.0.0.7:8080"),
        ("tcp://[fd00::1]:5555", "http://[fd00::1]:8080"),
        ("grpc://lmcache.example:5555", "http://lmcache.example:8080"),
    ],
)
def test_a_servers_http_side_is_on_the_same_host(server_url, http_url):
    assert default_http_url(server_url) == http_url


def test_a_server_that_does_not_answer_is_one_error_with_its_address():
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1/config: .*refused"):
        instance_id("http://127.0.0.1:1")
