"""What would end an engine that plain LMCache would keep serving, and what would end plain LMCache's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl, LoadSpec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import NewRequestData

from efficient_lmcache.connector import vllm_adapter
from efficient_lmcache.connector.connector import EfficientLMCacheConnector, close_parts, start_or_do_without
from efficient_lmcache.connector.lmcache_adapter import SchedulerSide, caches_of_the_model
from efficient_lmcache.connector.options import OptionError


def settled(computed_tokens: int, found: LoadSpec | None) -> LoadSpec | None:
    """What LMCache is told of one resumed request."""
    impl: Any = SimpleNamespace(
        _unfinished_requests={"request": SimpleNamespace(num_computed_tokens=computed_tokens)},
        load_specs={} if found is None else {"request": found},
    )
    SchedulerSide(impl).settle_resumed({"request"})
    told: LoadSpec | None = impl.load_specs.get("request")
    return told


def lmcache_accepts(computed_tokens: int, told: LoadSpec | None) -> bool:
    """Its assertions, of a prompt that is longer than what was found of it."""
    return told is not None and computed_tokens == max(told.lmcache_cached_tokens, told.vllm_cached_tokens)


@pytest.mark.parametrize(
    ("computed_tokens", "found"),
    [
        pytest.param(0, None, id="never looked up"),
        pytest.param(256, None, id="never looked up, and in the GPU"),
        pytest.param(0, LoadSpec(0, 768, False), id="vLLM restores nothing of it"),
        pytest.param(256, LoadSpec(256, 512, False), id="too little to restore"),
        pytest.param(512, LoadSpec(256, 384, False), id="another connector restores more"),
        pytest.param(512, LoadSpec(512, 256, False), id="the GPU has more"),
    ],
)
def test_a_resumed_request_of_which_lmcache_restores_nothing_is_one_that_it_accepts(computed_tokens, found):
    told = settled(computed_tokens, found)
    assert lmcache_accepts(computed_tokens, told)
    assert told is not None
    assert not told.can_load
    assert told.lmcache_cached_tokens <= (found.lmcache_cached_tokens if found else 0)


def test_a_resumed_request_that_lmcache_restores_is_left_as_it_is():
    found = LoadSpec(256, 768, True)
    assert settled(768, found) is found


def test_a_request_that_lmcache_does_not_know_stays_unknown():
    impl: Any = SimpleNamespace(_unfinished_requests={}, load_specs={})
    SchedulerSide(impl).settle_resumed({"request"})
    assert impl.load_specs == {}


class Capped:
    """As much of LMCache's scheduler side as a lookup and what follows it touch; all that is decided is LMCache's."""

    def __init__(self, found_tokens: int, max_tokens_per_load: int) -> None:
        self.kv_role, self.skip_last_n_tokens, self._lmcache_chunk_size = "kv_both", 0, 256
        self._max_tokens_per_load = max_tokens_per_load
        self.config = SimpleNamespace(min_retrieve_tokens=0)
        self.lookup_client = SimpleNamespace(lookup_cache=lambda lookup_id: found_tokens, clear_lookup_status=id)
        self.load_specs: dict[str, LoadSpec] = {}
        self._unfinished_requests: dict[str, Any] = {}


@given(
    prompt_tokens=st.integers(2, 4000),
    chunks=st.integers(0, 15),
    computed_blocks=st.integers(0, 249),
    cap_tokens=st.sampled_from([0, 100, 256, 600, 1024, 3000]),
)
@example(prompt_tokens=2000, chunks=7, computed_blocks=8, cap_tokens=600)
@example(prompt_tokens=1024, chunks=4, computed_blocks=1, cap_tokens=0)
def test_vllm_may_accept_whatever_is_offered_for_restoring(prompt_tokens, chunks, computed_blocks, cap_tokens):
    computed_tokens = min(16 * computed_blocks, (prompt_tokens - 1) // 16 * 16)
    impl: Any = Capped(min(chunks, prompt_tokens // 256) * 256, cap_tokens)
    request: Any = SimpleNamespace(request_id="request", num_tokens=prompt_tokens, kv_transfer_params=None)
    offered = LMCacheConnectorV1Impl.get_num_new_matched_tokens(impl, request, computed_tokens)
    restorable = SchedulerSide(impl).restorable_tokens(request, offered)
    assert 0 <= restorable <= offered
    assert (restorable == 0) == (offered == 0)
    if not cap_tokens:
        assert restorable == offered
    # It raises where the tokens are not those of its own record.
    LMCacheConnectorV1Impl.update_state_after_alloc(impl, request, restorable)
    assert impl.load_specs["request"].can_load == (restorable > 0)


def new_request(token_ids: list[int] | None, embeddings: Any = None) -> NewRequestData:
    return NewRequestData("request", token_ids, [], None, None, ([1],), 0, None, prompt_embeds=embeddings)


def test_a_step_without_embeddings_reaches_lmcache_as_it_is():
    step: Any = SimpleNamespace(scheduled_new_reqs=[new_request([1, 2, 3])])
    assert vllm_adapter.with_token_ids(step) is step


def test_a_prompt_of_embeddings_has_as_many_token_ids_as_embeddings_and_the_step_itself_is_untouched():
    tokens, embeddings = new_request([1, 2, 3]), new_request(None, torch.zeros(5, 8))
    step: Any = SimpleNamespace(scheduled_new_reqs=[tokens, embeddings], other="kept")
    seen = vllm_adapter.with_token_ids(step)
    assert seen.scheduled_new_reqs[0] is tokens
    assert seen.scheduled_new_reqs[1].prompt_token_ids == [0] * 5
    assert vars(seen)["other"] == "kept"
    assert step.scheduled_new_reqs == [tokens, embeddings]
    assert embeddings.prompt_token_ids is None


def registered(metadata: Any, caches: list[str]) -> list[str]:
    impl: Any = SimpleNamespace(lmcache_engine_metadata=metadata)
    return list(caches_of_the_model(impl, dict.fromkeys(caches, torch.zeros(1))))


def test_lmcache_is_given_the_layers_that_its_chunks_have_room_for_and_not_a_draft_models():
    two_layers = SimpleNamespace(kv_shape=(2, 2, 256, 4, 32))
    assert registered(two_layers, ["model.0", "model.1"]) == ["model.0", "model.1"]
    assert registered(two_layers, ["model.0", "model.1", "draft_model.0"]) == ["model.0", "model.1"]


def test_an_lmcache_that_could_not_start_is_given_all_layers():
    assert registered(None, ["model.0", "draft_model.0"]) == ["model.0", "draft_model.0"]


def test_what_only_we_stumble_over_at_the_start_does_not_stop_the_engine(caplog):
    def start() -> None:
        raise KeyError("a layout that nobody has thought of")

    start_or_do_without(start)
    assert "Starting write admission failed: KeyError" in caplog.text


def test_a_users_mistake_does():
    def start() -> None:
        raise OptionError("efficient.decision_log cannot be written")

    with pytest.raises(OptionError, match="decision_log"):
        start_or_do_without(start)


class Part:
    def __init__(self, error: Exception | None = None) -> None:
        self.closed = False
        self._error = error

    def close(self) -> None:
        self.closed = True
        if self._error is not None:
            raise self._error


def test_every_part_is_closed_whatever_becomes_of_the_others(caplog):
    parts = [Part(), Part(OSError("no space left")), Part()]
    close_parts(parts[0], None, *parts[1:])
    assert all(part.closed for part in parts)
    assert "Closing Part failed: OSError: no space left" in caplog.text


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize("mode", ["in_process", "server"])
@pytest.mark.parametrize(
    ("named", "refusal"),
    [
        ({"decision_log": "{}/absent/log.jsonl"}, r"decision_log=.*absent.* cannot be written"),
        (
            {
                "telemetry.transport": "redis",
                "telemetry.redis_url": "redis://host",
                "telemetry.redis_password_file": "{}/absent",
            },
            r"redis_password_file cannot be read .*absent",
        ),
    ],
)
def test_a_file_that_is_not_there_is_refused_before_lmcache_starts(
    named: dict[str, str], refusal: str, mode: str, role: Any, tmp_path: Path
) -> None:
    extra = {f"efficient.{name}": value.format(tmp_path) for name, value in {**named, "mode": mode}.items()}
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra), parallel_config=SimpleNamespace(rank=0)
    )

    with pytest.raises(OptionError, match=refusal):
        EfficientLMCacheConnector(vllm_config, role, None)
