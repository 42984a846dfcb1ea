"""A task's requests, each encoded from the one before it."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.replay.requests import TaskRequests
from efficient_lmcache.replay.trace import Call

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=9)


@given(st.lists(st.tuples(st.integers(0, 20), TOKENS, TOKENS), min_size=1, max_size=8))
def test_every_request_is_the_json_of_its_call_whatever_was_encoded_before(
    calls: list[tuple[int, list[int], list[int]]],
) -> None:
    """Prompts that go on from the last one, keep a part of it, or nothing."""
    requests, prompt = TaskRequests("t"), []
    for keep, added, output in calls:
        prompt = prompt[:keep] + added
        call = Call(np.array(prompt, np.uint32), np.array(output, np.uint32), 0.0)
        assert json.loads(b"".join(requests.encode(call))) == {
            "prompt": prompt,
            "max_tokens": len(output),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {"efficient_lmcache.forced_tokens": output},
            "kv_transfer_params": {"efficient_lmcache.task_id": "t"},
        }
        # An unchanged prompt, sent again.
        assert json.loads(b"".join(requests.encode(call)))["prompt"] == prompt


def test_an_unlabelled_request_does_not_name_its_task() -> None:
    call = Call(np.array([1], np.uint32), np.array([2], np.uint32), 0.0)
    assert "kv_transfer_params" not in json.loads(b"".join(TaskRequests(None).encode(call)))
