"""The analyses against what the making of the runs knows, and against slow, plain counts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import CHUNK_TOKENS, OWN_S, SERVICE_S, VOCAB_SIZE, WAITING_S, make_run, write_trace

from efficient_lmcache.replay.trace import Call, Manifest, TraceReader, TraceWriter
from efficient_lmcache.report.condensers import condenser_table
from efficient_lmcache.report.declined import declined_reuse
from efficient_lmcache.report.gap import evicted_before_reuse, new_kv_reuse, reuse_gap
from efficient_lmcache.report.latency import call_times, server_times
from efficient_lmcache.report.pressure import MOST_POINTS, pressure_series
from efficient_lmcache.report.redecide import recorded_facts, recorded_parameters, redecide
from efficient_lmcache.report.runs import Run, Unavailable, read_inputs
from efficient_lmcache.report.thresholds import NEW_CHUNK_BINS, thresholds

ADMISSIONS = ("none", "fixed", "conditioned")
LENGTHS = [[9, 6, 5, 7, 8, 3], [5, 12, 3, 10], [20, 2, 4, 9, 6, 11, 5]]
lengths_of_tasks = st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=5), min_size=1, max_size=4)
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.trace", LENGTHS)


def read(path: Path) -> Run:
    (run,) = read_inputs([path]).runs
    return run


def plain_distances(run: Run) -> list[int | None]:
    """D of every declined chunk, counted reference by reference; None for one never referenced again."""
    with TraceReader(run.trace) as reader:
        calls = {
            (info.task_id, number): call.prompt_tokens
            for index, info in enumerate(reader.tasks)
            for number, call in enumerate(reader.calls(index))
        }
    stream: list[bytes] = []
    declined: list[int] = []
    seen: dict[str, int] = {}
    for row in run.decisions:
        number = seen.setdefault(row["task"], 0)
        seen[row["task"]] += 1
        prompt = calls[row["task"], number]
        matched = row["host_match_tokens"] // CHUNK_TOKENS
        for chunk in reversed(range(len(prompt) // CHUNK_TOKENS)):
            if not row["save"] and chunk >= matched:
                declined.append(len(stream))
            stream.append(prompt[: (chunk + 1) * CHUNK_TOKENS].tobytes())
    distances: list[int | None] = []
    for place in declined:
        later = [at for at in range(place + 1, len(stream)) if stream[at] == stream[place]]
        distances.append(len(set(stream[place + 1 : later[0]])) if later else None)
    return distances


@few
@given(lengths=lengths_of_tasks, capacity=st.integers(1, 40), admission=st.sampled_from(("fixed", "conditioned")))
def test_declined_chunks_are_told_apart_by_their_reuse_distance(
    lengths: list[list[int]], capacity: int, admission: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("declined")
    run = read(make_run(path, "run", write_trace(path / "t", lengths), admission, capacity).path)
    distances = plain_distances(run)
    again = [distance for distance in distances if distance is not None]
    found = declined_reuse(run)
    assert found.capacity_chunks == capacity
    assert found.chunks == len(distances) == run.record["decisions"]["declined_chunks"]
    assert found.never == distances.count(None)
    assert found.beyond == sum(distance >= capacity for distance in again)
    assert found.within == sum(distance < capacity for distance in again)
    if again:
        assert found.ratio is not None
        assert found.ratio.mean == pytest.approx(sum(again) / len(again) / capacity)


@few
@given(lengths=lengths_of_tasks, capacity=st.integers(1, 40), admission=st.sampled_from(ADMISSIONS))
def test_the_recorded_facts_decide_the_same_again(
    lengths: list[list[int]], capacity: int, admission: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("thresholds")
    run = read(make_run(path, "run", write_trace(path / "t", lengths), admission, capacity).path)
    found = thresholds(run)
    assert found.reproduced == found.decisions == sum(found.new_chunks) == len(run.decisions)
    assert len(found.new_chunks) == len(NEW_CHUNK_BINS)
    own = next(of for of in found.write_thresholds if of.write_threshold_chunks == found.write_threshold_chunks)
    if admission != "none":
        counts = run.record["decisions"]
        assert (own.declined, own.declined_chunks) == (counts["declined"], counts["declined_chunks"])
    for smaller, larger in pairwise(found.write_thresholds):
        assert smaller.declined >= larger.declined
    for lower, higher in pairwise(found.occupancy_thresholds):
        assert lower.pressure >= higher.pressure
    (recorded,) = (of for of in found.occupancy_thresholds if of.occupancy_threshold == 0.95)
    assert recorded.changed == 0


def test_new_chunks_are_counted_in_the_papers_bins(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "run", trace, "none", 8).path
    rows = [json.loads(line) for line in (path / "decisions.jsonl").read_text().splitlines()]
    sizes = [0, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 900]
    rows = [{**rows[index], "new_full_chunks": size} for index, size in enumerate(sizes)]
    (path / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = thresholds(read(path))
    assert found.new_chunks == (2, 1, 1, 2, 2, 2, 2, 2, 2)
    assert found.at_most_one_new_chunk == 3
    assert found.median_refill_chunks == 16.5


@few
@given(lengths=lengths_of_tasks, capacity=st.integers(1, 40), admission=st.sampled_from(ADMISSIONS))
def test_chunks_evicted_before_reuse_are_those_that_the_tier_lost(
    lengths: list[list[int]], capacity: int, admission: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("evicted")
    made = make_run(path, "run", write_trace(path / "t", lengths), admission, capacity)
    found = evicted_before_reuse(read(made.path))
    assert (found.written_chunks, found.evicted_chunks) == (made.written, made.evicted)
    assert found.needed_chunks == found.written_chunks  # these agents only append
    assert found.recomputed_chunks == found.evicted_chunks  # the GPU kept nothing


def test_evicted_chunks_that_the_gpu_still_has_are_not_recomputed(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "run", trace, "none", 6).path
    rows = [json.loads(line) for line in (path / "calls.jsonl").read_text().splitlines()]
    rows = [{**row, "cached_tokens": row["prompt_tokens"] - 1} for row in rows]
    (path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evicted_before_reuse(read(path))
    assert found.evicted_chunks > 0
    assert found.recomputed_chunks == 0


def test_the_gap_is_own_time_and_waiting_whatever_the_servers_clock(tmp_path: Path) -> None:
    # One task: nothing but its own time and the wait lies between two of its turns.
    trace = write_trace(tmp_path / "t", [[9, 6, 5, 7]])
    found = reuse_gap(read(make_run(tmp_path, "run", trace, "none", 8).path))
    assert found.own_s.count == 3
    assert found.own_s.p50 == pytest.approx(OWN_S)
    assert found.gap_s.p50 == pytest.approx(OWN_S + WAITING_S)
    assert found.waiting_s.p50 == pytest.approx(WAITING_S)
    assert found.median_ratio == pytest.approx((OWN_S + WAITING_S) / OWN_S)


def test_decisions_without_the_traces_task_names_give_no_gap(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "run", trace, "none", 8, options={"label_tasks": False}).path
    text = (path / "decisions.jsonl").read_text()
    (path / "decisions.jsonl").write_text(text.replace('"task-', '"inferred-'))
    with pytest.raises(Unavailable, match="--no-label-tasks"):
        reuse_gap(read(path))


def test_decisions_of_other_calls_than_the_runs_are_not_used(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "run", trace, "fixed", 8).path
    lines = (path / "decisions.jsonl").read_text().splitlines(keepends=True)
    (path / "decisions.jsonl").write_text("".join(lines[1:]))
    for analysis in (reuse_gap, evicted_before_reuse, declined_reuse):
        with pytest.raises(Unavailable, match="prompt tokens"):
            analysis(read(path))


def test_new_kv_reappears_as_far_as_the_next_prompt_keeps_it(tmp_path: Path) -> None:
    def tokens(*ids: int) -> list[int]:
        return list(ids)

    # 4 + 2 new; 2 + 2 new of which the edit below keeps 1 + 0; the last call's 2 + 2.
    prompts = [tokens(1, 2, 3, 4), tokens(1, 2, 3, 4, 90, 91, 5, 6), tokens(1, 2, 3, 4, 90, 91, 5, 7, 8)]
    with TraceWriter(tmp_path / "t", Manifest(VOCAB_SIZE, "synthetic", "a test")) as writer:
        writer.write_task("task-0", [Call(prompt, [90, 91], 0.0) for prompt in prompts])  # type: ignore[arg-type]
    found = new_kv_reuse(read(make_run(tmp_path, "run", tmp_path / "t", "none", 8).path))
    assert (found.new_tokens, found.reappearing_tokens) == (6 + 4, 6 + 1)
    assert found.share_of_all == pytest.approx(7 / (10 + 4))


def test_server_times_are_what_the_sums_grew_by(tmp_path: Path, trace: Path) -> None:
    run = read(make_run(tmp_path, "run", trace, "none", 8).path)
    found = server_times(run)
    assert found.requests == run.record["calls"]
    assert found.queue_s == pytest.approx(WAITING_S)
    assert found.request_s == pytest.approx(WAITING_S + SERVICE_S)
    assert call_times(run).p90 == pytest.approx(WAITING_S + SERVICE_S)


def test_a_metric_that_the_server_lacks_is_named(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "run", trace, "none", 8).path
    for moment in ("before", "after"):
        file = path / f"metrics-{moment}.txt"
        file.write_text(file.read_text().replace("request_queue_time", "other"))
    with pytest.raises(Unavailable, match="lacks vllm:request_queue_time_seconds"):
        server_times(read(path))


def test_pressure_is_drawn_from_few_points_with_both_ends(tmp_path: Path, trace: Path) -> None:
    path = make_run(tmp_path, "run", trace, "conditioned", 4).path
    rows = [json.loads(line) for line in (path / "decisions.jsonl").read_text().splitlines()]
    many = [{**rows[number % len(rows)], "now_s": 100.0 + number} for number in range(3 * MOST_POINTS + 1)]
    (path / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    found = pressure_series(read(path))
    assert found.decisions == len(many)
    assert len(found.time_s) == len(found.pressure) == len(found.declined) == MOST_POINTS
    assert (found.time_s[0], found.time_s[-1]) == (0.0, len(many) - 1.0)
    assert found.declined[-1] == sum(not row["save"] for row in many)
    assert max(found.working_set_to_capacity, key=lambda ratio: ratio or 0) == pytest.approx(
        max(row["estimate"]["bytes"] / row["capacity_bytes"] for row in rows)
    )


def test_of_a_tier_that_never_told_its_capacity_everything_else_is_shown(tmp_path: Path, trace: Path) -> None:
    """An LMCache server that could not be asked."""
    path = make_run(tmp_path, "run", trace, "conditioned", 4).path
    unknown = {"capacity_bytes": None, "report_age_s": None, "occupancy": None, "evicted_chunks": None}
    rows = [json.loads(line) | unknown for line in (path / "decisions.jsonl").read_text().splitlines()]
    (path / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read(path)
    assert set(pressure_series(run).working_set_to_capacity) == {None}
    decisions = redecide("conditioned", recorded_parameters(run), recorded_facts(run))
    assert not any(decision.pressure for decision in decisions)
    with pytest.raises(Unavailable, match="never told its capacity"):
        declined_reuse(run)


def test_condensers_are_compared_by_hits_and_stable_length(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "plain.trace", LENGTHS)
    step = {"step": "condense", "condenser": "recent", "keep": 2}
    edited = write_trace(tmp_path / "edited.trace", [[4, 3], [2, 2], [3]], history=(step,))
    runs = [
        make_run(tmp_path / "runs", "b", edited, "recompute", 0),
        make_run(tmp_path / "runs", "a", plain, "recompute", 0),
    ]
    runs.append(make_run(tmp_path / "runs", "c", edited, "none", 8))
    none, condensed, offloaded = condenser_table([read(run.path) for run in runs])
    assert (none.condenser, condensed.condenser) == ("none", "recent (keep 2)")
    assert none.computed_prefill_tokens
    assert condensed.computed_prefill_tokens
    ratio = condensed.computed_prefill_tokens / none.computed_prefill_tokens
    assert [row.computed_to_recorded for row in (none, condensed, offloaded)] == [1.0, ratio, None]
    assert none.prefix_hit_rate == pytest.approx(0.75)
    assert condensed.mean_prompt_tokens == pytest.approx((8 + 13 + 6 + 10 + 7) / 5)
    assert condensed.cache_stable_share == pytest.approx((10 + 8) / (8 + 13 + 6 + 10 + 7))
    with pytest.raises(Unavailable, match="condense step"):
        condenser_table([read(runs[1].path)])
