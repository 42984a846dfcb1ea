"""Damaged traces: any flipped byte or missing end is found and named, never a stack trace of some library's."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_lmcache.replay import frames
from efficient_lmcache.replay.synthesize import Workload, synthesize
from efficient_lmcache.replay.trace import Manifest, TraceError, TraceReader

SMALL = Workload(tasks=3, calls_per_task=4, vocab_size=500, system_tokens=20, issue_tokens=10, observation_tokens=10)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.trace"
    synthesize(path, SMALL)
    return path


def read_everything(path: Path) -> None:
    with TraceReader(path) as reader:
        reader.verify()


@settings(max_examples=300, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_detected(sound: Path, where: float, bit: int) -> None:
    content = bytearray(sound.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    damaged = sound.with_name("flipped.trace")
    damaged.write_bytes(content)
    with pytest.raises(TraceError, match=r"flipped\.trace"):
        read_everything(damaged)


@settings(max_examples=150, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_detected(sound: Path, where: float) -> None:
    content = sound.read_bytes()
    damaged = sound.with_name("truncated.trace")
    damaged.write_bytes(content[: int(where * len(content))])
    with pytest.raises(TraceError, match=r"truncated\.trace"):
        TraceReader(damaged)


def test_a_truncated_trace_names_its_last_whole_record(sound: Path) -> None:
    content = sound.read_bytes()
    with TraceReader(sound) as reader:
        second_ends = reader._offsets[2]
    damaged = sound.with_name("cut.trace")
    damaged.write_bytes(content[: second_ends + 10])
    with pytest.raises(TraceError, match=r"truncated.*last whole record is task 'synthetic-0001' \(number 2\)"):
        TraceReader(damaged)


def test_a_damaged_task_is_named_and_the_others_stay_readable(sound: Path) -> None:
    content = bytearray(sound.read_bytes())
    with TraceReader(sound) as reader:
        content[reader._offsets[1] + 20] ^= 1
    damaged = sound.with_name("one.trace")
    damaged.write_bytes(content)
    with TraceReader(damaged) as reader:
        with pytest.raises(TraceError, match=r"one\.trace: task 'synthetic-0001' \(number 2\) is damaged"):
            list(reader.calls(1))
        assert len(list(reader.calls(2))) == reader.tasks[2].calls


def test_an_unknown_version_says_which_are_read(sound: Path) -> None:
    content = bytearray(sound.read_bytes())
    content[8] = 7
    newer = sound.with_name("newer.trace")
    newer.write_bytes(content)
    with pytest.raises(TraceError, match="trace format version 7; this build reads version 1"):
        TraceReader(newer)


def test_another_kind_of_file_is_not_a_trace(tmp_path: Path) -> None:
    for name, content in (("text", b"{}\n" * 50), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=f"{name}: not a trace"):
            TraceReader(tmp_path / name)
    with pytest.raises(TraceError, match="is a directory, but `trace import` may make a trace of it"):
        TraceReader(tmp_path)


def test_an_unfinished_write_is_told_from_a_missing_trace(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no such trace$"):
        TraceReader(tmp_path / "t")
    partial = tmp_path / "t.partial"
    shutil.copy(sound, partial)
    partial.write_bytes(partial.read_bytes()[:-40])
    with pytest.raises(TraceError, match=r"no such trace; t\.partial beside it is an unfinished write"):
        TraceReader(tmp_path / "t")
    with pytest.raises(TraceError, match=r"t\.partial: unfinished, truncated or damaged at its end"):
        TraceReader(partial)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("manifest", {"vocab_size": "9"}, "lacks a field or garbles it: vocab_size is '9'"),
        ("manifest", {"vocab_size": 0}, "vocab_size is 0: Input should be greater than or equal to 1"),
        ("manifest", {"assumptions": [1]}, r"assumptions\.0 is 1: Input should be a valid string"),
        ("task", {"task_id": "b"}, "task 'a' .* is not the record that the index promises"),
        ("task", {"calls": None}, "task 'a' .* is not the record that the index promises"),
        ("task", {"calls": [[0.5, b"\1\0", b"\1\0", 0.0, None]]}, "call 0: keeps 0.5 of the 0 tokens before it"),
        ("entry", {"max_prompt_tokens": None}, "max_prompt_tokens is None"),
        ("entry", {"offset": -1}, "offset is -1"),
        ("footer", {"sha256": 3}, "sha256 is 3"),
        ("footer", {"tasks": [3]}, r"tasks\.0 is 3: Input should be a valid dictionary"),
    ],
)
def test_a_trace_of_another_program_with_a_field_of_another_kind_is_named(
    part: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def packed(name: str, record: dict[str, Any]) -> bytes:
        return frames.pack_frame({**record, **change} if name == part else record)

    manifest = packed("manifest", Manifest(9, "synthetic", "a").to_json())
    task = packed("task", {"task_id": "a", "calls": [[0, b"\1\0", b"\1\0", 0.0, None]]})
    begin = frames.preamble() + manifest
    entry = {"task_id": "a", "calls": 1, "prompt_tokens": 1, "output_tokens": 1, "max_prompt_tokens": 1}
    entry |= {"offset": len(begin), **(change if part == "entry" else {})}
    written = begin + task
    footer = packed("footer", {"tasks": [entry], "sha256": hashlib.sha256(written).digest()})
    path = tmp_path / "made.trace"
    path.write_bytes(written + footer + frames.pack_trailer(len(written)))
    with pytest.raises(TraceError, match=rf"made\.trace.*{message}"):
        read_everything(path)
