"""Work that may wait: one piece per turn of the loop, the one due first."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.replay.turns import Turns


async def turns_taken(due_s: list[float], cancelled: Collection[int] = ()) -> list[tuple[int, int]]:
    """(loop turn, number) of every waiter, in the order in which they went on."""
    turns, loop_turn, taken = Turns(), 0, []

    async def count_loop_turns() -> None:
        nonlocal loop_turn
        while True:
            loop_turn += 1
            await asyncio.sleep(0)

    async def wait(number: int) -> None:
        await turns.wait(due_s[number])
        taken.append((loop_turn, number))

    counting = asyncio.create_task(count_loop_turns())
    waiting = [asyncio.create_task(wait(number)) for number in range(len(due_s))]
    await asyncio.sleep(0)
    for number in cancelled:
        waiting[number].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    counting.cancel()
    return taken


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=12))
def test_whoever_is_due_first_goes_first_and_equals_go_as_they_came(due_s: list[float]) -> None:
    taken = [number for _, number in asyncio.run(turns_taken(due_s))]

    # The first to come finds nobody waiting and has the turn before anybody else asks.
    assert taken == [0, *sorted(range(1, len(due_s)), key=lambda number: due_s[number])]


def test_no_two_go_on_in_one_turn_of_the_loop() -> None:
    loop_turns = [turn for turn, _ in asyncio.run(turns_taken([3.0] * 20))]

    assert len(set(loop_turns)) == 20


def test_a_waiter_that_was_cancelled_holds_nobody_up() -> None:
    taken = asyncio.run(turns_taken([5.0, 1.0, 2.0, 3.0], cancelled=(1, 3)))

    assert [number for _, number in taken] == [0, 2]


def test_turns_go_on_after_nobody_waited_for_a_while() -> None:
    async def scenario() -> None:
        turns = Turns()
        for _ in range(3):
            await asyncio.wait_for(turns.wait(0.0), 5)
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
