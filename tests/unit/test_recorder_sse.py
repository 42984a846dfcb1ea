"""Server-sent events, however the network cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder_upstream import Answer as Upstream

from efficient_lmcache.replay.recorder.ids import RecentIds
from efficient_lmcache.replay.recorder.response import Answer
from efficient_lmcache.replay.recorder.sse import EventStream

BODIES = {
    "/v1/chat/completions": {"messages": [{"content": "héllo"}], "max_tokens": 5},
    "/v1/completions": {"prompt": [7, 8, 9], "max_tokens": 5},
    "/v1/responses": {"input": "héllo", "max_output_tokens": 5},
}
KEEP_ALIVE = b": keep-alive\n\n"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("path", BODIES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_events_are_the_same_wherever_they_are_cut(path: str, newline: bytes, data: st.DataObject) -> None:
    asked, plain = (Upstream(path, BODIES[path], ids=ids) for ids in (True, False))
    sent, expected = (KEEP_ALIVE + KEEP_ALIVE.join(each.events("")) for each in (asked, plain))
    if path == "/v1/chat/completions":
        expected = KEEP_ALIVE + KEEP_ALIVE.join(_with_dropped(asked.events(""), plain.events("")))
    sent, expected = (text.replace(b"\n", newline) for text in (sent, expected))
    answer = Answer(path, True, RecentIds())
    events = EventStream(answer)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    given_out = b"".join(events.feed(sent[a:b]) for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True) if b > a)
    assert given_out + events.rest() == expected
    assert (events.ended, answer.finished, answer.error) == (True, True, None)
    prompt = answer.prompt()
    assert prompt is not None
    assert (prompt.tolist(), answer.output().tolist()) == (asked.prompt, asked.output)


def _with_dropped(asked: list[bytes], plain: list[bytes]) -> list[bytes]:
    """The events without ids, and nothing in the place of those that have only ids."""
    rest = iter(plain)
    return [b"" if b'"delta":{}' in event else next(rest) for event in asked]
