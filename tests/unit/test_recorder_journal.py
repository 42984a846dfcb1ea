"""The journal: what a killed or restarted recorder keeps."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder_harness import finished_trace

from efficient_lmcache.replay.recorder import recorder as recorder_module
from efficient_lmcache.replay.recorder.finish import write_trace
from efficient_lmcache.replay.recorder.journal import CallRecord, JournalError, JournalReader, journal_path
from efficient_lmcache.replay.recorder.key_file import key_path
from efficient_lmcache.replay.recorder.lanes import Lanes
from efficient_lmcache.replay.recorder.recorder import Recorder, RecordOptions
from efficient_lmcache.replay.trace import Tokens, TraceReader

OPTIONS = {"vocab_size": 5000}


def tokens(*ids: int, count: int = 1) -> Tokens:
    return np.array(ids * count, np.uint32)


def record(recorder: Recorder, task: str | None, prompt: Tokens, output: Tokens) -> None:
    recorder.begin(task).finish(prompt, output)


@pytest.mark.parametrize("cut_bytes", [1, 5, 11, 40])
def test_a_last_record_that_was_cut_off_is_dropped_and_said(tmp_path: Path, cut_bytes: int) -> None:
    options, said = RecordOptions(tmp_path / "T", **OPTIONS), []
    first = Recorder(options)
    for number in range(3):
        record(first, "a", tokens(1, 2, 3, number, count=20), tokens(number + 1))
    first.close()
    journal = journal_path(options.out)
    os.truncate(journal, journal.stat().st_size - cut_bytes)
    second = Recorder(options, said.append)
    assert second.tally.calls == 2
    assert any("cut off" in text for text in said)
    record(second, "a", tokens(7, 8), tokens(9))
    second.close()
    calls = finished_trace(options.out)["a"]
    assert [call.output_tokens.tolist() for call in calls] == [[1], [2], [9]]
    assert not journal.exists()


def test_damage_inside_a_journal_is_an_error_that_names_the_record(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", **OPTIONS)
    recorder = Recorder(options)
    sizes = []
    for number in range(3):
        record(recorder, "a", tokens(number, count=50), tokens(1))
        sizes.append(journal_path(options.out).stat().st_size)
    recorder.close()
    with open(journal_path(options.out), "r+b") as file:
        file.seek(sizes[0] + 12)
        file.write(b"\xff\xff")
    with pytest.raises(JournalError, match=r"T\.journal: record 2 is damaged"):
        write_trace(options.out)
    assert journal_path(options.out).exists()


def test_a_restart_of_other_options_and_a_second_recorder_are_refused(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", **OPTIONS)
    recorder = Recorder(options)
    with pytest.raises(JournalError, match="another recorder is writing it"):
        Recorder(options)
    recorder.close()
    with pytest.raises(JournalError, match="was begun with vocab_size=5000, not 6"):
        Recorder(RecordOptions(options.out, 6))


def test_a_recording_that_goes_on_cannot_be_finished_from_outside(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", **OPTIONS)
    recorder = Recorder(options)
    record(recorder, "a", tokens(1), tokens(2))
    with pytest.raises(JournalError, match="another recorder is writing it"):
        write_trace(options.out)
    record(recorder, "a", tokens(3), tokens(4))
    recorder.close()
    assert len(finished_trace(options.out)["a"]) == 2


def test_a_clock_that_was_set_back_while_no_recorder_ran_opens_no_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAKE: the machine's clock."""
    options = RecordOptions(tmp_path / "T", **OPTIONS)
    for unix_s in (1_000_000.0, 900_000.0):
        monkeypatch.setattr(recorder_module.time, "time", lambda unix_s=unix_s: unix_s)
        recorder = Recorder(options)
        record(recorder, "a", tokens(1), tokens(2))
        recorder.close()
    assert [len(calls) for calls in finished_trace(options.out).values()] == [2]


