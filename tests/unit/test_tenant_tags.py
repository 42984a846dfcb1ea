"""A tenant's tag: who gets one, what it tells, and what else stays as the client gave it."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficient_lmcache.connector import tenants, vllm_adapter
from efficient_lmcache.connector.isolation import TENANT_TAG_KEY, RequestIsolation
from efficient_lmcache.connector.tenants import TENANT_KEY_VARIABLE, tenant_digest


def request(salt: str | None = None, transfer_params: Any = None, request_id: str = "request") -> Any:
    extra_args = None if transfer_params is None else {"kv_transfer_params": transfer_params}
    return SimpleNamespace(
        request_id=request_id,
        cache_salt=salt,
        lora_request=None,
        prompt_embeds=None,
        sampling_params=SimpleNamespace(extra_args=extra_args),
        kv_transfer_params=transfer_params,
    )


def sent(served: Any) -> list[tuple[str, Any]]:
    """What LMCache gets of a request's transfer parameters, in order."""
    return list(served.sampling_params.extra_args["kv_transfer_params"].items())


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_key(value: str) -> None:
        monkeypatch.setenv(TENANT_KEY_VARIABLE, value)
        tenants._key.cache_clear()

    yield set_key
    monkeypatch.undo()
    tenants._key.cache_clear()


@pytest.mark.parametrize("transfer_params", [None, {}, {"lmcache.tag.team": "x", "lmcache.skip_save": True}, "garbage"])
@pytest.mark.parametrize("salt", [None, ""])
def test_without_a_salt_a_request_is_left_as_it_is(salt, transfer_params):
    isolation, served = RequestIsolation(), request(salt, transfer_params)
    params, before = served.sampling_params, copy.deepcopy(served.sampling_params)
    assert isolation.may_use_lmcache(served)
    assert served.sampling_params is params
    assert params == before


def test_a_salted_request_gets_its_tenants_tag_as_the_last_and_keeps_its_own():
    served = request("tenant-a", {"lmcache.tag.team": "x", "efficient_lmcache.task_id": "7"})
    assert RequestIsolation().may_use_lmcache(served)
    assert sent(served) == [
        ("lmcache.tag.team", "x"),
        ("efficient_lmcache.task_id", "7"),
        (TENANT_TAG_KEY, tenant_digest("tenant-a")),
    ]


def test_asking_again_changes_nothing_and_a_sessions_next_input_gets_the_tag_too():
    isolation, served = RequestIsolation(), request("tenant-a")
    assert isolation.may_use_lmcache(served)
    tagged = served.sampling_params
    assert isolation.may_use_lmcache(served)
    assert served.sampling_params is tagged
    served.sampling_params = SimpleNamespace(extra_args={"kv_transfer_params": {"lmcache.tag.team": "x"}})
    assert isolation.may_use_lmcache(served)
    assert sent(served)[-1] == (TENANT_TAG_KEY, tenant_digest("tenant-a"))


def test_requests_that_share_their_sampling_parameters_get_their_own_tags():
    shared = SimpleNamespace(extra_args=None)
    served = [request(salt) for salt in ("a", "b", None)]
    for one in served:
        one.sampling_params = shared
        assert RequestIsolation().may_use_lmcache(one)
    assert [sent(one)[0][1] for one in served[:2]] == [tenant_digest("a"), tenant_digest("b")]
    assert shared.extra_args is None


def test_nobody_chooses_a_tenants_tag():
    stolen = tenant_digest("tenant-a")
    unsalted = request(None, {TENANT_TAG_KEY: stolen, "lmcache.tag.team": "x"})
    assert RequestIsolation().may_use_lmcache(unsalted)
    assert sent(unsalted) == [("lmcache.tag.team", "x")]
    other = request("tenant-b", {TENANT_TAG_KEY: stolen, "lmcache.tag.team": f"x@{TENANT_TAG_KEY}%{stolen}"})
    assert RequestIsolation().may_use_lmcache(other)
    assert sent(other)[-1] == (TENANT_TAG_KEY, tenant_digest("tenant-b"))
    assert [name for name, _ in sent(other)].count(TENANT_TAG_KEY) == 1


@given(st.text(min_size=1), st.text(min_size=1))
def test_tenants_have_the_same_digest_only_if_they_have_the_same_salt(left, right):
    assert (tenant_digest(left) == tenant_digest(right)) == (left == right)


@given(st.text(min_size=9))
def test_a_digest_is_hexadecimal_so_that_no_key_is_torn_apart_and_no_salt_shows(salt):
    digest = tenant_digest(salt)
    assert len(digest) == 32
    assert set(digest) <= set("0123456789abcdef")
    assert salt not in digest


def test_digests_are_the_same_in_every_process_and_depend_on_the_secret(key):
    seen = []
    for value in ("", "secret", "s" * 1000, "secret"):
        key(value)
        seen.append(tenant_digest("tenant-a"))
    assert seen[1] == seen[3]
    assert len(set(seen)) == 3
    # So that engines of two releases share a tier.
    assert seen[0] == "0415f102dd7cea2a52152fa971e7f21e"


def test_tasks_of_tenants_are_told_apart_without_their_salts():
    named = [request(salt, {"efficient_lmcache.task_id": "7"}) for salt in ("geheim", "x", None)]
    digest = tenant_digest("geheim")
    assert [vllm_adapter.qualified_task(*vllm_adapter.task_and_tenant(one)) for one in named] == [
        f"7@{digest}",
        f"7@{tenant_digest('x')}",
        "7",
    ]
    assert [vllm_adapter.task_and_tenant(one) for one in named][::2] == [("7", digest), ("7", None)]


def test_where_lmcache_does_not_heed_tags_salted_requests_do_without_it(caplog):
    isolation = RequestIsolation("LMCache's use_layerwise makes keys without a request's tags")
    assert "served without LMCache: LMCache's use_layerwise" in caplog.text
    salted, unsalted = request("tenant-a", request_id="1"), request(None, request_id="2")
    assert not isolation.may_use_lmcache(salted)
    assert isolation.may_use_lmcache(unsalted)
    assert set(isolation.without_lmcache) == {"1"}
    isolation.forget("1")
    isolation.forget("2")
    assert not isolation.without_lmcache


def test_a_salted_pooling_request_has_nothing_to_carry_a_tag_and_does_without_lmcache():
    isolation, pooling = RequestIsolation(), request("tenant-a")
    pooling.sampling_params = None
    assert not isolation.may_use_lmcache(pooling)
    pooling.cache_salt, pooling.request_id = None, "unsalted"
    assert isolation.may_use_lmcache(pooling)


def test_what_cannot_be_tagged_is_computed_said_once_and_never_raises(caplog):
    isolation = RequestIsolation()
    for index in range(3):
        assert not isolation.may_use_lmcache(request("tenant-a", "garbage", request_id=str(index)))
    assert len(isolation.without_lmcache) == 3
    assert len(caplog.records) == 1
    repaired = request("tenant-a", request_id="0")
    assert not isolation.may_use_lmcache(repaired), "its first answer stands: nothing was looked up"
    assert isolation.may_use_lmcache(request("tenant-a", request_id="4"))
    assert "works again" in caplog.records[-1].getMessage()
