"""Eight engines and recorded sessions, after the seed document 002: retention, sharing, and the shared tier's link.

Its nodes have eight GPUs and about eight times the traffic; here a node is one GPU, with an eighth of all that.
What it publishes is a constant here, with its section; what is assumed instead says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from efficient_lmcache.core.references import Floats, Ints, References
from efficient_lmcache.core.reuse import stable_tokens
from efficient_lmcache.simulate._engine_state import Calls, Engine, StepCosts
from efficient_lmcache.simulate.costs import Costs
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.remote_tier import RemoteTier
from efficient_lmcache.simulate.routing import Router, by_session
from efficient_lmcache.simulate.simulation import Outcome, Pool, Simulation
from efficient_lmcache.sizing.workload import Workload

NODES = 8
CHUNK_TOKENS = 512
BYTES_PER_TOKEN = 49_900  # Section 3: a million tokens of GLM-5.2 take 49.9 GB in FP8
LOCAL_BYTES = 512e9 / 8  # Section 5: of host DRAM
HOUR_S = 3600.0
RETENTIONS_S = (60.0, 300.0, 900.0, HOUR_S, 4 * HOUR_S, 24 * HOUR_S)
_TOKEN_S = (52.4 - 3.11) / (218_996 - 3_700)  # Section 3: what prefilling more tokens adds to TTFT
_STEP_S = 1 / 45  # Section 4: 45 output tokens a second at a mean batch of 1.2
_LINK_BYTES_PER_S = 50e9  # assumed: of a GPU to the host
# Assumed: little beyond the longest call, as 99 % of what requests need comes from below the GPUs (Section 5).
_GPU_TOKENS = 1_000_000
_STEP_TOKENS = 1_024  # assumed
# Eight steps are simulated as one with eight times the tokens: decoding takes most of the simulation's time.
_STEPS_AT_ONCE = 8
_COSTS = Costs(
    StepCosts(
        step_s=_STEP_S * _STEPS_AT_ONCE,
        sequence_s=0.0,
        token_s=_TOKEN_S,
        pair_s=0.0,
        dense_s=0.0,
        experts_s=0.0,
        expert_share=1.0,
        context_s=0.0,
        restore_s=0.0,
        restored_token_s=BYTES_PER_TOKEN / _LINK_BYTES_PER_S,
    )
)
_ENGINE = EngineSettings(_GPU_TOKENS, 256, _STEP_TOKENS * _STEPS_AT_ONCE)
# Measured from when sessions have begun until an hour after the last one came: most still go on, by themselves.
_WARM_UP_S, _AFTER_S = 900.0, HOUR_S
_FEWEST_OUTPUT_TOKENS = 16  # of a call whose output rate counts
_NEAR_HIT = 0.9  # of what could be found


class LeastLoaded:
    """The node with the fewest calls that are not answered, reads under way included; among equals the next in turn."""

    def __init__(self) -> None:
        self._open: list[list[int]] = []
        self._turn = 0

    def __call__(self, call: int, engines: Sequence[Engine], calls: Calls, blocks: References) -> int:
        self._open = [
            [c for c in column if math.isnan(calls.finished_s[c])] for column in self._open or [[] for _ in engines]
        ]
        self._turn = (self._turn + 1) % len(engines)
        number = min(
            range(len(engines)), key=lambda n: (len(self._open[n]), (n - self._turn) % len(engines))
        )  # fmt: skip
        self._open[number].append(call)
        return number


class Row(NamedTuple):
    """One run, over the calls that arrived between warm-up and an hour after the last session came.

    Attributes:
        token_hit_rate: of prompt tokens: restored or found on the GPU.
        tier_hit_rate: of prompt tokens, what the tier held at the call's lookup.
        request_hit_rate, near_hit_rate: of calls that could find something, those that found all of it but for a
            chunk, and those that found 90 %.
        imbalance: the busiest node's mean number of calls in progress over the nodes' mean.
        running: calls on a node.
        ttft_p99_s, ttft_mean_s, latency_p90_s: to the first and to the last token.
        output_per_s: median tokens a second of one call.
        read_gb_s: over the link.
        read_gb: of one read on average, and its 90th percentile.
        held_tb: what a node's share of all tiers holds in the long run at this rate of sessions.
    """

    token_hit_rate: float
    tier_hit_rate: float
    request_hit_rate: float
    near_hit_rate: float
    imbalance: float
    running: float
    ttft_p99_s: float
    ttft_mean_s: float
    latency_p90_s: float
    output_per_s: float
    read_gb_s: float
    read_gb: float
    read_p90_gb: float
    held_tb: float


def arriving(sessions: Workload, per_hour_and_node: float, seed: int = 0) -> Workload:
    """Sessions that come by chance, each going on at its own recorded pace."""
    references = sessions.chunks
    firsts = np.concatenate(([True], np.diff(references.session) != 0))
    gaps_s = np.random.default_rng(seed).exponential(HOUR_S / (per_hour_and_node * NODES), int(firsts.sum()))
    intervals_s = np.nan_to_num(references.interval_s)
    intervals_s[firsts] = np.cumsum(gaps_s)
    output_tokens = -(-references.output_tokens // _STEPS_AT_ONCE)
    return replace(
        sessions,
        chunks=replace(references, interval_s=intervals_s, output_tokens=output_tokens),
        blocks=replace(sessions.blocks, interval_s=intervals_s, output_tokens=output_tokens),
    )


def simulate_cluster(
    workload: Workload,
    *,
    shared: bool = True,
    route: str = "load",
    retention_s: float = HOUR_S,
    link_gb_s: float = math.inf,
    local_bytes: float = 0.0,
) -> Row:
    """One configuration.

    Args:
        shared: one tier for all nodes; otherwise each has its own, without a link to wait for.
    """
    remotes = [
        RemoteTier(
            workload.chunks,
            BYTES_PER_TOKEN,
            NODES if shared else 1,
            link_bytes_per_s=link_gb_s * 1e9,
            retention_s=retention_s,
            local_chunks=int(local_bytes / BYTES_PER_TOKEN) // CHUNK_TOKENS,
        )
        for _ in range(1 if shared else NODES)
    ]
    router: Router = LeastLoaded() if route == "load" else by_session
    simulation = Simulation(
        workload,
        Pool(len(np.unique(workload.chunks.session))),
        [_ENGINE] * NODES,
        [tier for remote in remotes for tier in remote.engine_tiers()],
        _COSTS,
        router=router,
        remote=remotes[0] if shared else None,
    )
    return _row(workload, simulation.run(), remotes)


def _row(workload: Workload, made: Outcome, remotes: Sequence[RemoteTier]) -> Row:
    calls, arrived_s, prompts = made.calls, made.arrived_s, made.calls.prompt_tokens
    firsts = np.concatenate(([True], np.diff(workload.chunks.session) != 0))
    last_s = float(arrived_s[firsts].max())
    end_s = last_s + _AFTER_S
    inside = (arrived_s >= _WARM_UP_S) & (arrived_s <= end_s)
    found = calls.gpu_tokens + calls.restored_tokens
    reusable = stable_tokens(workload.chunks)
    could = inside & (reusable > 0)
    long = inside & (calls.output_tokens * _STEPS_AT_ONCE >= _FEWEST_OUTPUT_TOKENS)
    rates = _STEPS_AT_ONCE * (calls.output_tokens - 1)[long] / (calls.finished_s - calls.first_token_s)[long]
    in_progress = _in_progress(made, np.arange(_WARM_UP_S, end_s, 5.0, dtype=np.float64))
    reads = [remote.reads for remote in remotes]
    size_bytes = np.concatenate([r.size_bytes[(r.asked_s >= _WARM_UP_S) & (r.asked_s <= end_s)] for r in reads])
    spans = [remote.spans() for remote in remotes]
    # Little's law: what a session leaves behind, times how many sessions come.
    chunk_s = sum(float((gone_s - born_s).sum()) for born_s, gone_s in spans)
    chunk_bytes = CHUNK_TOKENS * BYTES_PER_TOKEN
    return Row(
        token_hit_rate=float(found[inside].sum() / prompts[inside].sum()),
        tier_hit_rate=float(made.host_tokens[inside].sum() / prompts[inside].sum()),
        request_hit_rate=float((found[could] > reusable[could] - 2 * CHUNK_TOKENS).mean()),
        near_hit_rate=float((found[could] >= _NEAR_HIT * reusable[could]).mean()),
        imbalance=float(in_progress.mean(0).max() / in_progress.mean()),
        running=float(in_progress.mean()),
        ttft_p99_s=float(np.quantile((calls.first_token_s - arrived_s)[inside], 0.99)),
        ttft_mean_s=float((calls.first_token_s - arrived_s)[inside].mean()),
        latency_p90_s=float(np.quantile((calls.finished_s - arrived_s)[inside], 0.9)),
        output_per_s=float(np.median(rates)),
        read_gb_s=float(size_bytes.sum() / (end_s - _WARM_UP_S) / 1e9),
        read_gb=float(size_bytes.mean() / 1e9) if len(size_bytes) else 0.0,
        read_p90_gb=float(np.quantile(size_bytes, 0.9) / 1e9) if len(size_bytes) else 0.0,
        held_tb=chunk_s * chunk_bytes / last_s / NODES / 1e12,
    )


def _in_progress(made: Outcome, at_s: Floats) -> Ints:
    """Calls that were sent to each node and not answered, int64 [times, nodes]."""
    columns = []
    for node in range(NODES):
        mine = made.engine == node
        begun = np.searchsorted(np.sort(made.arrived_s[mine]), at_s, "right")
        columns.append(begun - np.searchsorted(np.sort(made.calls.finished_s[mine]), at_s, "right"))
    return np.stack(columns, 1)
