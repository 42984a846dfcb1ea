"""The simulator: nothing is lost or made up, engines behave as vLLM's, and trivial ones as the theory says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="needs the extra sizing")

from lru_streams import compiles
from simulated_agents import BETA, BLOCK, CHUNK, COSTS, Tasks, agents, any_tasks, deployment, host_gib

from efficient_lmcache.core.coverage import covered_tokens_at
from efficient_lmcache.simulate._engine_state import NONE
from efficient_lmcache.simulate.deployment import Configuration, Deployment, Simulated, simulate
from efficient_lmcache.simulate.engine import EngineSettings
from efficient_lmcache.simulate.routing import by_session
from efficient_lmcache.simulate.simulation import Outcome, Pool, Simulation
from efficient_lmcache.simulate.tiers import LMCacheTier
from efficient_lmcache.sizing.policy_tier import Admission, serve
from efficient_lmcache.sizing.workload import Workload

admissions = st.sampled_from(["none", "fixed", "conditioned"])
#: Long enough for preemptions, refills and evictions.
BUSY: Tasks = [[(20 + task % 7, 3 + task % 5)] * 6 for task in range(12)]


def run(workload: Workload, deployed: Deployment, chunks: int = 0, admission: str = "none") -> Simulated:
    made = Configuration(host_gib(chunks), Admission(admission, write_threshold_chunks=1, activity_window_s=5.0))
    return simulate(workload, deployed, made)


@compiles
@example([[(1, 1), (1, 1)], [(1, 1), (15, 1)]], 0, 0, "none", False, 1)
@given(any_tasks, st.integers(0, 200), st.integers(0, 40), admissions, st.booleans(), st.integers(1, 3))
def test_every_prompt_token_is_computed_restored_or_found_and_every_event_follows_its_cause(
    tasks, spare_tokens, chunks, admission, reserves_prompt, engines
):
    workload = agents(tasks)
    deployed = deployment(workload, spare_tokens=spare_tokens, reserves_prompt=reserves_prompt, engines=engines)
    made = run(workload, deployed, chunks, admission)
    outcome, calls = made.outcome, made.outcome.calls
    assert made.computed_prefill_tokens + made.restored_tokens_per_rank + made.gpu_hit_tokens == made.prompt_tokens
    assert (calls.gpu_tokens + calls.restored_tokens < calls.prompt_tokens).all()
    assert (calls.produced_tokens == calls.output_tokens).all()
    times_s = (outcome.arrived_s, outcome.looked_up_s, calls.admitted_s, calls.first_token_s, calls.finished_s)
    for earlier_s, later_s in pairwise(times_s):
        assert (earlier_s <= later_s).all()
    followers = np.flatnonzero(np.diff(workload.chunks.lane) == 0)
    assert outcome.arrived_s[followers + 1] == pytest.approx(calls.finished_s[followers] + 0.5)
    prefilled = sum(int(engine.state["prefilled_tokens"][0]) for engine in outcome.engines)
    assert prefilled >= made.computed_prefill_tokens
    assert prefilled == made.computed_prefill_tokens or made.preemptions


@compiles
@given(any_tasks, st.integers(0, 100), st.integers(1, 30), admissions)
def test_what_a_tier_stored_is_resident_or_was_evicted(tasks, spare_tokens, chunks, admission):
    workload = agents(tasks)
    made = run(workload, deployment(workload, spare_tokens=spare_tokens), chunks, admission)
    (tier,) = made.tiers
    assert isinstance(tier, LMCacheTier)
    held = (tier.registered_chunks + tier.evicted_chunks) * CHUNK
    assert made.stored_tokens_per_rank == held if admission != "none" else made.stored_tokens_per_rank >= held
    assert tier.registered_chunks <= chunks
    assert set(tier.decisions) == set(range(made.calls))


@compiles
@given(any_tasks, st.integers(0, 100), st.booleans())
def test_a_cache_is_whole_when_all_calls_have_left(tasks, spare_tokens, reserves_prompt):
    workload = agents(tasks)
    made = run(workload, deployment(workload, spare_tokens=spare_tokens, reserves_prompt=reserves_prompt))
    (engine,) = made.outcome.engines
    state = engine.state[0]
    assert (state["running"], state["waiting"]) == (0, 0)
    blocks = engine.blocks[:-1]
    assert state["free_blocks"] == len(blocks)
    assert state["free_rows"] == len(engine.places)
    assert not blocks["users"].any()
    held = np.flatnonzero(blocks["key"] != NONE)
    assert (engine.holder[blocks["key"][held]] == held).all()
    assert (engine.holder != NONE).sum() == len(held)


engine_sizes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), min_size=1, max_size=4)


@compiles
@given(any_tasks, engine_sizes, st.integers(1, 20))
def test_engines_that_share_nothing_do_what_each_would_do_alone(tasks, sizes, chunks):
    workload, pool = agents(tasks), Pool(len(tasks))

    def outcome(work: Workload, engines: list[EngineSettings]) -> Outcome:
        tiers = [LMCacheTier(work.chunks, chunks, Admission(), BETA) for _ in engines]
        return Simulation(work, pool, engines, tiers, COSTS, router=by_session).run()

    engines = [deployment(workload, spare_tokens=spare, max_num_seqs=seqs).engine for spare, seqs in sizes]
    together = outcome(workload, engines)
    for number, engine in enumerate(engines):
        mine = np.flatnonzero(together.engine == number)
        if not len(mine):
            continue
        own = replace(workload, chunks=workload.chunks.reordered(mine), blocks=workload.blocks.reordered(mine))
        alone = outcome(own, [engine])
        for name in ("gpu_tokens", "restored_tokens", "preemptions", "admitted_s", "finished_s"):
            assert getattr(alone.calls, name).tolist() == getattr(together.calls, name)[mine].tolist()


@compiles
@given(any_tasks, st.integers(0, 60))
def test_calls_one_at_a_time_find_what_stack_distances_say(tasks, spare_blocks):
    # Calls whose computed tokens fill their blocks to the end: a last block without a key is none of the theory's.
    whole = [[(BLOCK * added + (not number), BLOCK) for number, (added, _) in enumerate(calls)] for calls in tasks]
    workload = agents(whole)
    deployed = deployment(workload, spare_tokens=spare_blocks * BLOCK, active_pool=1, max_num_seqs=1)
    made = run(workload, deployed)
    blocks = workload.blocks
    capacity = deployed.engine.gpu_kv_tokens // BLOCK - 1
    covered = covered_tokens_at(blocks, capacity)
    most = (blocks.prompt_tokens - 1) // BLOCK * BLOCK
    assert made.outcome.calls.gpu_tokens.tolist() == np.minimum(covered, most).tolist()


@compiles
@given(any_tasks, st.integers(1, 30))
def test_a_tier_behind_calls_one_at_a_time_is_the_planners_tier(tasks, chunks):
    workload = agents(tasks)
    made = run(workload, deployment(workload, active_pool=1, max_num_seqs=1, max_batched_tokens=10_000), chunks)
    served = serve(workload.chunks, chunks)
    assert made.outcome.host_tokens.tolist() == served.covered_tokens.tolist()
    assert made.stored_tokens_per_rank == served.stored_tokens


@pytest.mark.parametrize("reserves_prompt", [True, False])
def test_the_same_arguments_give_the_same_result(reserves_prompt):
    workload = agents(BUSY)
    deployed = deployment(workload, spare_tokens=100, reserves_prompt=reserves_prompt)
    rows = [{**run(workload, deployed, 20, "conditioned").to_json(), "wall_s": 0} for _ in range(2)]
    assert rows[0] == rows[1]


def test_no_more_calls_run_or_are_in_progress_than_allowed_and_littles_law_holds():
    workload = agents(BUSY)
    deployed = deployment(workload, spare_tokens=300, active_pool=7, max_num_seqs=3)
    made = run(workload, deployed)
    outcome, calls = made.outcome, made.outcome.calls
    assert _most_at_once(calls.admitted_s, calls.finished_s) <= 3
    assert _most_at_once(outcome.arrived_s, calls.finished_s) <= 7
    # The mean queue is the arrival rate times the mean wait, whichever way it is counted.
    times_s = np.linspace(0, made.makespan_s, 20_001)
    waiting = [((outcome.arrived_s <= at_s) & (at_s < calls.admitted_s)).sum() for at_s in times_s]
    rate_per_s = made.calls / made.makespan_s
    assert np.mean(waiting) == pytest.approx(rate_per_s * made.queue_delay_mean_s, rel=0.01)


def test_engines_that_admit_by_the_first_step_alone_preempt_and_compute_again():
    workload = agents(BUSY)
    hasty = run(workload, deployment(workload, spare_tokens=40, max_num_seqs=6, reserves_prompt=False))
    careful = run(workload, deployment(workload, spare_tokens=40, max_num_seqs=6, reserves_prompt=True))
    assert hasty.preemptions > careful.preemptions
    assert hasty.recomputed_tokens > 0


def test_agents_that_stay_on_an_engine_find_more_than_agents_that_wander():
    workload = agents(BUSY)
    found = {
        route: run(workload, deployment(workload, spare_tokens=400, active_pool=8, engines=3, route=route))
        for route in ("load", "session", "prefix")
    }
    assert found["load"].gpu_hit_tokens < found["session"].gpu_hit_tokens
    assert found["load"].gpu_hit_tokens < found["prefix"].gpu_hit_tokens
    assert set(found["load"].outcome.engine.tolist()) == {0, 1, 2}


def test_engines_with_one_tier_restore_what_another_engine_stored():
    workload = agents(BUSY)
    alone = run(workload, deployment(workload, engines=3, active_pool=8), 200)
    shared = run(workload, deployment(workload, engines=3, active_pool=8, shared_tier=True), 200)
    assert shared.restored_tokens_per_rank > alone.restored_tokens_per_rank
    assert shared.computed_prefill_tokens < alone.computed_prefill_tokens


def test_a_prompt_that_does_not_fit_is_named_with_its_length():
    workload = agents([[(100, 1)]])
    deployed = deployment(workload)
    small = type(deployed.engine)(16, 3, 16)
    with pytest.raises(ValueError, match=r"call 0 has 104 prompt tokens; they do not fit into the GPU's 12"):
        simulate(workload, type(deployed)(small, deployed.costs, 1, deployed.pool), Configuration(0.0))


@pytest.mark.parametrize("plans_ahead", [True, False])
def test_a_call_whose_output_does_not_fit_is_named_and_one_that_just_fits_ends(plans_ahead):
    workload = agents([[(8, 2)], [(8, 6)]])
    deployed = deployment(workload)

    def simulated(gpu_blocks: int) -> Simulated:
        engine = replace(deployed.engine, gpu_kv_tokens=(gpu_blocks + 1) * BLOCK, plans_ahead=plans_ahead)
        return simulate(workload, replace(deployed, engine=engine), Configuration(0.0))

    # The last output token is not computed: 12 + 6 - 1 tokens are 5 blocks.
    with pytest.raises(ValueError, match=r"call 1 has 12 prompt tokens and 6 of output; they do not fit .* GPU's 16"):
        simulated(4)
    assert (simulated(5).outcome.calls.produced_tokens == [2, 6]).all()


@pytest.mark.parametrize(("keyless_first", "found_tokens"), [(True, 8), (False, 4)])
def test_blocks_that_nobody_can_find_again_are_taken_before_the_prefix_cache(keyless_first, found_tokens):
    # Three blocks: the first agent leaves two full ones, the second one's is not full, the third one takes one.
    workload = agents([[(8, 1), (1, 1)], [(1, 1)], [(1, 1)]], interval_s=100.0, shared_blocks=0)
    deployed = deployment(workload, active_pool=2)
    engine = replace(deployed.engine, gpu_kv_tokens=4 * BLOCK, keyless_first=keyless_first)
    made = simulate(workload, replace(deployed, engine=engine), Configuration(0.0))
    assert made.outcome.calls.gpu_tokens.tolist() == [0, found_tokens, 0, 0]


@pytest.mark.parametrize("plans_ahead", [True, False])
def test_copies_to_the_host_take_their_time_whether_or_not_the_next_step_is_planned_already(plans_ahead):
    # One call, computed 16 tokens at a time, then decoded: no wait hides a copy.
    workload = agents([[(60, 5)]])
    deployed = deployment(workload)
    deployed = replace(deployed, engine=replace(deployed.engine, plans_ahead=plans_ahead))
    at_no_cost = replace(deployed, costs=replace(deployed.costs, store_s=0.0, stored_token_s=0.0))
    made, without = run(workload, deployed, chunks=20), run(workload, at_no_cost, chunks=20)
    copied_s = 4 * COSTS.store_s + made.stored_tokens_per_rank * COSTS.stored_token_s
    assert (made.stored_tokens_per_rank, without.stored_tokens_per_rank) == (64, 64)
    assert made.makespan_s - without.makespan_s == pytest.approx(copied_s)


def test_a_steps_new_calls_are_stored_before_those_that_go_on():
    class Watched(LMCacheTier):
        def fill(self, call: int, tokens: int, now_s: float) -> int:
            filled.append((call, tokens))
            return super().fill(call, tokens, now_s)

    filled: list[tuple[int, int]] = []
    # A step computes 16 tokens: the first call's 20, then the second one's 12 behind the shared block.
    workload = agents([[(16, 1)], [(12, 1)]])
    tier = Watched(workload.chunks, 10, Admission(), BETA)
    deployed = deployment(workload, spare_tokens=100)
    simulate(
        workload,
        replace(deployed, engine=replace(deployed.engine, plans_ahead=False)),
        Configuration(1.0),
        tiers=[tier],
    )
    assert filled == [(0, 16), (1, 16), (0, 20)]


@pytest.mark.parametrize("plans_ahead", [True, False])
def test_what_engines_share_is_touched_in_the_order_of_time(plans_ahead):
    class Watched(LMCacheTier):
        def look_up(self, call: int, tokens: int, gpu_tokens: int, now_s: float) -> int:
            times_s.append(now_s)
            return super().look_up(call, tokens, gpu_tokens, now_s)

        def fill(self, call: int, tokens: int, now_s: float) -> int:
            times_s.append(now_s)
            return super().fill(call, tokens, now_s)

    times_s: list[float] = []
    workload = agents(BUSY)
    deployed = deployment(workload, engines=3, active_pool=8, shared_tier=True)
    deployed = replace(deployed, engine=replace(deployed.engine, plans_ahead=plans_ahead))
    simulate(workload, deployed, Configuration(1.0), tiers=[Watched(workload.chunks, 200, Admission(), BETA)])
    assert len(times_s) > 200
    assert times_s == sorted(times_s)


def _most_at_once(begin_s: np.ndarray, end_s: np.ndarray) -> int:
    """Most intervals [begin, end) that overlap."""
    events = sorted([(at_s, 1) for at_s in begin_s.tolist()] + [(at_s, -1) for at_s in end_s.tolist()])
    return int(np.cumsum([step for _, step in events]).max())
