"""Pseudonyms keep what is reused, and nothing of the text."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_lmcache.replay.recorder.privacy import BLOCK_TOKENS, Pseudonyms, task_pseudonym
from efficient_lmcache.replay.trace import Tokens, common_prefix_tokens

KEY = bytes(range(32))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[int, list[Tokens]]:
    """Sequences that branch off one another at places around block boundaries."""
    vocab_size = draw(st.sampled_from([2, 3, 7, 256, 151_936]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    sequences = [rng.integers(vocab_size, size=3 * BLOCK_TOKENS, dtype=np.uint32)]
    for _ in range(draw(st.integers(1, 5))):
        base = sequences[draw(st.integers(0, len(sequences) - 1))]
        kept = base[: draw(st.integers(0, len(base)))]
        added = rng.integers(vocab_size, size=draw(st.integers(0, 2 * BLOCK_TOKENS)), dtype=np.uint32)
        sequences.append(np.concatenate((kept, added)))
    return vocab_size, sequences


@settings(deadline=None, max_examples=60)
@given(conversations())
def test_common_prefixes_lengths_and_continuations_are_exactly_kept(example: tuple[int, list[Tokens]]) -> None:
    vocab_size, sequences = example
    # One after the other, so that what is remembered of the last sequence is used and thrown away again.
    pseudonyms = Pseudonyms(KEY, vocab_size)
    replaced = [pseudonyms.replace(sequence) for sequence in sequences]
    for (a, b), (c, d) in zip(combinations(sequences, 2), combinations(replaced, 2), strict=True):
        assert common_prefix_tokens(a, b) == common_prefix_tokens(c, d)
    for sequence, shown in zip(sequences, replaced, strict=True):
        assert len(shown) == len(sequence)
        assert not len(shown) or shown.max() < vocab_size
        prompt = Pseudonyms(KEY, vocab_size).replace(sequence[: len(sequence) // 2])
        assert shown[: len(prompt)].tolist() == prompt.tolist()


def test_what_is_remembered_changes_nothing() -> None:
    tokens = np.random.default_rng(0).integers(1000, size=1000, dtype=np.uint32)
    remembering = Pseudonyms(KEY, 1000)
    for length in (10, 500, 130, 129, 128, 127, 1000):
        fresh = Pseudonyms(KEY, 1000).replace(tokens[:length])
        assert remembering.replace(tokens[:length]).tolist() == fresh.tolist()


def test_words_cannot_be_counted() -> None:
    shown = Pseudonyms(KEY, 1000).replace(np.zeros(100_000, np.uint32))
    counts = np.bincount(shown, minlength=1000)
    assert counts.min() > 50
    assert counts.max() < 150


def test_another_key_gives_other_pseudonyms() -> None:
    tokens = np.arange(1000, dtype=np.uint32)
    one, other = (Pseudonyms(key, 1000).replace(tokens) for key in (KEY, bytes(32)))
    assert (one == other).mean() < 0.02
    assert task_pseudonym(KEY, "django") != task_pseudonym(bytes(32), "django")


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token id 1000 is not below"):
        Pseudonyms(KEY, 1000).replace(np.array([1000], np.uint32))
