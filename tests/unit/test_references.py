"""Reference streams: calls in other orders and in one piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.core.references import References


def references(calls: list[list[int]], chunk_tokens: int = 4) -> References:
    lengths = [len(keys) for keys in calls]
    numbers = np.arange(len(calls), dtype=np.int64)
    return References(
        chunk_tokens=chunk_tokens,
        keys=np.array([key for keys in calls for key in keys], np.int64),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        lookup_chunks=np.array(lengths, np.int64),
        prompt_tokens=np.array(lengths, np.int64) * chunk_tokens,
        output_tokens=numbers * 0,
        lane=numbers,
        session=numbers,
        start_s=numbers * np.nan,
        interval_s=numbers * np.nan,
    )


calls_of = st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=12)


@given(calls_of, st.randoms(use_true_random=False))
def test_reordered_calls_keep_their_keys(calls, random):
    order = list(range(len(calls)))
    random.shuffle(order)
    result = references(calls).reordered(np.array(order, np.int64))
    assert [result.call_keys(call).tolist() for call in range(len(result))] == [calls[call] for call in order]
    assert result.lane.tolist() == order


@given(calls_of, st.integers(0, 12))
def test_batches_concatenate_to_the_whole_stream(calls, cut):
    whole = References.concatenate([references(calls[:cut]), references(calls[cut:])])
    assert [whole.call_keys(call).tolist() for call in range(len(whole))] == calls


def test_arrays_of_unequal_length_are_refused_by_name():
    good = references([[1, 2], [3]])
    with pytest.raises(ValueError, match="prompt_tokens has 1 entries for 2 calls"):
        References(
            **{name: getattr(good, name) for name in References.__slots__ if name != "prompt_tokens"},
            prompt_tokens=np.array([1]),
        )
