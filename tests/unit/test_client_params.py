"""What a client can put into `kv_transfer_params` without ending the engine."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.connector.client_params import ClientParams, drop_question, unusable

DISAGG_SPEC = {"req_id": "1", "receiver_host": "host", "receiver_init_port": [1], "receiver_alloc_port": [2]}


def request(params: Any) -> Any:
    sampling = SimpleNamespace(extra_args={"kv_transfer_params": params, "other": 1})
    return SimpleNamespace(kv_transfer_params=params, sampling_params=sampling)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": True, "remote_block_ids": None, "remote_host": "h", "remote_port": 1, "unknown": [{}]},
        {"efficient_lmcache.task_id": ["7"]},
        {"lmcache.skip_save": True, "lmcache.tag.team": "x", "lmcache.tag.number": 1, "lmcache.tag.nothing": None},
        {"lmcache.max_offload_tokens": 0},
        {"disagg_spec": DISAGG_SPEC, "ret_first_tok": True},
    ],
)
def test_what_lmcache_can_use_and_what_it_ignores_stays_as_it_is(params, caplog):
    served = request(params)
    sampling = served.sampling_params
    ClientParams().check(served)
    assert served.kv_transfer_params is params
    assert served.sampling_params is sampling
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("disagg_spec", value) for value in (None, 1, "x", [], {}, {**DISAGG_SPEC, "receiver_host": 1})),
        *(("lmcache.max_offload_tokens", value) for value in (None, "8", True, -1, 1.5, [])),
        *((name, value) for name in ("lmcache.tag.team", "lmcache.skip_save") for value in ([1], {}, [{}])),
    ],
)
def test_what_lmcache_raises_on_is_taken_away_and_nothing_else(name, value):
    given = {"lmcache.tag.kept": "x", name: value, "unknown": [1]}
    before = copy.deepcopy(given)
    served = request(given)
    ClientParams().check(served)
    kept = {"lmcache.tag.kept": "x", "unknown": [1]}
    assert served.kv_transfer_params == kept
    assert served.sampling_params.extra_args == {"kv_transfer_params": kept, "other": 1}
    assert given == before, "offline users hand one object to many requests"


def test_a_pooling_request_has_nowhere_to_carry_parameters_but_the_scheduler_reads_them():
    served = request({"disagg_spec": 1})
    served.sampling_params = None
    ClientParams().check(served)
    assert served.kv_transfer_params == {}


def test_it_is_said_once(caplog):
    checked = ClientParams()
    for _ in range(3):
        checked.check(request({"lmcache.tag.team": [1], "x" * 10_000: 1, "lmcache." + "y" * 10_000: []}))
    [record] = caplog.records
    assert "lmcache.tag.team" in record.getMessage()
    assert len(record.getMessage()) < 400


def test_what_no_api_server_lets_pass_ends_nothing_either(caplog):
    ClientParams().check(request("garbage"))
    assert "AttributeError" in caplog.text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["disagg_spec", "lmcache.max_offload_tokens", "lmcache.tag.a", "lmcache.skip_save"]) | st.text()


@given(st.dictionaries(names, values))
def test_whatever_is_left_can_be_part_of_a_key(params):
    served = request(params)
    ClientParams().check(served)
    left = served.kv_transfer_params
    assert unusable(left) == []
    hash(tuple((name, value) for name, value in left.items() if name.startswith("lmcache.")))


def test_a_question_that_has_no_answer_is_taken_away_and_nothing_else():
    served = request({"ret_first_tok": True, "kept": 1})
    drop_question(served, "ret_first_tok")
    assert served.kv_transfer_params == {"kept": 1}


@pytest.mark.parametrize("params", [None, {}, {"other": True}])
def test_a_request_that_does_not_ask_stays_as_it_is(params):
    served = request(params)
    drop_question(served, "ret_first_tok")
    assert served.kv_transfer_params is params
