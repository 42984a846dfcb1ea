"""Tenants in real engines: none can tell whether another sent a prompt, and telemetry tells nobody."""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Iterator
from typing import Any

import fresh_process
import msgpack
import pytest
from isolation_scenarios import CHUNK_TOKENS, TENANTS
from redis_monitor import RedisMonitor
from redis_process import RedisProcess

from efficient_lmcache.connector.isolation import TENANT_TAG_KEY
from efficient_lmcache.connector.tenants import tenant_digest
from efficient_lmcache.telemetry import observation, report

pytestmark = pytest.mark.integration
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")

PREFIX_TOKENS = 4 * CHUNK_TOKENS
RESTORED = "efficient_lmcache:restored_tokens_total"
STORED = "efficient_lmcache:stored_tokens_total"


@pytest.fixture(scope="module")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RedisProcess]]:
    servers = {name: RedisProcess(tmp_path_factory.mktemp(name)) for name in ("remote", "telemetry")}
    yield servers
    for server in servers.values():
        server.kill()


@pytest.fixture(scope="module")
def first(small_model: str, redis_servers: dict[str, RedisProcess]) -> dict[str, Any]:
    with RedisMonitor(redis_servers["telemetry"]) as monitor:
        result = fresh_process.run(
            "isolation_scenarios:first_engine",
            model=small_model,
            remote_url=redis_servers["remote"].url,
            telemetry_url=redis_servers["telemetry"].url,
        )
    return {**result, "commands": monitor.commands}


def counted(seen: dict[str, Any], counter: str) -> float:
    return sum(count for name, count in seen["counters"].items() if name.startswith(counter))


def test_b_cannot_tell_whether_a_sent_its_prompt(first):
    views = {name: {**view, "tokens": None} for name, view in first["views"].items()}
    assert len(views) == 3
    assert views["A's is in both tiers"] == views["A's is in the CPU tier"] == views["nobody sent it"]
    view = views["nobody sent it"]
    assert view["cached_tokens"] == counted(view, RESTORED) == counted(view, "vllm:external_prefix_cache_hits") == 0
    assert counted(view, STORED) == PREFIX_TOKENS


def test_every_tenant_has_its_own_prefixes_back(first):
    own = first["own"]
    assert {name: counted(seen, RESTORED) for name, seen in own.items()} == {
        "a": PREFIX_TOKENS,
        "b": PREFIX_TOKENS,
        "nobody": 0,
        "nobody, again": PREFIX_TOKENS,
    }
    assert {tuple(seen["tokens"]) for seen in own.values()} == {tuple(first["views"]["A's is in both tiers"]["tokens"])}


def test_without_a_salt_keys_are_lmcaches_own_and_with_one_none_holds_it(first):
    keys = set(first["keys"])
    assert len(first["lmcaches_own_keys"]) == 4
    assert keys.issuperset(first["lmcaches_own_keys"])
    tag = re.compile(re.escape(TENANT_TAG_KEY.removeprefix("lmcache.tag.")) + "%([0-9a-f]{32})$")
    tags = {match[1] for key in keys if (match := tag.search(key))}
    assert tags == {tenant_digest(salt) for salt in TENANTS.values() if salt}
    assert not [key for key in keys if "salt-of" in key]


def test_a_clients_own_tags_work_as_ever_and_none_opens_a_tenants_keys(first):
    assert {name: counted(seen, RESTORED) for name, seen in first["tags"].items()} == {
        "first": 0,
        "same tag": PREFIX_TOKENS,
        "without the tag": 0,
        "another tenant's": 0,
        "unsalted, same tag": PREFIX_TOKENS,
        "A's own": 0,
        "a stolen tag": 0,
    }
    assert any("@team%x" in key for key in first["keys"])


def test_where_lmcache_loses_tags_a_tenant_does_without_it(first):
    seen = first["without_lmcache"]["seen"]
    assert {name: (counted(view, STORED), counted(view, RESTORED)) for name, view in seen.items()} == {
        "salted": (0, 0),
        "salted, again": (0, 0),
        "unsalted": (PREFIX_TOKENS, 0),
        "unsalted, again": (0, PREFIX_TOKENS),
    }
    assert len({tuple(view["tokens"]) for view in seen.values()}) == 1
    assert first["without_lmcache"]["remembered"] == 0
    assert set(first["state"].values()) == {0}


