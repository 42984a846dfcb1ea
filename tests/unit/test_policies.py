"""Tiers of the policy laboratory: what they hold, what they know, and how they rank what returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="needs the extra sizing")

from lru_streams import compiles
from simulated_agents import BLOCK, CHUNK, COSTS, Tasks, agents, any_tasks, deployment, host_gib

from efficient_lmcache.core.references import Ints
from efficient_lmcache.simulate._engine_state import NONE, Engine
from efficient_lmcache.simulate.deployment import Configuration, Simulated, simulate
from efficient_lmcache.simulate.laboratory import (
    BASELINES,
    CLAIRVOYANT,
    RECOMMENDED,
    Row,
    Study,
    first_sessions,
    measure,
    verdicts,
    with_intervals,
)
from efficient_lmcache.simulate.policies import POLICIES, Place, new_tiers
from efficient_lmcache.simulate.policies.blocks import chunk_of_block
from efficient_lmcache.simulate.policies.clairvoyant import ClairvoyantTier
from efficient_lmcache.simulate.policies.exclusive import ExclusiveTier
from efficient_lmcache.simulate.policies.inclusive import ChunkTier, FrequencyGate
from efficient_lmcache.simulate.policies.returns import ReturnTier, ReturnTimes
from efficient_lmcache.simulate.simulation import Pool, Simulation
from efficient_lmcache.sizing.policy_tier import Admission
from efficient_lmcache.sizing.workload import Workload
from efficient_lmcache.sweep.plan import load_plan

ADMISSION = Admission("conditioned", write_threshold_chunks=1, activity_window_s=5.0)
#: More agents than a small GPU holds, each with a context that grows.
ROUNDS: Tasks = [[(20 + task % 7, 3 + task % 5)] * 6 for task in range(8)]
policies = st.sampled_from(sorted(POLICIES))


def run(workload: Workload, policy: str, chunks: int, spare_tokens: int = 40) -> Simulated:
    deployed = deployment(workload, spare_tokens=spare_tokens)
    return simulate(workload, deployed, Configuration(host_gib(chunks), ADMISSION, policy))


@settings(compiles, max_examples=60)
@given(any_tasks, policies, st.integers(0, 200), st.integers(1, 40))
def test_every_prompt_token_is_computed_restored_or_found_under_every_policy(tasks, policy, spare_tokens, chunks):
    made = run(agents(tasks), policy, chunks, spare_tokens)
    assert made.computed_prefill_tokens + made.restored_tokens_per_rank + made.gpu_hit_tokens == made.prompt_tokens
    (tier,) = made.tiers
    if isinstance(tier, ExclusiveTier):
        assert len(tier.sole) + len(tier.spare) <= chunks
        assert not tier.sole.keys() & tier.spare.keys()
        assert made.stored_tokens_per_rank >= (len(tier.sole) + len(tier.spare) + tier.evicted_chunks) * CHUNK
    elif isinstance(tier, ChunkTier):
        assert tier.registered_chunks <= chunks
        assert made.stored_tokens_per_rank >= tier.registered_chunks * CHUNK


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_simulation_gives_the_same_result(policy):
    first, second = (run(agents(ROUNDS), policy, 20) for _ in range(2))
    assert first.to_json() | {"wall_s": 0} == second.to_json() | {"wall_s": 0}
    np.testing.assert_array_equal(first.outcome.calls.finished_s, second.outcome.calls.finished_s)


class Watched(ReturnTier):
    """Looks at the GPU whenever nothing runs on it."""

    engine: Engine

    def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
        lasts = np.flatnonzero(self._chunk_of_block != NONE)
        held = {int(self._chunk_of_block[block]) for block in lasts if self.engine.holder[block] != NONE}
        assert not held & self.sole.keys()
        assert self.spare.keys() <= held
        return super().look_up(call, tokens, gpu_tokens, now_s)


@settings(compiles, max_examples=40)
@given(any_tasks, st.integers(0, 100), st.integers(1, 40))
def test_an_exclusive_tier_holds_what_the_gpu_holds_only_as_copies_that_go_first(tasks, spare_tokens, chunks):
    workload = agents(tasks)
    deployed = deployment(workload, spare_tokens=spare_tokens, max_num_seqs=1)
    tier = Watched(workload, chunks)
    simulation = Simulation(workload, deployed.pool, [deployed.engine], [tier], COSTS, logs_evictions=True)
    tier.engine = simulation._engines[0]
    simulation.run()


@settings(compiles, max_examples=30)
@given(any_tasks, st.randoms(use_true_random=False), st.integers(0, 60), st.integers(1, 20))
def test_who_knows_what_comes_finds_most_on_the_same_order(tasks, random, spare_tokens, chunks):
    # Chunks of a block each: all hits are worth the same then.
    workload = Workload.of(agents(tasks).blocks, BLOCK, gpu_block_tokens=BLOCK)
    deployed = deployment(workload, spare_tokens=spare_tokens)
    sent_s = in_turns(workload.chunks.lane, random)
    exclusive = Configuration(host_gib(chunks), ADMISSION, "exclusive")
    tier = Unpinned(workload, chunks * CHUNK // BLOCK, sent_s)
    known = found_chunks(simulate(workload, deployed, exclusive, sent_s=sent_s, tiers=[tier]))
    for other in (exclusive, Configuration(host_gib(chunks)), Configuration(host_gib(chunks), policy=RECOMMENDED)):
        assert known >= found_chunks(simulate(workload, deployed, other, sent_s=sent_s))


class Unpinned(ClairvoyantTier):
    """Calls that never meet are admitted when they are looked up: nothing must be held until they are."""

    def _is_awaited(self, key: int) -> bool:
        return False


def found_chunks(made: Simulated) -> int:
    return int((np.maximum(made.outcome.host_tokens, made.outcome.calls.gpu_tokens) // BLOCK).sum())


def in_turns(lanes: Ints, random) -> np.ndarray:
    """Send times of calls that never meet: any interleaving that keeps each lane's order."""
    order = lanes.tolist()
    random.shuffle(order)
    waiting = {lane: np.flatnonzero(lanes == lane).tolist() for lane in set(order)}
    sent_s = np.zeros(len(lanes))
    for turn, lane in enumerate(order):
        sent_s[waiting[lane].pop(0)] = 1000.0 * turn
    return sent_s


