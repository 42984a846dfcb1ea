"""One GPU and many agents, as the seed document 000 measured them: its workload, its server, and its tables.

What it publishes is a constant here, with the table or chapter; what is assumed instead says so.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.replay.importers.records import lines
from efficient_lmcache.simulate._engine_state import StepCosts
from efficient_lmcache.simulate.costs import Costs
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.simulation import Outcome, Pool, Simulation
from efficient_lmcache.simulate.tiers import KVTier, LMCacheTier, NoTier
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload, open_workload

# The prompts are made of blocks of 64 tokens, and pages of 1 to 128 tokens gave the same (Table 21).
PAGE_TOKENS = 64
SYSTEM_TOKENS, FIRST_MESSAGE_TOKENS = 35_456, 8_857  # Table 12
_NEW_TOKENS, _REPLY_TOKENS = (831, 9_146), (345, 1_996)  # Table 12: median and p90 of each turn
_MOST_NEW_TOKENS = 11_000  # assumed, so that a turn adds 3,270 tokens on average (Chapter 3)
_WAIT_S = (1.5, 181)  # Table 6: median and p90
_MOST_WAIT_S = 60.0  # Chapter 2
LONGEST_PROMPT_TOKENS = 131_072
# Chapter 2 draws a session's longest prompt from AgentX's. Only requests' contexts are published, not those: assumed to
# be normal, with a mean by which a session holds 68.6K tokens on average over time (Table 16).
_FINAL_TOKENS = (90_000, 18_000)
# Chapter 2: a point lasts 8 minutes, the first 2 are dropped, and waits are cut off 2 minutes after the end.
_BEGIN_S, _END_S, _CUT_S = 120.0, 480.0, 600.0
_SESSIONS_PER_AGENT = 4


@dataclass(frozen=True, slots=True)
class Server:
    """A model on the source's GPU.

    Attributes:
        pool_tokens: of the KV pool.
        max_running: requests at once.
        costs: of a step.
        bytes_per_token: of KV.
    """

    name: str
    pool_tokens: int
    max_running: int
    costs: Costs
    bytes_per_token: int

    def settings(self) -> EngineSettings:
        """SGLang starts a request when its whole context fits, and computes 8,192 tokens of prompts a step."""
        return EngineSettings(self.pool_tokens, self.max_running, 8_192, reserves_prompt=True)


_MEMORY_BYTES_PER_S, _LINK_BYTES_PER_S = 1.46e12, 57e9  # Figure 4, Table 10
_FLOP_PER_S = 0.94 * 373e12  # Table 2


def _costs(
    *, prefill_parameters: float, pair_flop: float, weights: float, kv_bytes: int, state_bytes: float, flop_per_s: float
) -> Costs:
    return Costs(
        StepCosts(
            step_s=1.1e-3,  # Chapter 6: 11.6 ms for one request of 1K tokens, of which 10.4 ms read the weights
            sequence_s=2 * state_bytes / _MEMORY_BYTES_PER_S,
            token_s=2 * prefill_parameters / flop_per_s,
            pair_s=pair_flop / flop_per_s,
            dense_s=2 * weights / _MEMORY_BYTES_PER_S,
            experts_s=0.0,
            expert_share=1.0,
            context_s=kv_bytes / _MEMORY_BYTES_PER_S,
            restore_s=0.0,
            restored_token_s=kv_bytes / _LINK_BYTES_PER_S,
        )
    )


QWEN3_8B = Server(
    "Qwen3-8B",
    471_816,
    128,  # SGLang's 2,048, but no point has more agents
    _costs(
        prefill_parameters=6.95e9,
        pair_flop=4 * 36 * 32 * 128,
        weights=7.57e9,
        kv_bytes=147_456,
        state_bytes=0,
        flop_per_s=_FLOP_PER_S,
    ),
    147_456,
)
# Chapter 0: 120,000 tokens take 8.3 s, where the formula without the DeltaNet states' own work says 6.97 s.
_QWEN35_COSTS = _costs(
    prefill_parameters=6.92e9,
    pair_flop=4 * 8 * 16 * 256,
    weights=6.92e9 + 1.02e9,
    kv_bytes=32_768,
    state_bytes=49.1 * 2**20,
    flop_per_s=373e12 * 6.97 / 8.3,
)
QWEN35_9B = Server("Qwen3.5-9B", 1_077_354, 122, _QWEN35_COSTS, 32_768)
QWEN35_9B_256 = Server("Qwen3.5-9B, 256 state slots", 1_640_130, 51, _QWEN35_COSTS, 32_768)


class Sessions(NamedTuple):
    """Agents' sessions in order, and what begins them.

    Attributes:
        prompts, replies, waits_s: of each session's calls; a wait precedes its call.
        prefix: the system prompt's number, of each session.
    """

    prompts: list[Ints]
    replies: list[Ints]
    waits_s: list[Floats]
    prefix: Ints


def synthetic(
    agents: int, seed: int, *, customers: int = 1, sharing: float = 1.0, per_agent: int = _SESSIONS_PER_AGENT
) -> Workload:
    """Chapter 1's generator with Chapter 2's lengths; the first session of each agent begins at a random turn.

    A reply is computed again with the next turn, as in the source, whose prompts carry replies of their own.

    Args:
        customers: sessions in turn; each customer's have a system prompt of their own, as behind a salt.
        sharing: this part of the sessions have their customer's system prompt, the others one that nobody else has.
        per_agent: sessions.
    """
    rng = np.random.default_rng(seed)
    count = agents * per_agent
    number = np.arange(count)
    shares = np.floor((number + 1) * sharing) > np.floor(number * sharing)
    made = Sessions([], [], [], np.where(shares, number % customers, customers + number))
    for session in range(count):
        final = min(rng.normal(*_FINAL_TOKENS), LONGEST_PROMPT_TOKENS)
        prompts, replies = [SYSTEM_TOKENS + FIRST_MESSAGE_TOKENS], [_lognormal(rng, *_REPLY_TOKENS)]
        while True:
            added = min(_lognormal(rng, *_NEW_TOKENS), _MOST_NEW_TOKENS) + replies[-1]
            if prompts[-1] + added > final:
                break
            prompts.append(prompts[-1] + max(int(added), 1))
            replies.append(_lognormal(rng, *_REPLY_TOKENS))
        first = rng.integers(len(prompts)) if session < agents else 0
        waits_s = np.minimum([_lognormal(rng, *_WAIT_S) for _ in prompts], _MOST_WAIT_S)
        waits_s[first] = 0.0
        made.prompts.append(np.array(prompts[first:], np.int64))
        made.replies.append(np.array(replies[first:]).clip(1, 12_288).astype(np.int64))
        made.waits_s.append(waits_s[first:])
    return Workload.of(_references(made), PAGE_TOKENS, "synthetic", gpu_block_tokens=PAGE_TOKENS)


def _lognormal(rng: np.random.Generator, median: float, p90: float) -> float:
    return float(median * math.exp(rng.normal() * math.log(p90 / median) / 1.2815516))


def _references(made: Sessions) -> References:
    """Prompts as paths of pages: the system prompt's, then the session's own."""
    system = SYSTEM_TOKENS // PAGE_TOKENS
    unused = (int(made.prefix.max()) + 1) * system
    keys: list[Ints] = []
    for prompts, prefix in zip(made.prompts, made.prefix.tolist(), strict=True):
        own = int(prompts[-1]) // PAGE_TOKENS - system
        path = np.concatenate([np.arange(system) + prefix * system, np.arange(unused, unused + own)])
        unused += own
        keys += [path[: int(tokens) // PAGE_TOKENS] for tokens in prompts]
    prompts = np.concatenate(made.prompts)
    sessions = np.repeat(np.arange(len(made.prompts)), [len(turns) for turns in made.prompts])
    return References(
        chunk_tokens=PAGE_TOKENS,
        keys=np.concatenate(keys),
        offsets=np.concatenate(([0], np.cumsum(prompts // PAGE_TOKENS))).astype(np.int64),
        lookup_chunks=prompts // PAGE_TOKENS,
        prompt_tokens=prompts,
        output_tokens=np.concatenate(made.replies),
        lane=sessions,
        session=sessions,
        start_s=np.full(len(prompts), np.nan),
        interval_s=np.concatenate(made.waits_s),
    )


def sessions_of(path: str | os.PathLike[str], chunk_tokens: int, fits: int | None = None, first: int = 0) -> Workload:
    """Recorded sessions: the first so many, or those whose requests all have at most so many tokens."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        for number, (_, line) in enumerate(lines(Path(path))):
            if first and number == first:
                break
            if fits is None or _longest(json.loads(line)) <= fits:
                file.write(line.rstrip(b"\n") + b"\n")
        file.flush()
        return open_workload(file.name, chunk_tokens, gpu_block_tokens=chunk_tokens, most_block_references=1 << 40)