def test_a_private_journal_without_records_needs_no_key_yet(tmp_path: Path) -> None:
    """As a kill between the two files' creation leaves it."""
    options = RecordOptions(tmp_path / "T", private=True, **OPTIONS)
    Recorder(options).close()
    key_path(options.out).unlink()
    recorder = Recorder(options)
    record(recorder, "a", tokens(1), tokens(2))
    recorder.close()
    key = key_path(options.out).read_bytes()
    Recorder(options).close()
    assert key_path(options.out).read_bytes() == key


def test_a_damaged_key_is_named(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", private=True, **OPTIONS)
    recorder = Recorder(options)
    record(recorder, "a", tokens(1), tokens(2))
    recorder.close()
    key_path(options.out).write_bytes(b"short")
    with pytest.raises(JournalError, match=r"T\.key: has 5 bytes; the private journal's key has 32"):
        Recorder(options)


def test_tasks_and_lanes_go_on_after_a_restart(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", **OPTIONS)
    conversation = np.random.default_rng(0).integers(5000, size=2000, dtype=np.uint32)
    for length in (500, 700, 900):
        recorder = Recorder(options)
        record(recorder, None, conversation[:length], tokens(1, 2))
        record(recorder, None, np.flip(conversation)[:length], tokens(3))
        recorder.close()
    trace = finished_trace(options.out)
    assert {name: len(calls) for name, calls in trace.items()} == {"inferred-1": 3, "inferred-2": 3}
    assert trace["inferred-1"][2].prompt_tokens.tolist() == conversation[:900].tolist()


def test_a_private_recording_is_consistent_over_a_restart_and_its_key_goes_with_the_journal(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", private=True, **OPTIONS)
    prompt, output = tokens(*range(100, 300)), tokens(5, 6, 7)
    for added in (0, 50):
        recorder = Recorder(options)
        record(recorder, "django-1", np.concatenate((prompt, output, tokens(*range(added)))), output)
        recorder.close()
        assert stat.S_IMODE(key_path(options.out).stat().st_mode) == 0o600
    ((name, (first, second)),) = finished_trace(options.out).items()
    assert name.startswith("task-")
    known = np.concatenate((first.prompt_tokens, first.output_tokens))
    # The second prompt goes on with other tokens than the first output.
    assert second.prompt_tokens[:203].tolist() == known[:203].tolist()
    assert first.prompt_tokens[:200].tolist() != prompt.tolist()
    assert not key_path(options.out).exists()
    with TraceReader(options.out) as reader:
        assert any("pseudonyms" in text for text in reader.manifest.assumptions)


def test_a_private_journal_without_its_key_is_refused(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", private=True, **OPTIONS)
    recorder = Recorder(options)
    record(recorder, "a", tokens(1), tokens(2))
    recorder.close()
    key_path(options.out).unlink()
    with pytest.raises(JournalError, match=r"T\.key"):
        Recorder(options)

    with pytest.raises(JournalError, match=r"T\.key: the private journal's key cannot be read"):
        write_trace(options.out)
    assert journal_path(options.out).exists()


def test_a_private_journal_shows_no_ids_and_no_names(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", private=True, **OPTIONS)
    recorder = Recorder(options)
    prompt = np.arange(1000, 1500, dtype=np.uint32)
    record(recorder, "django-1", prompt, tokens(7))
    record(recorder, "django-1", prompt, tokens(7))
    recorder.close()
    with JournalReader(journal_path(options.out)) as reader:
        first, second = (call for _, call in reader.records() if isinstance(call, CallRecord))
    assert "django" not in first.task
    assert prompt[:2].tobytes() not in first.added
    assert first.output != second.output
    assert tokens(7).tobytes() not in (first.output, second.output)


def test_a_private_recording_goes_on_with_the_tasks_that_nobody_named(tmp_path: Path) -> None:
    options = RecordOptions(tmp_path / "T", private=True, **OPTIONS)
    conversation = np.random.default_rng(0).integers(5000, size=2000, dtype=np.uint32)
    for length in (500, 700, 900):
        recorder = Recorder(options)
        record(recorder, None, conversation[:length], tokens(1, 2))
        recorder.close()
    assert {name: len(calls) for name, calls in finished_trace(options.out).items()} == {"inferred-1": 3}


def test_a_full_disk_costs_the_record_and_not_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAKE: a disk that is full for one write, which a test cannot provoke without privileges."""
    options, said = RecordOptions(tmp_path / "T", **OPTIONS), []
    recorder = Recorder(options, said.append)
    record(recorder, "a", tokens(1), tokens(2))
    written = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        written(fd, bytes(data)[:7], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    record(recorder, "a", tokens(3), tokens(4))
    monkeypatch.undo()
    record(recorder, "a", tokens(5), tokens(6))
    recorder.close()
    assert any("No space left" in text for text in said)
    assert [call.output_tokens.tolist() for call in finished_trace(options.out)["a"]] == [[2], [6]]


def test_without_a_vocabulary_the_highest_id_decides(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "T"))
    record(recorder, "a", tokens(1, 77), tokens(2))
    recorder.close()
    write_trace(tmp_path / "T")
    with TraceReader(tmp_path / "T") as reader:
        assert reader.manifest.vocab_size == 78


def test_a_call_that_begins_while_the_stream_before_it_ends_overlaps_nothing(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "T", **OPTIONS))
    first = recorder.begin("a")
    first.know_output()
    second = recorder.begin("a")
    first.finish(tokens(1), tokens(2))
    second.finish(tokens(3), tokens(4))
    recorder.close()
    assert [len(calls) for calls in finished_trace(tmp_path / "T").values()] == [2]


def test_a_label_that_looks_like_a_lane_or_an_inferred_task_does_not_collide(tmp_path: Path) -> None:
    recorder = Recorder(RecordOptions(tmp_path / "T", **OPTIONS))
    first, second = recorder.begin("a"), recorder.begin("a")
    first.finish(tokens(1), tokens(2))
    second.finish(tokens(3), tokens(4))
    record(recorder, "a#2", tokens(5), tokens(6))
    record(recorder, None, tokens(7), tokens(8))
    record(recorder, "inferred-1", tokens(9), tokens(10))
    recorder.close()
    assert len(finished_trace(tmp_path / "T")) == 5


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=20))
def test_calls_of_a_lane_never_overlap(calls: list[tuple[int, int, int]]) -> None:
    lanes = Lanes(memory_tokens=12)
    ends: dict[tuple[str, int], float] = {}
    for task, start_s, duration_s in sorted(calls, key=lambda call: call[1] + call[2]):
        prompt = tokens(start_s % 3, 1, 2, start_s)
        lane, keep = lanes.place(str(task), start_s, prompt)
        assert ends.get((str(task), lane), 0) <= start_s
        assert lanes.last(str(task), lane)[:keep].tolist() == prompt[:keep].tolist()
        ends[str(task), lane] = start_s + duration_s
        lanes.remember(str(task), lane, start_s + duration_s, np.append(prompt, np.uint32(9)))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans()), min_size=1, max_size=15))
def test_a_trace_is_the_same_however_often_the_recorder_was_restarted(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int, bool]]
) -> None:
    """With so little memory that lanes are forgotten on the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "Lanes", lambda: Lanes(memory_tokens=60))
        options = RecordOptions(tmp_path_factory.mktemp("restart") / "T", **OPTIONS)
        recorder = Recorder(options)
        for number, (task, length, restart) in enumerate(calls):
            record(recorder, task, np.arange(length, dtype=np.uint32), tokens(number))
            if restart:
                recorder.close()
                recorder = Recorder(options)
        recorder.close()
    trace = finished_trace(options.out)
    for task, recorded in trace.items():
        expected = [(length, number) for number, (name, length, _) in enumerate(calls) if name == task]
        assert [(len(call.prompt_tokens), int(call.output_tokens[0])) for call in recorded] == expected