def test_host_and_gpu_together_hold_what_neither_holds_alone():
    workload = agents(ROUNDS)
    unlimited = run(workload, "exclusive", 1000, spare_tokens=200)
    chunks = 60
    inclusive = simulate(workload, deployment(workload, spare_tokens=200), Configuration(host_gib(chunks)))
    exclusive = run(workload, "exclusive", chunks, spare_tokens=200)
    assert unlimited.computed_prefill_tokens <= exclusive.computed_prefill_tokens
    assert exclusive.computed_prefill_tokens < inclusive.computed_prefill_tokens


def test_a_restored_chunk_is_not_written_twice_while_there_is_room():
    made = run(agents(ROUNDS), "exclusive", 1000)
    (tier,) = made.tiers
    assert isinstance(tier, ExclusiveTier)
    assert made.restored_tokens_per_rank > 0
    assert made.stored_tokens_per_rank == (len(tier.sole) + len(tier.spare)) * CHUNK


def test_a_chunk_is_stored_from_its_second_sighting_on():
    once, twice = agents([[(40, 4)]]), agents([[(40, 4), (8, 4)]])
    assert run(once, "frequency", 100).stored_tokens_per_rank == 0
    stored = run(twice, "frequency", 100)
    (tier,) = stored.tiers
    assert isinstance(tier, FrequencyGate)
    assert stored.stored_tokens_per_rank == 44 // CHUNK * CHUNK


def test_agents_that_take_turns_are_worth_more_the_longer_they_are_away_until_the_turn_is_over():
    times = ReturnTimes()
    for call in range(400):
        times.opened(call, float(call))
        if call >= 20 and call % 10:  # one in ten ends
            times.returned(call - 20, call + 0.05 * (call % 7))
    times.refresh(400.0)
    indices = times.index(np.array([0.1, 5.0, 15.0, 19.0])).tolist()
    assert indices == sorted(indices)
    assert len(set(indices)) == 4
    assert times.index(np.array([40.0])) < 0.02 * indices[0]


def test_agents_with_long_pauses_are_worth_less_the_longer_they_are_away():
    times = ReturnTimes()
    pauses = np.random.default_rng(1).pareto(0.7, 1000) + 0.1
    for call, pause_s in enumerate(pauses.tolist()):
        times.opened(call, 0.0)
        times.returned(call, pause_s)
    times.refresh(1e6)
    indices = times.index(np.array([0.2, 2.0, 20.0])).tolist()
    assert indices == sorted(indices, reverse=True)


