"""A shared tier behind a link: what it forgets, what it must hold, and what waits for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs the extra sizing")

from simulated_agents import BETA, CHUNK, Tasks, agents, deployment

from efficient_lmcache.simulate.remote_tier import RemoteTier
from efficient_lmcache.simulate.routing import by_load
from efficient_lmcache.simulate.simulation import Outcome, Simulation
from efficient_lmcache.sizing.workload import Workload

BUSY: Tasks = [[(20 + task % 7, 3 + task % 5)] * 6 for task in range(12)]
ENGINES = 3


def run(workload: Workload, remote: RemoteTier) -> Outcome:
    made = deployment(workload, spare_tokens=40, active_pool=8, engines=ENGINES)
    engines = [made.engine] * ENGINES
    tiers = remote.engine_tiers()
    return Simulation(workload, made.pool, engines, tiers, made.costs, router=by_load, remote=remote).run()


def restored(outcome: Outcome) -> int:
    return int(outcome.calls.restored_tokens.sum())


def test_calls_wait_for_their_reads_and_the_link_carries_one_read_at_a_time():
    workload = agents(BUSY)
    remote = RemoteTier(workload.chunks, BETA, ENGINES, link_bytes_per_s=50.0)
    slow, fast = run(workload, remote), run(workload, RemoteTier(workload.chunks, BETA, ENGINES))
    reads = remote.reads
    begun_s = np.maximum(reads.asked_s, np.concatenate(([0.0], reads.ready_s[:-1])))
    assert reads.ready_s - begun_s == pytest.approx(reads.size_bytes / 50.0)
    assert (reads.size_bytes >= CHUNK * BETA).all()
    waits_s = slow.looked_up_s - slow.arrived_s
    assert (waits_s[slow.calls.restored_tokens > 0] > 0).all()
    assert slow.makespan_s > fast.makespan_s
    assert (fast.looked_up_s >= fast.arrived_s).all()


def test_a_call_that_waits_for_its_read_is_a_load_for_its_engine():
    workload = agents([[(1, 1)]] * 4, shared_blocks=4)
    remote = RemoteTier(workload.chunks, BETA, ENGINES, link_bytes_per_s=1.0)
    made = deployment(workload, engines=ENGINES)
    # The first engine computed what the others must read when three calls come at once.
    sent_s = np.array([0.0, 100.0, 100.0, 100.0])
    engines, tiers = [made.engine] * ENGINES, remote.engine_tiers()
    simulated = Simulation(workload, made.pool, engines, tiers, made.costs, remote=remote, sent_s=sent_s).run()
    assert simulated.engine.tolist() == [0, 0, 1, 2]
    assert len(remote.reads.asked_s) == 2


def test_what_is_stored_after_a_calls_read_was_due_is_no_restore_without_a_read():
    # The second call waits on one engine while another one computes what it begins with.
    workload = agents([[(16, 1), (1, 1)], [(60, 20)]], shared_blocks=0)
    made = deployment(workload, engines=2, max_num_seqs=1)
    sent_s, engines = np.array([0.0, 0.001, 0.0]), [0, 1, 1]
    remote = RemoteTier(workload.chunks, BETA, 2)
    simulated = Simulation(
        workload,
        made.pool,
        [made.engine] * 2,
        remote.engine_tiers(),
        made.costs,
        router=lambda call, *_: engines[call],
        remote=remote,
        sent_s=sent_s,
    ).run()
    assert simulated.looked_up_s[1] > simulated.calls.finished_s[0]
    assert not len(remote.reads.asked_s)
    assert simulated.calls.restored_tokens.tolist() == [0, 0, 0]


def test_nothing_is_found_that_no_call_computed_before():
    workload = agents(BUSY)
    made = run(workload, RemoteTier(workload.chunks, BETA, ENGINES))
    computed = int((made.calls.prompt_tokens - made.calls.gpu_tokens - made.calls.restored_tokens).sum())
    assert computed >= len(np.unique(workload.chunks.keys)) * CHUNK


def test_a_tier_that_nothing_leaves_holds_all_that_was_computed():
    workload = agents(BUSY)
    remote = RemoteTier(workload.chunks, BETA, ENGINES)
    made = run(workload, remote)
    born_s, gone_s = remote.spans()
    assert len(born_s) == len(np.unique(workload.chunks.keys))
    assert ((born_s > 0) & (born_s <= made.makespan_s)).all()
    assert np.isinf(gone_s).all()


def test_a_longer_retention_finds_more_and_holds_more():
    workload = agents(BUSY, interval_s=1.0)
    rows = []
    for retention_s in (0.01, 1.1, math.inf):
        remote = RemoteTier(workload.chunks, BETA, ENGINES, retention_s=retention_s)
        made = run(workload, remote)
        born_s, gone_s = remote.spans()
        assert (gone_s > born_s).all()
        rows.append((restored(made), float((np.minimum(gone_s, made.makespan_s) - born_s).sum())))
    assert rows[0][0] < rows[1][0] < rows[2][0]
    assert rows[0][1] < rows[1][1] < rows[2][1]


def test_what_the_engines_own_tiers_hold_does_not_cross_the_link():
    workload = agents(BUSY)
    read_bytes = []
    for local_chunks in (0, 60, 1000):
        remote = RemoteTier(workload.chunks, BETA, ENGINES, local_chunks=local_chunks)
        run(workload, remote)
        read_bytes.append(remote.reads.size_bytes.sum())
    assert read_bytes[0] > read_bytes[1] > read_bytes[2] > 0


def test_a_link_without_bandwidth_is_named():
    with pytest.raises(ValueError, match=r"RemoteTier.link_bytes_per_s is 0; it must be at least 1"):
        RemoteTier(agents(BUSY).chunks, BETA, link_bytes_per_s=0)