def _longest(record: dict[str, Any]) -> int:
    return max(int(row["in"]) if "in" in row else _longest(row) for row in record["requests"])


def recorded(sessions: Workload, agents: int, seed: int) -> Workload:
    """Recorded sessions in random order with capped waits; the first of each agent begins at a random call."""
    rng = np.random.default_rng(seed)
    references = sessions.blocks
    order: list[Ints] = []
    for place, session in enumerate(rng.permutation(np.unique(references.session)).tolist()):
        calls = np.flatnonzero(references.session == session)
        order.append(calls[int(rng.integers(len(calls))) if place < agents else 0 :])
        if place == agents * _SESSIONS_PER_AGENT:
            break
    chosen = references.reordered(np.concatenate(order))
    waits_s = np.minimum(np.nan_to_num(chosen.interval_s), _MOST_WAIT_S)
    waits_s[np.cumsum([0, *(len(calls) for calls in order[:-1])])] = 0.0
    return Workload.of(
        replace(chosen, interval_s=waits_s), PAGE_TOKENS, sessions.name, gpu_block_tokens=PAGE_TOKENS,
        most_block_references=1 << 40,
    )  # fmt: skip


class Point(NamedTuple):
    """What the source's harness would have measured.

    Attributes:
        hit_rate: of prompt tokens, of calls that arrived in the window and were admitted before the cut.
        wait_p50_s, wait_p90_s: until the first token, of later turns; cut off.
        running, queued: mean numbers in the window.
        context_tokens: held by a session on average over time.
        alive: whether new sessions lasted until the end of the window.
        preemptions: in the whole run.
    """

    hit_rate: float
    wait_p50_s: float
    wait_p90_s: float
    running: float
    queued: float
    context_tokens: float
    alive: bool
    preemptions: int