def test_a_chunk_belongs_to_its_last_block():
    workload = agents([[(20, 4), (20, 4)]])
    owners = chunk_of_block(workload)
    for call in range(2):
        blocks, chunks = workload.blocks.call_keys(call), workload.chunks.call_keys(call)
        assert owners[blocks[CHUNK // BLOCK - 1 :: CHUNK // BLOCK][: len(chunks)]].tolist() == chunks.tolist()


def test_an_unknown_policy_and_a_shared_exclusive_tier_are_refused():
    place = Place(agents([[(20, 4)]]), 10, ADMISSION, 2, 100)
    with pytest.raises(ValueError, match="policy is 'lru'; it must be one of frequency, tinylfu"):
        new_tiers("lru", place)
    with pytest.raises(ValueError, match="exclusive follows one engine's GPU"):
        new_tiers("exclusive", place, shared=True)


def test_the_laboratory_measures_every_rule_and_judges_the_recommended_one():
    workload = agents(ROUNDS)
    study = Study("rounds", workload, deployment(workload, spare_tokens=200, active_pool=8), ADMISSION)
    rows = [measure(study, 1.4, rule) for rule in (*BASELINES, CLAIRVOYANT, RECOMMENDED)]
    (verdict,) = verdicts(rows)
    computed = {row.rule: row.computed_prefill_tokens for row in rows}
    assert verdict.to_best == computed[RECOMMENDED] / min(computed[name] for name in BASELINES)
    assert verdict.to_bound == computed[RECOMMENDED] / computed[CLAIRVOYANT]
    assert verdict.holds == (verdict.to_best <= 1.02 and verdict.to_conditioned <= 0.6)
    assert verdicts(rows[:-1]) == []


def test_a_rule_that_is_not_known_and_a_tier_without_a_chunk_are_no_cells_of_the_table():
    workload = agents(ROUNDS)
    study = Study("rounds", workload, deployment(workload, active_pool=8), ADMISSION)
    with pytest.raises(ValueError, match="rule is 'lru'; it must be one of none, fixed, conditioned, frequency"):
        measure(study, 1.4, "lru")
    with pytest.raises(ValueError, match=r"rounds at γ_H 1e\+06: a tier of .* GiB does not hold a chunk"):
        measure(study, 1e6, "none")


@pytest.mark.parametrize(("gamma_h", "to_conditioned", "holds"), [(1.4, 0.6, True), (1.4, 0.7, False), (3, 0.7, True)])
def test_a_saving_is_asked_for_around_the_transition_only(gamma_h, to_conditioned, holds):
    computed = dict.fromkeys((*BASELINES, CLAIRVOYANT), 1000) | {RECOMMENDED: round(1000 * to_conditioned)}
    rows = [Row("made up", gamma_h, rule, tokens, 0, 0, 0.0, 0.0) for rule, tokens in computed.items()]
    assert [verdict.holds for verdict in verdicts(rows)] == [holds]


def test_only_the_first_sessions_of_several_calls_are_taken():
    workload = first_sessions(agents([[(9, 1)], [(9, 1)] * 3, [(9, 1)] * 2, [(9, 1)] * 4]), 2, least_calls=2)
    assert workload.chunks.session.tolist() == [1, 1, 1, 2, 2]
    assert len(workload.blocks) == 5


def test_unknown_intervals_become_the_time_between_requests():
    workload = agents([[(9, 1)] * 3])
    object.__setattr__(workload.chunks, "interval_s", np.full(3, np.nan))
    object.__setattr__(workload.chunks, "start_s", np.array([1.0, 3.5, 4.0]))
    intervals_s = with_intervals(workload).chunks.interval_s
    assert np.isnan(intervals_s[0])
    assert intervals_s[1:].tolist() == [2.5, 0.5]


def test_a_pool_smaller_than_asked_for_sizes_the_tier_by_its_sessions():
    workload = agents([[(9, 1)], [(9, 1)]])
    study = Study("two", workload, deployment(workload, active_pool=16), ADMISSION)
    assert study.host_gib(2.0) == pytest.approx(workload.mean_prompt_tokens / 2 * 2 / (1 << 30))
    assert study.deployment.pool == Pool(16)


def test_the_experiment_on_real_engines_is_a_plan_that_sweeps_can_read():
    plan = load_plan(Path(__file__).parents[2] / "deploy" / "reproduce" / "policies.yaml")
    lazy = [runs for runs in plan.runs if runs.lazy_offload == (True,)]
    assert [runs.mode for runs in lazy] == [("server",)]
    assert {name for runs in plan.runs for name in runs.admission} >= set(BASELINES)
