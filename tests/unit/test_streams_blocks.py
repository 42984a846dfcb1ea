"""Streams of block recordings (Weka, Mooncake, LMCache's lookup-hash logs): regrouping, lanes, times, bad records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efficient_lmcache.core.references import References
from efficient_lmcache.sizing.streams import RecordingError, open_stream

Row = dict[str, Any]


def write(path: Path, rows: list[Row | str]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path, chunk_tokens: int | None = None, **options: Any) -> tuple[References, list[str]]:
    stream = open_stream(path, chunk_tokens, **options)
    return References.concatenate(stream), stream.lanes


def keys_of(references: References) -> list[list[int]]:
    return [references.call_keys(call).tolist() for call in range(len(references))]


def asked(t: float, tokens: int, ids: list[int], **more: Any) -> Row:
    return {"t": t, "type": "n", "in": tokens, "out": 7, "hash_ids": ids, "api_time": 2.0, "think_time": 0.5, **more}


def session(name: str, requests: list[Row], **more: Any) -> Row:
    return {"id": name, "block_size": 4, "hash_id_scope": "local", "requests": requests, **more}


def mooncake(timestamp: int, tokens: int, ids: list[int], output: int = 10) -> Row:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}


def lookup(timestamp: float, tokens: int, hashes: list[str], model: str = "m", **more: Any) -> Row:
    return {
        "timestamp": timestamp,
        "request_id": f"r{timestamp}",
        "model_name": model,
        "chunk_size": 4,
        "seq_len": tokens,
        "dtypes": ["bfloat16"],
        "shapes": [[2, 4, 4, 8]],
        "chunk_hashes": hashes,
        **more,
    }


def test_block_ids_of_a_session_are_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.jsonl.gz",
        [
            session("a", [asked(0, 9, [1, 2]), asked(5, 13, [1, 2, 3])]),
            session("b", [asked(0, 9, [1, 2])]),
        ],
    )
    references, lanes = read(path)
    assert references.chunk_tokens == 4
    assert keys_of(references) == [[0, 1], [0, 1, 2], [3, 4]]
    assert references.session.tolist() == references.lane.tolist() == [0, 0, 1]
    assert lanes == ["a", "b"]
    assert references.prompt_tokens.tolist() == [9, 13, 9]
    assert references.output_tokens.tolist() == [7, 7, 7]


def test_a_directory_of_sessions_reads_like_a_file_of_them(tmp_path: Path) -> None:
    sessions = [session(f"s{number}", [asked(0.0, 9, [1, 2]), asked(5.0, 13, [1, 2, 3])]) for number in range(3)]
    for number, each in enumerate(sessions):
        (tmp_path / "sessions").mkdir(exist_ok=True)
        write(tmp_path / "sessions" / f"trace_{number}.json", [json.dumps(each, indent=1 if number else None)])
    shown: list[tuple[int, int]] = []
    parts = read(tmp_path / "sessions", progress=lambda *done: shown.append(done))
    whole = read(write(tmp_path / "sessions.jsonl", list(sessions)))
    assert keys_of(parts[0]) == keys_of(whole[0])
    assert parts[1] == whole[1] == ["s0", "s1", "s2"]
    assert shown == [(1, 3), (2, 3), (3, 3)]
    write(tmp_path / "sessions" / "trace_9.json", [{"id": "s9", "block_size": 64, "requests": []}])
    assert read(tmp_path / "sessions", skip_bad=True)[1] == ["s0", "s1", "s2"]
    with pytest.raises(RecordingError, match=r"trace_9\.json.*block_size is 64; it must be 4, as in the first session"):
        read(tmp_path / "sessions")


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_directorys_format_is_told_from_its_first_session(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    write(tmp_path / "trace_1.json", [session("a", [asked(0.0, 9, [1, 2])])])
    with pytest.raises(RecordingError, match=r"manifest\.json: line 1: (not JSON|block_size must be an integer)"):
        read(tmp_path)
    assert read(tmp_path, skip_bad=True)[1] == ["a"]
    (tmp_path / "manifest.json").write_text("")
    assert read(tmp_path)[1] == ["a"]


def test_sub_agents_run_beside_their_parent_in_lanes_of_their_own(tmp_path: Path) -> None:
    finished = {"t": 20.0, "type": "subagent", "agent_id": "x", "duration_ms": 15_000, "requests": [asked(0, 4, [8])]}
    launched = {"t": 6.0, "type": "subagent", "agent_id": "y", "duration_ms": None, "requests": [asked(1, 4, [9])]}
    path = write(tmp_path / "w.jsonl", [session("a", [asked(0, 4, [1]), launched, asked(10, 8, [1, 2]), finished])])
    references, lanes = read(path)
    assert references.start_s.tolist() == [0.0, 5.0, 7.0, 10.0]
    assert [lanes[lane] for lane in references.lane] == ["a", "a/x", "a/y", "a"]
    assert references.session.tolist() == [0, 0, 0, 0]


def test_intervals_are_think_times_or_what_the_clock_leaves(tmp_path: Path) -> None:
    requests = [asked(0, 4, [1]), asked(5, 4, [1], think_time=None, api_time=None), asked(9, 4, [1], think_time=None)]
    references, _ = read(write(tmp_path / "w.jsonl", [session("a", requests)]))
    np.testing.assert_array_equal(references.interval_s, [0.5, 3.0, np.nan])


@pytest.mark.parametrize(
    ("chunk_tokens", "expected"), [(4, [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]), (8, [[0, 1], [0, 2]]), (16, [[0], [1]])]
)
def test_blocks_regroup_into_chunks(tmp_path: Path, chunk_tokens: int, expected: list[list[int]]) -> None:
    path = write(
        tmp_path / "w.jsonl", [session("a", [asked(0, 22, [1, 2, 3, 4, 5]), asked(9, 21, [1, 2, 3, 14, 15, 16])])]
    )
    references, _ = read(path, chunk_tokens)
    assert keys_of(references) == expected
    assert references.lookup_chunks.tolist() == [len(keys) for keys in expected]


def test_chunks_that_blocks_do_not_make_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", [session("a", [asked(0, 4, [1])])])
    for chunk_tokens in (2, 6):
        with pytest.raises(RecordingError, match=r"blocks of 4 tokens, .* allowed are multiples of 4: 4, 8, 16"):
            open_stream(path, chunk_tokens)


def test_mooncake_requests_continue_the_lane_that_they_extend(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        [
            mooncake(0, 1100, [0, 1, 2]),
            mooncake(500, 1024, [0, 9]),
            mooncake(1500, 1700, [0, 1, 3, 4]),  # extends line 1's prompt and output
            mooncake(2000, 1101, [0, 1, 5]),  # line 1 has been extended already
            mooncake(2500, 1105, [0, 1, 6]),  # too short for line 4's prompt and output
        ],
    )
    references, lanes = read(path)
    assert references.chunk_tokens == 512
    assert keys_of(references) == [[0, 1], [0, 2], [0, 1, 3], [0, 1], [0, 1]]
    assert references.start_s.tolist() == [0.0, 0.5, 1.5, 2.0, 2.5]
    assert lanes == ["line 1", "line 2", "line 4", "line 5"]
    assert references.lane.tolist() == [0, 1, 0, 2, 3]


def test_lookups_of_a_directory_are_read_by_time(tmp_path: Path) -> None:
    write(
        tmp_path / "lookup_hashes_20260101_000000_000000.jsonl", [lookup(1, 9, ["0xa", "0xb"]), lookup(4, 4, ["0xa"])]
    )
    write(
        tmp_path / "lookup_hashes_20260101_000001_000001.jsonl",
        [lookup(3, 13, ["0xa", "0xb", "0xc"]), lookup(2, 4, ["0xa"], model="other")],
    )
    references, lanes = read(tmp_path)
    assert keys_of(references) == [[0, 1], [2], [0, 1, 3], [0]]
    assert references.start_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert lanes == ["r1", "r2", "r4"]
    assert references.lane.tolist() == [0, 1, 0, 2]


WEKA = session("a", [asked(0, 9, [1, 2])])
MOONCAKE = mooncake(0, 600, [0, 1])
LOOKUP = lookup(1, 9, ["0xa", "0xb"])


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        (WEKA, '{"id": "b", ', "line 2: not JSON"),
        (WEKA, "[1]", "line 2 must be a JSON object"),
        (WEKA, {**session("b", []), "requests": {}}, "line 2: requests must be a list of objects, not {}"),
        (WEKA, session("", []), "line 2: id must be a non-empty text, not ''"),
        (WEKA, session("b", [], block_size=8), "line 2: block_size is 8; it must be 4"),
        (WEKA, session("b", [], hash_id_scope="global"), "line 2: hash_id_scope is 'global'; it must be 'local'"),
        (WEKA, session("b", [], hash_id_scope=1), "line 2: hash_id_scope is 1; allowed are 'local', 'global'"),
        (WEKA, session("b", [asked(-1, 4, [1])]), r"line 2: requests\[0\]: t must be a finite number >= 0, not -1"),
        (WEKA, session("b", [asked(0, 0, [])]), r"requests\[0\]: in must be an integer >= 1, not 0"),
        (
            WEKA,
            session("b", [asked(0, 9, [1])]),
            r"requests\[0\]: hash_ids has 1 entries; 9 tokens in blocks of 4 make 2",
        ),
        (WEKA, session("b", [asked(0, 9, [1, 2.5])]), r"requests\[0\]: hash_ids must hold integers from 0"),
        (WEKA, session("b", [asked(0, 9, [1, -2])]), r"requests\[0\]: hash_ids must hold integers from 0"),
        (WEKA, session("b", [asked(0, 9, [1, 2**70])]), r"requests\[0\]: hash_ids must hold integers from 0"),
        (WEKA, session("b", [asked(0, 9, [1, [2]])]), r"requests\[0\]: hash_ids must hold integers from 0"),
        (WEKA, session("b", [asked(0, 9, [1, 2], api_time="x")]), r"requests\[0\]: api_time must be a finite number"),
        (MOONCAKE, mooncake(0, 600, [0] * 500), "line 2: hash_ids has 500 entries"),
        (MOONCAKE, {**MOONCAKE, "output_length": None}, "line 2: output_length must be an integer >= 0, not None"),
        (LOOKUP, {**LOOKUP, "timestamp": 1_767_225_600_000}, "timestamp is 1767225600000; it must be in seconds"),
        (MOONCAKE, {**MOONCAKE, "timestamp": float("inf")}, "line 2: timestamp must be a finite number >= 0, not inf"),
        (LOOKUP, lookup(2, 7, ["0xa", "0xb"]), "line 2: chunk_hashes has 2 entries; 7 tokens have at most 1"),
        (LOOKUP, lookup(2, 9, [1, 2]), "line 2: chunk_hashes must be a list of non-empty texts"),  # type: ignore[list-item]
        (LOOKUP, lookup(2, 9, ["0xa"], chunk_size=8), "line 2: chunk_size is 8; it must be 4"),
        (LOOKUP, lookup(2, 9, ["0xa"], model_name=None), "line 2: model_name must be a non-empty text, not None"),
    ],
)
def test_bad_records_are_named_or_counted(good: Row, bad: Row | str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [good, bad, good])
    with pytest.raises(RecordingError, match=expected) as failure:
        list(open_stream(path))
    assert str(path) in str(failure.value)
    stream = open_stream(path, skip_bad=True)
    assert len(References.concatenate(stream)) == 2
    assert stream.skipped == 1


def test_a_recording_of_bad_records_only_has_no_calls(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", [mooncake(0, 600, [])])
    with pytest.raises(RecordingError, match="has no calls to read; 1 bad records were skipped"):
        list(open_stream(path, skip_bad=True))


def test_bad_first_lines_do_not_hide_the_format(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", ["{", MOONCAKE])
    with pytest.raises(RecordingError, match="line 1: not JSON"):
        open_stream(path)
    assert len(read(path, skip_bad=True)[0]) == 1


def test_a_cut_off_file_names_its_last_good_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.jsonl.gz", [mooncake(n, 600, [0, n]) for n in range(2000)]).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordingError, match=r"cut.jsonl.gz: cannot be read after line \d+"):
        list(open_stream(tmp_path / "cut.jsonl.gz", skip_bad=True))


def test_progress_counts_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl.gz", [MOONCAKE] * 3)
    seen: list[tuple[int, int]] = []
    list(open_stream(path, progress=lambda done, total: seen.append((done, total))))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_real_block_recordings_are_read(data_dir: Path) -> None:
    references, lanes = read(data_dir / "traces" / "mooncake-synthetic.jsonl.gz", 1024)
    assert len(references) == 3993
    assert references.prompt_tokens.sum() == 61_194_628
    assert len(lanes) == references.lane.max() + 1
