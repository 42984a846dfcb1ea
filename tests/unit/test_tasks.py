"""Task inference for clients that name no task."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_lmcache.core.tasks import MAX_SUFFIX_TOKENS, TaskInference

BLOCK = 8
GENERATION_PROMPT = [90, 91, 92]


def keys(tokens, salt=None):
    """Stand-in for vLLM's chained block hashes: the prefix itself."""
    return [(salt, tuple(tokens[: end + BLOCK])) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


class Pool:
    """Agents that share a system prompt and each grow their own conversation."""

    def __init__(self, seed: int, system_tokens: int = 50) -> None:
        self.random = random.Random(seed)
        self.system = self.draw(system_tokens)
        self.inference = TaskInference(BLOCK, anchor_tokens=BLOCK)

    def draw(self, count):
        return [self.random.randrange(80) for _ in range(count)]

    def assign(self, tokens, salt=None):
        return self.inference.assign(keys(tokens, salt), tokens, salt)


def test_a_prompt_that_extends_an_earlier_one_belongs_to_its_task():
    pool = Pool(0)
    prompt = pool.system + pool.draw(30)
    first = pool.assign(prompt)
    assert pool.assign(prompt + pool.draw(100)) == first


def test_a_shared_system_prompt_does_not_merge_tasks():
    pool = Pool(1)
    tasks = {pool.assign(pool.system + pool.draw(length)) for length in (1, 2, 3, 5, 8, 13, 40, 200)}
    assert len(tasks) == 8


def test_a_retried_call_stays_in_its_task():
    pool = Pool(2)
    prompt = pool.system + pool.draw(30)
    assert pool.assign(prompt) == pool.assign(prompt)


def test_a_history_cut_back_to_an_earlier_prompt_stays_in_its_task():
    pool = Pool(3)
    first = pool.system + pool.draw(30)
    task = pool.assign(first)
    assert pool.assign(first + pool.draw(300)) == task
    assert pool.assign(first + pool.draw(40)) == task


def test_a_generation_prompt_that_the_next_turn_drops_does_not_part_a_task():
    pool = Pool(4)
    histories = [pool.system + pool.draw(30) for _ in range(4)]
    tasks = [pool.assign(history + GENERATION_PROMPT) for history in histories]
    histories = [history + pool.draw(60) for history in histories]
    # The very first prompt was seen before any other showed what a turn's end looks like.
    assert [pool.assign(history + GENERATION_PROMPT) for history in histories][1:] == tasks[1:]
    assert len(set(tasks)) == 4


def test_agents_that_start_from_the_same_prompt_are_told_apart_once_they_go_on():
    for shared_tokens in (3, 50, 57):
        pool = Pool(6)
        shared = pool.draw(shared_tokens)
        pool.assign(shared)
        histories = [shared] * 10
        for _ in range(3):
            histories = [history + pool.draw(40) for history in histories]
            tasks = [pool.assign(history) for history in histories]
        assert len(set(tasks)) == 10


def test_an_agent_that_keeps_rewriting_its_history_is_one_task():
    pool = Pool(7)
    first = pool.system + pool.draw(30)
    tasks = {pool.assign(first)}
    for _ in range(5):
        tasks.add(pool.assign(first + pool.draw(100)))
    assert len(tasks) == 1


def test_one_token_in_common_merges_nobody():
    pool = Pool(8)
    pool.assign([1])
    assert len({pool.assign([1, *pool.draw(100)]) for _ in range(10)}) == 10


def test_missing_prefix_keys_are_no_error():
    inference = TaskInference(BLOCK)
    prompt = list(range(100))
    task = inference.assign([], prompt)
    assert inference.assign([], [*prompt, 5, 6]) == task


def test_tenants_never_share_a_task():
    pool = Pool(5)
    for length in (3, 30, 300):
        prompt = pool.draw(length)
        assert pool.assign(prompt, "tenant-a") != pool.assign(prompt, "tenant-b")


def test_memory_is_bounded_and_old_prompts_are_forgotten_first():
    inference = TaskInference(BLOCK, max_prompts=10, anchor_tokens=BLOCK)
    prompts = [[*range(40), value, *range(value % 3)] for value in range(100)]
    tasks = [inference.assign(keys(prompt), prompt) for prompt in prompts]
    inference.remember()
    assert len(inference) == 10
    # All at one anchor.
    (at_anchor,) = inference._at.values()
    assert sum(at_anchor._counts.values()) == len(at_anchor) == 10
    assert inference.assign(keys(prompts[99]), prompts[99]) == tasks[99]
    assert inference.assign(keys(prompts[0]), prompts[0]) != tasks[0]
    inference.remember()
    for value in range(10):
        prompt = [value + 200, *range(40)]
        inference.assign(keys(prompt), prompt)
    inference.remember()
    assert len(inference) == len(inference._at) == 10


def test_a_prompt_that_keeps_coming_back_is_remembered_once_and_longest():
    inference = TaskInference(BLOCK, max_prompts=3)
    often, others = list(range(50)), [[100 + value, *range(40)] for value in range(8)]
    task = inference.assign(keys(often), often)
    for other in others:
        inference.assign(keys(other), other)
        assert inference.assign(keys(often), often) == task
    inference.remember()
    assert len(inference) <= 3


def test_an_empty_prompt_has_a_task():
    assert TaskInference(BLOCK).assign([], [])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 12),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 50), st.booleans()), max_size=60),
    st.sampled_from([1, BLOCK, 3 * BLOCK, 128]),
)
def test_interleaved_agents_are_told_apart_exactly(seed, agents, system_tokens, turns, anchor_tokens):
    pool = Pool(seed, system_tokens)
    pool.inference = TaskInference(BLOCK, anchor_tokens=anchor_tokens)
    # Distinct first tokens after the system prompt: agents with the same first prompt are one task by definition.
    histories = [[*pool.system, 80 + agent, *pool.draw(MAX_SUFFIX_TOKENS + agent)] for agent in range(agents)]
    truth: dict[int, str] = {}
    for agent, growth, remembers_early in turns:
        agent %= agents
        task = pool.assign(histories[agent])
        if remembers_early:
            pool.inference.remember()
        assert truth.setdefault(agent, task) == task
        histories[agent] = histories[agent] + pool.draw(growth)
    assert len(set(truth.values())) == len(truth)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40))
def test_when_a_prompt_is_remembered_changes_no_task(seed, turns):
    at_once, later = TaskInference(BLOCK, anchor_tokens=BLOCK), TaskInference(BLOCK, anchor_tokens=BLOCK)
    pool = Pool(seed, 20)
    histories = [pool.system + pool.draw(20)] * 6
    for agent, growth in turns:
        histories[agent] = prompt = histories[agent] + pool.draw(growth)
        expected = at_once.assign(keys(prompt), prompt)
        at_once.remember()
        grown_keys, grown_prompt = keys(prompt), list(prompt)
        assert later.assign(grown_keys, grown_prompt) == expected
        # As vLLM does while it generates.
        grown_prompt += [7] * 20
        grown_keys += keys(grown_prompt)[len(grown_keys) :]
