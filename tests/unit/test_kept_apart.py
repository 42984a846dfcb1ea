"""Whose KV is whose beyond tenants: adapters, prompts of embeddings, and the names that clients give their tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.connector import vllm_adapter
from efficient_lmcache.connector.isolation import ADAPTER_TAG_KEY, TENANT_TAG_KEY, RequestIsolation, own_tags
from efficient_lmcache.connector.tenants import adapter_digest, tenant_digest

BASE = None


def request(
    adapter: tuple[str, str] | None = BASE,
    salt: str | None = None,
    transfer_params: Any = None,
    embeddings: Any = None,
    request_id: str = "request",
) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        cache_salt=salt,
        lora_request=None if adapter is None else SimpleNamespace(lora_name=adapter[0], lora_path=adapter[1]),
        prompt_embeds=embeddings,
        sampling_params=SimpleNamespace(
            extra_args={"kv_transfer_params": transfer_params} if transfer_params else None
        ),
        kv_transfer_params=transfer_params,
    )


def sent(served: Any) -> list[tuple[str, Any]]:
    """What LMCache gets of a request's transfer parameters, in order."""
    return list(vllm_adapter.kv_transfer_params(served).items())


ADAPTERS = [BASE, ("sql", "/adapters/sql"), ("sql", "/adapters/sql-2"), ("law", "/adapters/sql")]


def test_adapters_have_keys_of_their_own_and_the_base_model_those_of_lmcache():
    served = [request(adapter) for adapter in ADAPTERS]
    assert all(RequestIsolation().may_use_lmcache(one) for one in served)
    assert sent(served[0]) == []
    tags = [dict(sent(one))[ADAPTER_TAG_KEY] for one in served[1:]]
    assert len(set(tags)) == 3
    again = request(ADAPTERS[1])
    RequestIsolation().may_use_lmcache(again)
    assert sent(again) == sent(served[1])


def test_a_tenant_with_an_adapter_has_both_tags_and_the_tenants_comes_last():
    served = request(ADAPTERS[1], "salt", {"lmcache.tag.team": "x"})
    assert RequestIsolation().may_use_lmcache(served)
    assert sent(served) == [
        ("lmcache.tag.team", "x"),
        (ADAPTER_TAG_KEY, adapter_digest(*ADAPTERS[1])),
        (TENANT_TAG_KEY, tenant_digest("salt")),
    ]


@pytest.mark.parametrize("adapter", [BASE, ADAPTERS[2]])
def test_nobody_chooses_an_adapters_tag(adapter):
    stolen = adapter_digest(*ADAPTERS[1])
    served = request(adapter, None, {ADAPTER_TAG_KEY: stolen})
    assert RequestIsolation().may_use_lmcache(served)
    assert stolen not in dict(sent(served)).values()


adapters = st.none() | st.tuples(st.text(), st.text())
salts = st.none() | st.text()


@given(st.tuples(adapters, salts), st.tuples(adapters, salts))
def test_requests_share_a_servers_keys_only_with_the_same_adapter_and_tenant(left, right):
    domains = ["".join(own_tags(request(*one)).values()) for one in (left, right)]
    same = (left[0], left[1] or None) == (right[0], right[1] or None)
    assert (domains[0] == domains[1]) == same


def test_a_prompt_of_embeddings_is_computed_without_lmcache_whatever_else_it_has():
    isolation = RequestIsolation()
    odd = [
        request(embeddings=object(), request_id="1"),
        request(ADAPTERS[1], "salt", {"lmcache.tag.team": "x"}, embeddings=object(), request_id="2"),
    ]
    assert not any(isolation.may_use_lmcache(one) for one in odd)
    assert isolation.may_use_lmcache(request(request_id="3"))
    assert set(isolation.without_lmcache) == {"1", "2"}
    assert sent(odd[1]) == [("lmcache.tag.team", "x")]
    for one in odd:
        isolation.forget(one.request_id)
    assert not isolation.without_lmcache


def test_where_lmcache_does_not_heed_tags_adapters_do_without_it():
    isolation = RequestIsolation("a test says so")
    assert not isolation.may_use_lmcache(request(ADAPTERS[1], request_id="1"))
    assert isolation.may_use_lmcache(request(BASE, request_id="2"))


def named(task: Any) -> str | None:
    found = vllm_adapter.task_and_tenant(request(transfer_params={"efficient_lmcache.task_id": task}))
    return None if found is None else vllm_adapter.qualified_task(*found)


@pytest.mark.parametrize("task", [None, ""])
def test_a_client_without_a_name_for_its_task_does_not_share_one_with_all_the_others(task):
    assert named(task) is None


@pytest.mark.parametrize("task", ["7", "a\nb", "\0", "Ω" * 256, "/../..", "a b"])
def test_any_short_name_is_taken_as_it_is(task):
    assert named(task) == task


@pytest.mark.parametrize("task", [7, 7.5, True, [1, "a"], {"a": 1}])
def test_a_name_that_is_no_text_is_taken_for_its_text(task):
    assert named(task) == str(task)


@given(st.text(min_size=257), st.text(min_size=257))
def test_long_names_are_told_apart_and_take_little_room(left, right):
    short = [named(task) for task in (left, right)]
    assert all(name is not None and len(name) <= 64 for name in short)
    assert (short[0] == short[1]) == (left == right)


def test_a_megabyte_of_a_name_is_not_kept():
    name = named("x" * 2**20)
    assert name is not None
    assert len(name) < 64
