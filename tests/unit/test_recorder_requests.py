"""What a request says of its call, read from JSON as lenient as vLLM's."""

from __future__ import annotations

import json

import pytest

from efficient_lmcache.replay.recorder.json_text import read_object
from efficient_lmcache.replay.recorder.request import CHAT, read_request


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": [2.5, null]}',
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": 123456789012345678901234567890}',
        b" {} ",
    ],
)
def test_an_object_is_what_pythons_own_reader_makes_of_it(text: bytes) -> None:
    read = read_object(text)
    assert read is not None
    assert repr(read.keys()) == repr(json.loads(text).keys())


@pytest.mark.parametrize("text", [b"", b"[1]", b"1", b'{"a":', b"\xff", b"null"])
def test_what_is_no_object_is_none(text: bytes) -> None:
    assert read_object(text) is None


def test_a_request_with_half_a_surrogate_pair_is_recorded() -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    asked = read_request(CHAT, body, {})
    assert asked.obstacle is None
    assert asked.body.endswith(b'"return_token_ids":true}')