def measure(workload: Workload, server: Server, agents: int, tier: KVTier | None = None) -> Point:
    """One point of a sweep."""
    simulation = Simulation(
        workload,
        Pool(agents),
        [server.settings()],
        [tier or NoTier()],
        server.costs,
        logs_evictions=isinstance(tier, HierarchicalTier),
    )
    return _point(workload, simulation.run())


def _point(workload: Workload, made: Outcome) -> Point:
    calls, arrived_s = made.calls, made.arrived_s
    inside = (arrived_s >= _BEGIN_S) & (arrived_s < _END_S)
    served = inside & (calls.admitted_s < _CUT_S)
    later = inside & np.concatenate(([False], np.diff(workload.blocks.session) == 0))
    waits_s = np.minimum(calls.first_token_s, _CUT_S)[later] - arrived_s[later]
    found = (calls.gpu_tokens + calls.restored_tokens)[served].sum()
    began_s = np.array([arrived_s[workload.blocks.session == s].min() for s in np.unique(workload.blocks.session)])
    return Point(
        hit_rate=float(found / max(calls.prompt_tokens[served].sum(), 1)),
        wait_p50_s=float(np.quantile(waits_s, 0.5)) if len(waits_s) else math.nan,
        wait_p90_s=float(np.quantile(waits_s, 0.9)) if len(waits_s) else math.nan,
        running=_mean_number(calls.admitted_s, calls.finished_s),
        queued=_mean_number(arrived_s, calls.admitted_s),
        context_tokens=_context_held(workload, made),
        alive=bool(began_s.max() >= _END_S),
        preemptions=int(calls.preemptions.sum()),
    )


