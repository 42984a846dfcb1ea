"""The event loop of `pool`, compiled: a plan simulates the pool hundreds of times."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core._compiled import compiled
from efficient_lmcache.core.references import Floats, Ints

NONE = -1
_ARRIVES, _COMPUTED, _ANSWERED = 0, 1, 2


class Chain(NamedTuple):
    """Which calls an event releases, and after how long; arrays of int64 or float64 [calls] unless said otherwise.

    Attributes:
        delay_s: from the event that releases a call to its arrival.
        next_in_lane: released by a call's response; NONE if it is the lane's last.
        first_spawned, next_spawned: released by a call's arrival, a linked list: first calls of other lanes.
        session: of a call, numbered in order of first appearance.
        session_first: int64 [sessions]: the session's first call.
        session_calls: int64 [sessions]: how many calls it has.
    """

    delay_s: Floats
    next_in_lane: Ints
    first_spawned: Ints
    next_spawned: Ints
    session: Ints
    session_first: Ints
    session_calls: Ints


@compiled
def run(
    chain: Chain,
    prompt_tokens: Ints,
    prefill_s: Floats,
    decode_s: Floats,
    active_pool: int,
    slots: int,
    gpu_kv_tokens: int,
) -> tuple[Ints, Floats, float]:
    """Order and times of lookups, and when the last call is answered.

    Events that fall together are served first come, first served.
    """
    calls = len(prompt_tokens)
    order, lookup_s = np.empty(calls, np.int64), np.empty(calls, np.float64)
    unanswered = chain.session_calls.copy()
    waiting, first_waiting, arrived = np.empty(calls, np.int64), 0, 0
    running, resident_tokens, computing, served = 0, 0, False, 0
    pushed = sessions = min(active_pool, len(chain.session_first))
    events = [(0.0, 0, _ARRIVES, 0)]
    events.clear()
    now_s = 0.0
    for session in range(sessions):
        first = chain.session_first[session]
        heapq.heappush(events, (chain.delay_s[first], session, _ARRIVES, first))
    while len(events) > 0:
        now_s, _, event, call = heapq.heappop(events)
        if event == _ARRIVES:
            waiting[arrived] = call
            arrived += 1
            follower = chain.first_spawned[call]
            while follower != NONE:
                heapq.heappush(events, (now_s + chain.delay_s[follower], pushed, _ARRIVES, follower))
                pushed += 1
                follower = chain.next_spawned[follower]
        elif event == _COMPUTED:
            computing = False
            heapq.heappush(events, (now_s + decode_s[call], pushed, _ANSWERED, call))
            pushed += 1
        else:
            running -= 1
            resident_tokens -= prompt_tokens[call]
            follower = chain.next_in_lane[call]
            session = chain.session[call]
            unanswered[session] -= 1
            if unanswered[session] == 0 and sessions < len(chain.session_first):
                follower = chain.session_first[sessions]
                sessions += 1
            if follower != NONE:
                heapq.heappush(events, (now_s + chain.delay_s[follower], pushed, _ARRIVES, follower))
                pushed += 1
        if computing or first_waiting == arrived or running == slots:
            continue
        call = waiting[first_waiting]
        if running > 0 and resident_tokens + prompt_tokens[call] > gpu_kv_tokens:
            continue
        first_waiting += 1
        running += 1
        resident_tokens += prompt_tokens[call]
        computing = True
        order[served], lookup_s[served] = call, now_s
        served += 1
        heapq.heappush(events, (now_s + prefill_s[call], pushed, _COMPUTED, call))
        pushed += 1
    return order, lookup_s, now_s
