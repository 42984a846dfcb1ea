"""Which of several engines a call goes to."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.replay.routing import Router


def urls(count: int) -> list[str]:
    return [f"http://engine-{number}" for number in range(count)]


def test_equally_loaded_engines_take_turns() -> None:
    router = Router(urls(3))
    chosen = []
    for number in range(7):
        with router.sending(f"task-{number}") as engine:
            chosen.append(engine)
    assert chosen == [0, 1, 2, 0, 1, 2, 0]


def test_a_call_goes_where_fewest_are_in_flight() -> None:
    router = Router(urls(2))
    with router.sending("a") as first, router.sending("b") as second, router.sending("c") as third:
        assert (first, second, third) == (0, 1, 0)
        with router.sending("d") as fourth:
            assert fourth == 1
        with router.sending("e") as fifth:
            assert fifth == 1


def test_an_ended_call_counts_no_more_even_if_it_failed() -> None:
    router = Router(urls(2))
    for _ in range(3):
        try:
            with router.sending("a"):
                raise ConnectionError
        except ConnectionError:
            pass
    with router.sending("b") as one, router.sending("c") as other:
        assert {one, other} == {0, 1}


def test_a_session_stays_with_its_engine_whatever_the_load() -> None:
    router = Router(urls(2), "session")
    with router.sending("a") as home:
        for _ in range(3):
            with router.sending("a") as engine:
                assert engine == home
    with router.sending("b") as other:
        assert other != home


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_the_load_of_engines_differs_by_at_most_one_while_calls_only_come(count: int, comes: list[bool]) -> None:
    router, loads = Router(urls(count)), [0] * count
    with ExitStack() as in_flight:
        for number, one_comes in enumerate(comes):
            if one_comes:
                loads[in_flight.enter_context(router.sending(f"task-{number}"))] += 1
                assert max(loads) - min(loads) <= 1
            else:
                in_flight.close()
                loads = [0] * count
