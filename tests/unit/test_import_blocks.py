"""Block recordings become tokens that are exact in length and in what prompts share, also on real recordings."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imported_traces import calls_of

from efficient_lmcache.replay.importers.blocks import BlockTokens
from efficient_lmcache.replay.importers.importing import import_recording
from efficient_lmcache.replay.importers.records import RecordingError
from efficient_lmcache.replay.importers.tasks import BlockCall, BlockTask
from efficient_lmcache.replay.trace import Call, TraceReader, common_prefix_tokens
from efficient_lmcache.sizing.profile import profile
from efficient_lmcache.sizing.streams import open_stream

B = 8
Row = dict[str, Any]
Path_ = tuple[int, ...]  # a prompt's full blocks: each one's place among those that follow the same
Spec = tuple[Path_, int, int]  # those, the tokens of its partial block, output tokens

paths = st.lists(st.integers(0, 2), max_size=5).map(tuple)
specs = st.tuples(paths, st.integers(0, B - 1), st.integers(0, 3 * B)).filter(lambda spec: bool(spec[0] or spec[1]))
lanes = st.lists(st.lists(specs, min_size=1, max_size=5), min_size=1, max_size=4)


class Recorded:
    """Tasks of one scope: an id stands for all blocks up to its own, and partial blocks have ids of their own."""

    def __init__(self, lanes: list[list[Spec]], scope: int = 0) -> None:
        self._ids: dict[Path_, int] = {}
        self._tails = itertools.count(10_000)
        self.lanes = lanes
        self.tasks = [
            BlockTask(f"lane {number}", "here", [self._call(spec) for spec in lane], B, scope)
            for number, lane in enumerate(lanes)
        ]

    def _call(self, spec: Spec) -> BlockCall:
        path, tail, output = spec
        ids = [self._ids.setdefault(path[:length], len(self._ids)) for length in range(1, len(path) + 1)]
        ids += [next(self._tails)] if tail else []
        return BlockCall(len(path) * B + tail, output, np.array(ids, np.int64), 0.0, None)


def made(recorded: Recorded, vocab_size: int = 1000) -> list[list[Call]]:
    tokens = BlockTokens(vocab_size)
    return [list(tokens.calls(task)) for task in recorded.tasks]


@given(lanes, st.sampled_from([2, 3, 1000]))
def test_prompts_share_exactly_the_blocks_whose_ids_they_share(lanes: list[list[Spec]], vocab_size: int) -> None:
    calls = [call for lane in made(Recorded(lanes), vocab_size) for call in lane]
    specs = [spec for lane in lanes for spec in lane]
    for (call, (path, tail, output)), (other, (other_path, _, _)) in itertools.product(
        zip(calls, specs, strict=True), repeat=2
    ):
        assert (len(call.prompt_tokens), len(call.output_tokens)) == (len(path) * B + tail, max(1, output))
        blocks = next((n for n, (a, b) in enumerate(zip(path, other_path, strict=False)) if a != b), None)
        shared = common_prefix_tokens(call.prompt_tokens, other.prompt_tokens)
        if blocks is None:
            blocks = min(len(path), len(other_path))
            assert call is other or blocks * B <= shared < (blocks + 1) * B
        elif vocab_size == 1000:
            assert shared == blocks * B  # different from the first token on
        else:
            assert blocks * B <= shared < (blocks + 1) * B


@given(lanes)
def test_a_prompt_and_its_output_end_in_the_next_prompt_where_lengths_allow(lanes: list[list[Spec]]) -> None:
    for calls, lane in zip(made(Recorded(lanes)), lanes, strict=True):
        for (call, (path, tail, output)), (following, (next_path, next_tail, _)) in itertools.pairwise(
            zip(calls, lane, strict=True)
        ):
            length, next_length = len(path) * B + tail, len(next_path) * B + next_tail
            whole = np.concatenate((call.prompt_tokens, call.output_tokens))
            shared = common_prefix_tokens(whole, following.prompt_tokens)
            if next_path[: len(path)] != path or next_length < length:
                assert shared < length
            else:
                end = length + max(1, output)
                assert shared == (end if next_length >= end else length)


@settings(max_examples=25)
@given(lanes, lanes)
def test_scopes_share_nothing(left: list[list[Spec]], right: list[list[Spec]]) -> None:
    tokens = BlockTokens(1000)
    prompts = [
        [call.prompt_tokens for task in Recorded(lanes, scope).tasks for call in tokens.calls(task)]
        for scope, lanes in enumerate((left, right))
    ]
    assert all(common_prefix_tokens(a, b) == 0 for a, b in itertools.product(*prompts))


def test_an_id_of_a_partial_block_means_the_same_tokens_in_every_task() -> None:
    ids = np.array([1, 9], np.int64)
    alone = BlockTask("a", "here", [BlockCall(12, 3, ids, 0.0, None)], B, None)
    longer = BlockCall(24, 3, np.array([1, 2, 3], np.int64), 0.0, None)
    continued = BlockTask("b", "here", [BlockCall(12, 3, ids, 0.0, None), longer], B, None)
    for tasks in ([alone, continued], [continued, alone]):
        tokens = BlockTokens(1000)
        prompts = [next(tokens.calls(task)).prompt_tokens for task in tasks]
        assert np.array_equal(prompts[0], prompts[1])


def test_vocabularies_that_cannot_tell_blocks_apart_are_refused() -> None:
    with pytest.raises(RecordingError, match="--vocab is 1; made-up tokens need at least 2"):
        BlockTokens(1)
    ids = np.arange(10, dtype=np.int64)
    task = BlockTask("a", "f: line 3", [BlockCall(30, 3, ids, 0.0, None)], 3, None)
    with pytest.raises(RecordingError, match="f: line 3: blocks of 3 tokens below 2 cannot tell 10 blocks apart"):
        list(BlockTokens(2).calls(task))


def lines_of(source: Path, count: int) -> list[str]:
    with gzip.open(source, "rt") as lines:
        return list(itertools.islice(lines, count))


@pytest.mark.parametrize(
    ("name", "lines", "block_tokens"), [("agentic-weka", 4, 64), ("mooncake-conversation", 1500, 512)]
)
def test_an_imported_recording_has_the_profile_of_its_blocks(
    name: str, lines: int, block_tokens: int, data_dir: Path, tmp_path: Path
) -> None:
    source = tmp_path / "recording.jsonl"
    source.write_text("".join(lines_of(data_dir / "traces" / f"{name}.jsonl.gz", lines)))
    import_recording(source, tmp_path / "t")
    recorded, imported = profile(open_stream(source)), profile(open_stream(tmp_path / "t", block_tokens))
    by_lane, by_task = (np.argsort(each.lane, kind="stable") for each in (recorded, imported))
    for column in ("lane", "prompt_tokens"):
        np.testing.assert_array_equal(getattr(recorded, column)[by_lane], getattr(imported, column)[by_task])
    np.testing.assert_array_equal(np.maximum(1, recorded.output_tokens[by_lane]), imported.output_tokens[by_task])
    # A trace's shares are exact, a block recording's are whole blocks.
    np.testing.assert_array_equal(
        recorded.previous_prompt_tokens[by_lane],
        imported.previous_prompt_tokens[by_task] // block_tokens * block_tokens,
    )
    assert (recorded.references, recorded.distinct_chunks) == (imported.references, imported.distinct_chunks)
    if recorded.shared_chunks is not None:
        assert recorded.shared_chunks == imported.shared_chunks
    assert imported.cache_stable_tokens.sum() > imported.previous_prompt_tokens.sum()


def weka(name: str, requests: list[Row], **more: Any) -> Row:
    return {"id": name, "block_size": 4, "requests": requests, **more}


def asked(t: float, tokens: int, ids: list[int], **more: Any) -> Row:
    return {"t": t, "type": "n", "in": tokens, "out": 7, "hash_ids": ids, **more}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([weka("a", [asked(0, 9, [1, 2])]), weka("b", [asked(0, 9, [1])])], r"line 2: requests\[0\]: hash_ids has 1"),
        ([weka("a", [asked(0, 9, [1, 2])], block_size=0)], "line 1: block_size must be an integer >= 1, not 0"),
        ([weka("a", [])], "has no call to import"),
        ([weka("a", [asked(0, 9, [1, 2], out=1 << 40)])], "line 1: an output has 1099511627776 tokens; at most"),
        ([weka("a", [asked(0, 9, [])], block_size=1 << 40)], "line 1: a block has 1099511627776 tokens; at most"),
        ([{"timestamp": 0, "input_length": 9, "output_length": -1, "hash_ids": [0]}], "line 1: output_length must be"),
    ],
)
def test_malformed_blocks_name_file_line_and_field(rows: list[Row], message: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecordingError, match=rf"rows\.jsonl: {message}"):
        import_recording(source, tmp_path / "t")
    assert not list(tmp_path.glob("t*"))


def test_a_sample_of_tasks_and_a_vocabulary_can_be_chosen(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [weka(f"session-{number}", [asked(0, 9, [1, 2]), asked(5, 21, [1, 2, 3, 4, 5])]) for number in range(9)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = []
    for seed in (0, 0, 1):
        import_recording(source, tmp_path / "t", tasks=3, seed=seed, vocab_size=50)
        samples.append((list(calls_of(tmp_path / "t")), (tmp_path / "t").read_bytes()))
    assert samples[0] == samples[1]
    assert samples[0][0] != samples[2][0]
    with TraceReader(tmp_path / "t") as reader:
        assert (reader.manifest.vocab_size, reader.manifest.tokenizer) == (50, "synthetic")
        assert reader.manifest.history == ({"step": "import", "tasks": 3, "seed": 1, "skipped_without_calls": 0},)