def test_another_engine_restores_from_the_remote_tier_what_its_tenant_left_there(first, small_model, redis_servers):
    remote = redis_servers["remote"]
    names = remote.cli("--scan").split()
    assert names
    assert not [name for name in names if "salt-of" in name]
    result = fresh_process.run(
        "isolation_scenarios:second_engine",
        model=small_model,
        remote_url=remote.url,
        shared_prompt=first["shared_prompt"],
    )
    seen = result["seen"]
    assert {tenant: counted(view, RESTORED) for tenant, view in seen.items()} == {
        "c": 0,
        "a": PREFIX_TOKENS,
        "nobody": PREFIX_TOKENS,
    }
    assert {tuple(view["tokens"]) for view in seen.values()} == {tuple(first["own"]["a"]["tokens"])}
    assert set(result["state"].values()) == {0}


def runs_of_ids(prompt: list[int]) -> Iterator[bytes]:
    """Four token ids in a row, in every way that programs write such down."""
    for start in range(0, len(prompt) - 3, 4):
        ids = prompt[start : start + 4]
        for order in "<>":
            for kind in "HIQ":
                yield struct.pack(f"{order}4{kind}", *ids)
        yield b"".join(msgpack.packb(token) for token in ids)
        for separator in (",", ", ", " "):
            yield separator.join(map(str, ids)).encode()


def written_down(numbers: list[int]) -> Iterator[bytes]:
    for number in numbers:
        yield from (f"{number}".encode(), f"{number & 2**64 - 1:x}".encode())
        yield from (struct.pack(f"{order}Q", number & 2**64 - 1) for order in "<>")


def test_telemetry_holds_no_prompt_no_hash_of_one_and_no_tenant(first):
    published = [words for words in first["commands"] if words[0].upper() in (b"PUBLISH", b"SET")]
    observations = [observation.decode(words[2]) for words in published if b":pool:" in words[1] and words[2]]
    assert len([report.decode(words[2]) for words in published if b":tier:" in words[1] and words[2]]) > 10
    assert len({seen.sequence for seen in observations}) > 3
    tasks = max(len(seen.task_hashes) for seen in observations)
    assert tasks >= len(first["tasks"]) > 10, "the load was not seen: the test proves nothing"

    said = b"\0".join(word for words in first["commands"] for word in words)
    assert len(first["prompts"]) > 30
    assert not [prompt[:4] for prompt in first["prompts"] if any(run in said for run in runs_of_ids(prompt))]
    block_hashes = [bytes.fromhex(digest) for digest in first["block_hashes"]]
    assert len(block_hashes) > 100
    assert not [
        digest for digest in block_hashes if digest in said or digest[:8] in said or digest.hex()[:16].encode() in said
    ]
    assert len(first["chunk_hashes"]) > 40
    assert not [written for written in written_down(first["chunk_hashes"]) if written in said]
    salts = [salt for salt in TENANTS.values() if salt]
    assert not [name for name in [*first["tasks"], *salts, *map(tenant_digest, salts)] if name.encode() in said]
    # Python's own hashes with the seed that all these processes have.
    assert not [written for written in written_down([hash(name) for name in first["tasks"]]) if written in said]


def test_upstream_heeds_salts_and_tags_where_the_connector_relies_on_it():
    """vLLM 0.32, LMCache 0.5.6. For `RequestIsolation` and `SchedulerSide.obstacle_to_tags`; nothing of ours."""
    import torch
    from lmcache.integration.vllm import vllm_v1_adapter
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from vllm.v1.core import kv_cache_utils

    def key(**tags: str) -> CacheEngineKey:
        return CacheEngineKey("m", 1, 0, 7, torch.bfloat16, {f"lmcache.tag.{name}": tag for name, tag in tags.items()})

    keys = [key(), key(t="1"), key(t="2"), key(a="x", t="1")]
    assert len(set(keys)) == len({one.to_string() for one in keys}) == 4
    for one in keys:
        assert CacheEngineKey.from_string(one.to_string()) == one == CacheEngineKey.from_dict(one.to_dict())
    assert key() == CacheEngineKey("m", 1, 0, 7, torch.bfloat16, {"lmcache.skip_save": True, "other": 1})
    # A key's own text ends with the last tag, so that no other tag can stand in for it.
    assert key(a="x", t="1").to_string().endswith("@a%x@t%1")

    source = " ".join(inspect.getsource(vllm_v1_adapter.LMCacheConnectorV1Impl).split())
    assert source.count("request_configs=request.request_configs,") == 2  # retrieve and store
    assert source.count("request_configs=request_configs,") == 1  # lookup
    settings = LMCacheEngineConfig.from_env()
    for name in ("use_layerwise", "enable_blending", "enable_p2p", "external_lookup_client", "extra_config"):
        assert hasattr(settings, name), name
    assert 'self.cache_salt: str = request.cache_salt or ""' in inspect.getsource(LMCacheMPRequestTracker.__init__)
    assert '("cache_salt", request.cache_salt)' in inspect.getsource(kv_cache_utils.generate_block_hash_extra_keys)