def _mean_number(begin_s: Floats, end_s: Floats) -> float:
    inside_s = np.minimum(end_s, _END_S) - np.maximum(begin_s, _BEGIN_S)
    return float(inside_s.clip(0).sum() / (_END_S - _BEGIN_S))


def _context_held(workload: Workload, made: Outcome) -> float:
    """Prompt tokens, each for as long as its session has no newer call."""
    arrived_s = made.arrived_s
    followed = np.concatenate((np.diff(workload.blocks.session) == 0, [False]))
    until_s = np.where(followed, np.roll(arrived_s, -1), made.calls.finished_s)
    return float(np.average(made.calls.prompt_tokens, weights=(until_s - arrived_s).clip(0)))


class HierarchicalTier:
    """SGLang's CPU pool, pages least recently evicted by the GPU first.

    write back       a page comes when the GPU evicts it and leaves when the GPU has it again
    write through    a page comes when it is computed; as long as the GPU has it, its copy cannot be evicted
    """

    stored_tokens = 0

    def __init__(self, pages: References, capacity_pages: int, writes_through: bool) -> None:
        self._pages = pages
        self._capacity_pages = capacity_pages
        self._writes_through = writes_through
        self._on_gpu: set[int] = set()
        self._sole: OrderedDict[int, None] = OrderedDict()
        self._filled = [0] * len(pages)

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        keys = self._pages.call_keys(call)[: tokens // PAGE_TOKENS].tolist()
        first = found = gpu_tokens // PAGE_TOKENS
        while found < len(keys) and keys[found] in self._sole:
            found += 1
        # Most recent now, so that none of them goes before the call is admitted.
        for key in reversed(keys[first:found]):
            self._sole.move_to_end(key)
        self._filled[call] = 0
        return found * PAGE_TOKENS

    def fill(self, call: int, tokens: int, now_s: float) -> int:
        first, self._filled[call] = self._filled[call], tokens // PAGE_TOKENS
        for key in self._pages.call_keys(call)[first : self._filled[call]].tolist():
            self._sole.pop(key, None)
            self._on_gpu.add(key)
        self._evict()
        return 0

    def evicted(self, blocks: Ints, now_s: float) -> int:
        keys = blocks.tolist()
        self._on_gpu.difference_update(keys)
        self._sole.update(dict.fromkeys(keys))
        self._evict()
        return 0

    def _evict(self) -> None:
        copies = len(self._on_gpu) if self._writes_through else 0
        while self._sole and len(self._sole) > self._capacity_pages - copies:
            self._sole.popitem(last=False)


POLICIES = ("write-through", "write-back", "LMCache")


def host_tier(workload: Workload, server: Server, ratio: float, policy: str) -> KVTier:
    """CPU memory of so many GPU pools, under SGLang's two policies or as LMCache's own tier."""
    capacity = int(server.pool_tokens * ratio) // PAGE_TOKENS
    if policy == "LMCache":
        return LMCacheTier(workload.chunks, capacity, Admission(), server.bytes_per_token)
    return HierarchicalTier(workload.chunks, capacity, policy == "write-through")


def napkin(pool_tokens: float, context_tokens: float, shared_tokens: float, copies: int = 1) -> float:
    """Agents that fit (Chapters 2 and 4)."""
    return (pool_tokens - copies * shared_tokens) / (context_tokens - shared_tokens)


def mean_of(rows: Iterable[Any]) -> Any:
    """The named tuple of several ones' means; what is true or false must be true in all."""
    columns = list(zip(*(made := list(rows)), strict=True))
    means = [all(column) if isinstance(column[0], bool) else float(np.mean(column)) for column in columns]
    return type(made[0])(*means)
