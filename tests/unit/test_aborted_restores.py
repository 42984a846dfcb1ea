"""A request that ends while it is being restored, in every order in which its ends may be reported."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.connector.aborted_restores import AbortedRestores


class Scheduler:
    """What vLLM 0.32's scheduler asserts of ends that it hears of (`_update_from_kv_xfer_finished`)."""

    def __init__(self) -> None:
        self.restores = AbortedRestores()
        self.known: set[str] = set()
        self.ended: set[str] = set()
        self.waiting_for_restore: set[str] = set()

    def arrives(self, request: str, restored: bool) -> None:
        self.known.add(request)
        if restored:
            self.restores.restore_scheduled(request)
            self.waiting_for_restore.add(request)

    def ends(self, request: str, stores: bool = True) -> None:
        """Finished or aborted; without a store to wait for, it is gone unless its restore is under way."""
        self.restores.request_ended(request, reports_store=stores)
        self.ended.add(request)
        if not stores and request not in self.waiting_for_restore:
            self.known.remove(request)

    def hears(self, stored: set[str] | None = None, restored: set[str] | None = None) -> None:
        stored = self.restores.expected(stored, restored)
        for request in restored or ():
            assert request in self.known
            assert request in self.waiting_for_restore
            self.waiting_for_restore.remove(request)
            if request in self.ended:
                self.known.remove(request)
        for request in stored or ():
            assert request in self.known
            assert request not in self.waiting_for_restore, "its blocks are still being written"
            self.known.remove(request)


def test_without_a_look_at_the_order_vllm_would_end():
    scheduler = Scheduler()
    scheduler.restores.expected = lambda stored, restored: stored  # type: ignore[method-assign]
    scheduler.arrives("a", restored=True)
    scheduler.ends("a")
    with pytest.raises(AssertionError):
        scheduler.hears({"a"}, {"a"})


@pytest.mark.parametrize("reports", [("restored", "stored"), ("stored", "restored"), ("both",)])
def test_a_request_aborted_during_its_restore_ends_once(reports):
    scheduler = Scheduler()
    scheduler.arrives("a", restored=True)
    scheduler.ends("a")
    for report in reports:
        scheduler.hears(
            stored={"a"} if report in ("stored", "both") else None,
            restored={"a"} if report in ("restored", "both") else None,
        )
    assert not scheduler.known
    assert len(scheduler.restores) == 0


def test_one_that_ends_after_its_restore_is_stored_as_ever():
    scheduler = Scheduler()
    scheduler.arrives("a", restored=True)
    scheduler.hears(restored={"a"})
    scheduler.ends("a")
    scheduler.hears(stored={"a"})
    assert not scheduler.known
    assert len(scheduler.restores) == 0


def test_with_lazy_offload_no_end_of_a_store_is_waited_for():
    scheduler = Scheduler()
    scheduler.arrives("a", restored=True)
    scheduler.ends("a", stores=False)
    scheduler.hears(restored={"a"})
    assert not scheduler.known
    assert len(scheduler.restores) == 0


#: When a request is restored (never, or at a time), ends, and is reported as stored: later than it ended.
lives = st.tuples(st.none() | st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))


@given(st.lists(lives, min_size=1, max_size=8))
def test_whatever_the_order_every_request_ends_once_and_nothing_is_left(requests):
    scheduler = Scheduler()
    for name, (restored_at, _, _) in enumerate(requests):
        scheduler.arrives(str(name), restored=restored_at is not None)
    for time in itertools.count():
        for name, (_, ends_at, _) in enumerate(requests):
            if ends_at == time:
                scheduler.ends(str(name))
        scheduler.hears(
            stored={str(name) for name, (_, ends_at, after) in enumerate(requests) if ends_at + after == time},
            restored={str(name) for name, (restored_at, _, _) in enumerate(requests) if restored_at == time},
        )
        if time > 20:
            break
    assert not scheduler.known
    assert len(scheduler.restores) == 0
