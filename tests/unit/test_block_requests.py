"""Block traces whose requests tell their sessions (AIPerf's and Dynamo's Mooncake, Qwen-Bailian); shared block ids."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imported_traces import calls_of
from test_import_golden import FILES, GOLDEN

from efficient_lmcache.core.references import References
from efficient_lmcache.replay.importers.importing import import_recording
from efficient_lmcache.replay.importers.records import RecordingError
from efficient_lmcache.replay.trace import common_prefix_tokens
from efficient_lmcache.sizing.profile import profile
from efficient_lmcache.sizing.streams import open_stream

B = 16
Row = dict[str, Any]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turn(session: str | int | None, tokens: int, ids: list[int], **more: Any) -> Row:
    named = {} if session is None else {"session_id": session}
    return {**named, "input_length": tokens, "output_length": 10, "hash_ids": ids, **more}


def chat(number: int | str, parent: int | str, tokens: int, ids: list[int], **more: Any) -> Row:
    told = {"chat_id": number, "parent_chat_id": parent, "timestamp": 0.5, "type": "text", "turn": 1}
    return {**told, "input_length": tokens, "output_length": 10, "hash_ids": ids, **more}


def keys_of(references: References) -> list[list[int]]:
    return [references.call_keys(call).tolist() for call in range(len(references))]


def test_sessions_are_lanes_and_delays_are_intervals() -> None:
    stream = open_stream(GOLDEN / "mooncake-sessions" / "sessions.jsonl")
    references = References.concatenate(stream)
    assert (stream.chunk_tokens, stream.lanes, stream.lanes_are_guessed) == (64, ["s1", "s2"], False)
    assert references.lane.tolist() == references.session.tolist() == [0, 1, 0, 1, 0, 1]
    np.testing.assert_array_equal(references.start_s, [0.0, 1.5, np.nan, 6.5, np.nan, np.nan])
    np.testing.assert_array_equal(references.interval_s, [np.nan, np.nan, 2.4505, np.nan, 0.0, np.nan])
    assert keys_of(references) == [[0, 1], [0, 2], [0, 1, 3, 4], [0, 2, 5], [0, 1, 3, 4, 6], [7]]


def test_chats_continue_their_parents_and_branch() -> None:
    stream = open_stream(GOLDEN / "qwen-bailian" / FILES["qwen-bailian"])
    references = References.concatenate(stream)
    assert (stream.chunk_tokens, stream.lanes) == (16, ["chat 0", "chat 1", "chat 3", "chat 4"])
    assert references.lane.tolist() == [0, 1, 0, 2, 3, 0]
    assert references.session.tolist() == [0, 1, 0, 0, 2, 0]
    assert references.start_s.tolist() == [0.0, 1.5, 10.1, 12.0, 13.0, 20.2]
    assert keys_of(references) == [[0, 1], [0, 2], [0, 1, 3, 4], [0, 1, 5], [6], [0, 1, 3, 4, 7]]


def test_requests_with_and_without_a_session_may_be_mixed(tmp_path: Path) -> None:
    rows = [
        turn(None, 1024, [1, 2], timestamp=0),
        turn("line 1", 1024, [1, 2], timestamp=0),
        turn(None, 2048, [1, 2, 3, 4], timestamp=9),
        turn(7, 2048, [1, 2, 3, 4]),
    ]
    stream = open_stream(write(tmp_path / "m.jsonl", rows))
    assert References.concatenate(stream).lane.tolist() == [0, 1, 0, 2]
    assert (stream.lanes, stream.lanes_are_guessed) == (["line 1", "line 1#2", "7"], True)


def test_times_may_be_absent(tmp_path: Path) -> None:
    source = write(tmp_path / "m.jsonl", [turn(None, 1024, [1, 2]), turn(None, 2048, [1, 2, 3, 4])])
    references = References.concatenate(open_stream(source))
    assert references.lane.tolist() == [0, 0]
    assert np.isnan(references.start_s).all()
    import_recording(source, tmp_path / "t")
    (calls,) = calls_of(tmp_path / "t").values()
    assert [(call.start_s, call.interval_s) for call in calls] == [(None, 0.0), (None, 0.0)]


def test_a_prompt_that_only_ends_as_another_one_continues_no_lane(tmp_path: Path) -> None:
    rows = [turn(None, 1024, [5, 7]), turn(None, 1536, [9, 7, 8]), turn(None, 1536, [5, 7, 8])]
    references = References.concatenate(open_stream(write(tmp_path / "m.jsonl", rows)))
    assert references.lane.tolist() == [0, 1, 0]


def test_a_block_behind_another_one_is_another_chunk(tmp_path: Path) -> None:
    prompts = [[1, 2, 3], [4, 2, 3], [1, 2, 3, 5], [2, 3]]
    source = write(tmp_path / "m.jsonl", [turn(number, 512 * len(ids), ids) for number, ids in enumerate(prompts)])
    chunks = [[0, 1, 2], [3, 4, 5], [0, 1, 2, 6], [7, 8]]
    assert keys_of(References.concatenate(open_stream(source))) == chunks
    assert keys_of(References.concatenate(open_stream(source, 1024))) == [[0], [1], [0, 2], [3]]
    import_recording(source, tmp_path / "t")
    assert keys_of(References.concatenate(open_stream(tmp_path / "t", 512))) == [
        [0, 1, 2],
        [3, 4, 5],
        [0, 1, 2, 6],
        [7, 8],
    ]


@pytest.mark.parametrize("size", [8, 16, 64, 128, 512])
def test_the_size_of_blocks_is_what_most_requests_fit(size: int, tmp_path: Path) -> None:
    lengths = [5, 9 * size, 20 * size + 3, 33 * size - 1]
    rows = [turn(number, tokens, list(range(-(-tokens // size)))) for number, tokens in enumerate(lengths)]
    source = write(tmp_path / "m.jsonl", [*rows, turn("bad", 100, list(range(77)))])
    stream = open_stream(source, skip_bad=True)
    assert References.concatenate(stream).prompt_tokens.tolist() == lengths
    assert (stream.chunk_tokens, stream.skipped) == (size, 1)
    with pytest.raises(RecordingError, match=rf"line 5: hash_ids has 77 entries; 100 tokens in blocks of {size} make"):
        import_recording(source, tmp_path / "t")


def test_a_partial_block_may_have_no_id(tmp_path: Path) -> None:
    rows = [turn("a", 1100, [1, 2]), turn("a", 2000, [1, 2, 3]), turn("b", 100, []), turn("b", 101, [])]
    import_recording(write(tmp_path / "m.jsonl", rows), tmp_path / "t")
    calls = calls_of(tmp_path / "t")
    first, second = (call.prompt_tokens for call in calls["a"])
    assert (len(first), len(second)) == (1100, 2000)
    assert common_prefix_tokens(first, second) == 1100
    short, longer = (call.prompt_tokens for call in calls["b"])
    assert (len(short), len(longer), common_prefix_tokens(short, longer)) == (100, 101, 100)


def test_ids_may_be_64_bit_hashes(tmp_path: Path) -> None:
    hashes = [2**64 - 3, 2**63, 7]
    rows = [turn("a", 1024, hashes[:2]), turn("a", 1536, hashes), turn("b", 1024, [hashes[0], 7])]
    source = write(tmp_path / "m.jsonl", rows)
    assert keys_of(References.concatenate(open_stream(source))) == [[0, 1], [0, 1, 2], [0, 3]]
    import_recording(source, tmp_path / "t")
    assert keys_of(References.concatenate(open_stream(tmp_path / "t", 512))) == [[0, 1], [0, 1, 2], [0, 3]]


def test_a_request_before_the_one_that_it_continues_is_refused(tmp_path: Path) -> None:
    rows = [chat(1, -1, 32, [1, 2]), chat(3, 2, 64, [1, 2, 4, 5]), chat(2, 1, 48, [1, 2, 4])]
    source = write(tmp_path / "b.jsonl", rows)
    message = (
        r"b\.jsonl: line 3: chat 2 is continued by a request before it; requests must be in the order of their times"
    )
    with pytest.raises(RecordingError, match=message):
        list(open_stream(source, skip_bad=True))
    with pytest.raises(RecordingError, match=message):
        import_recording(source, tmp_path / "t")


def test_rows_of_what_each_turn_adds_are_refused(tmp_path: Path) -> None:
    rows = [turn("a", 1024, [1, 2], timestamp=0), turn("b", 512, [1]), turn("a", 600, [8, 9], delay=5)]
    source = write(tmp_path / "m.jsonl", rows)
    message = r"m\.jsonl: none of the 1 requests that continue a session_id begins with .* must be of the whole prompt"
    with pytest.raises(RecordingError, match=message):
        list(open_stream(source))
    with pytest.raises(RecordingError, match=message):
        import_recording(source, tmp_path / "t")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([turn("a", 9, [1]), turn("", 9, [1])], "line 2: session_id must be a non-empty text, not ''"),
        ([turn("a", 9, [1]), turn(True, 9, [1])], "line 2: session_id must be a non-empty text, not True"),
        ([turn("a", 9, [1]), turn(None, 9, [1], timestamp="0")], "line 2: timestamp must be a finite number >= 0"),
        ([turn("a", 9, [1]), turn("a", 9, [1], delay=-1)], "line 2: delay must be a finite number >= 0, not -1"),
        (
            [chat(1, -1, 9, [1]), chat(None, -1, 9, [1])],
            "line 2: chat_id must be an integer or a non-empty text",
        ),
        ([chat(1, -1, 9, [1]), chat(2, -1, 9, [1], timestamp=None)], "line 2: timestamp must be a finite number"),
        ([chat(1, -1, 9, [1]), chat(2, [], 9, [1])], r"line 2: parent_chat_id must be a non-empty text, not \[\]"),
    ],
)
def test_malformed_requests_are_named_or_counted(rows: list[Row], message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(RecordingError, match=rf"rows\.jsonl: {message}"):
        import_recording(source, tmp_path / "t")
    with pytest.raises(RecordingError, match=rf"rows\.jsonl: {message}"):
        list(open_stream(source))
    stream = open_stream(source, skip_bad=True)
    assert (len(References.concatenate(stream)), stream.skipped) == (1, 1)


chats = st.lists(
    st.tuples(
        st.integers(0, 9),  # the parent, counted back from the request; none where there are fewer
        st.lists(st.integers(0, 2), max_size=5),  # full blocks: equal ids are equal blocks, wherever they are
        st.integers(0, B - 1),  # tokens of the partial block
        st.integers(0, 3 * B),  # output tokens
    ).filter(lambda spec: bool(spec[1] or spec[2])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(chats)
def test_a_trace_has_the_lengths_and_the_sharing_of_its_chats(
    tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[int, list[int], int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    tails = itertools.count(1000)
    rows = [
        chat(number, number - back if back else -1, len(path) * B + tail, path + [next(tails)] * bool(tail))
        | {"output_length": output}
        for number, (back, path, tail, output) in enumerate(specs)
    ]
    import_recording(write(folder / "chats.jsonl", rows), folder / "t")
    recorded, imported = profile(open_stream(folder / "chats.jsonl", B)), profile(open_stream(folder / "t", B))
    by_lane, by_task = (np.argsort(each.lane, kind="stable") for each in (recorded, imported))
    for column in ("lane", "prompt_tokens"):
        np.testing.assert_array_equal(getattr(recorded, column)[by_lane], getattr(imported, column)[by_task])
    np.testing.assert_array_equal(np.maximum(1, recorded.output_tokens[by_lane]), imported.output_tokens[by_task])
    np.testing.assert_array_equal(
        recorded.previous_prompt_tokens[by_lane], imported.previous_prompt_tokens[by_task] // B * B
    )
    assert (recorded.references, recorded.distinct_chunks) == (imported.references, imported.distinct_chunks)


def test_global_ids_of_weka_sessions_are_shared_between_sessions(tmp_path: Path) -> None:
    def session(name: str, ids: list[int], tokens: int) -> Row:
        asked = {"t": 0.0, "type": "n", "in": tokens, "out": 7, "hash_ids": ids}
        return {"id": name, "block_size": 4, "hash_id_scope": "global", "requests": [asked]}

    source = write(tmp_path / "w.jsonl", [session("a", [1, 2], 9), session("b", [1, 3], 11), session("c", [4], 4)])
    stream = open_stream(source)
    assert keys_of(References.concatenate(stream)) == [[0, 1], [0, 2], [3]]
    assert stream.has_shared_chunks
    assert not any("private" in note for note in stream.notes)
    assert profile(stream).shared_chunks == 1
    import_recording(source, tmp_path / "t")
    prompts = {name: calls[0].prompt_tokens for name, calls in calls_of(tmp_path / "t").items()}
    shared = {pair: common_prefix_tokens(*(prompts[name] for name in pair)) for pair in ("ab", "ac", "bc")}
    assert shared == {"ab": 4, "ac": 0, "bc": 0}


@pytest.mark.parametrize("session", ["a", None])
def test_requests_out_of_the_order_of_their_times_are_refused(session: str | None, tmp_path: Path) -> None:
    """A sorted file and a reversed one have other lanes, and a plan of each recommends another tier."""
    rows = [turn(session, 512 * n, list(range(n)), timestamp=1000 * n) for n in (2, 4, 3)]
    source = write(tmp_path / "m.jsonl", rows)
    message = (
        "line 3: timestamp is 1 s before that of a request before it; requests must be in the order of their times"
    )
    with pytest.raises(RecordingError, match=message):
        References.concatenate(open_stream(source))
    with pytest.raises(RecordingError, match=message):
        import_recording(source, tmp_path / "t")


def test_sessions_of_a_file_may_follow_one_another(tmp_path: Path) -> None:
    rows = [turn(session, 512 * n, list(range(n)), timestamp=1000 * n) for session in "ab" for n in (1, 2)]
    references = References.concatenate(open_stream(write(tmp_path / "m.jsonl", rows)))
    assert references.lane.tolist() == [0, 0, 1, 1]
