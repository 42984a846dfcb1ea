"""Messages become the same tokens, whatever calls are before them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.replay.importers.rendering import rendered_calls
from efficient_lmcache.replay.importers.tasks import TextCall
from efficient_lmcache.replay.tokenizers import load_tokenizer

pytest.importorskip("tokenizers", reason="needs the package tokenizers, which the extras cpu and gpu bring")

TEXTS = ("", "ls", "a b", "the same words again")
TOKENIZER = load_tokenizer("bpe:300", lambda: iter(TEXTS))
messages = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.sampled_from(TEXTS)), min_size=1)


@st.composite
def tasks(draw: st.DrawFn) -> list[TextCall]:
    """Calls that extend the one before, resend it, cut it or begin anew."""
    calls: list[TextCall] = []
    for _ in range(draw(st.integers(1, 5))):
        before = list(calls[-1].messages) if calls else []
        kept = before[: draw(st.sampled_from([len(before), len(before), 1, 0]))]
        more = draw(messages) if not kept or draw(st.booleans()) else []
        calls.append(TextCall([*kept, *more], draw(st.sampled_from(TEXTS)), 0.0))
    return calls


@given(tasks())
def test_a_call_is_rendered_alike_behind_other_calls_and_alone(calls: list[TextCall]) -> None:
    for call, rendered in zip(calls, rendered_calls(calls, TOKENIZER), strict=True):
        (alone,) = rendered_calls([call], TOKENIZER)
        np.testing.assert_array_equal(rendered.prompt_tokens, alone.prompt_tokens)
        np.testing.assert_array_equal(rendered.output_tokens, alone.output_tokens)
        turns = [next(rendered_calls([TextCall([each], "", 0.0)], TOKENIZER)).prompt_tokens for each in call.messages]
        opening = len(next(rendered_calls([TextCall([], "", 0.0)], TOKENIZER)).prompt_tokens)
        assert len(rendered.prompt_tokens) == sum(len(turn) - opening for turn in turns) + opening
