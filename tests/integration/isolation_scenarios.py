"""What tenants see of each other in real engines; `test_isolation.py` runs each in a fresh process and judges it."""

from __future__ import annotations

import os
import time
from typing import Any

from engine import CHUNK_TOKENS, Engine, random_prompts

TENANTS = {"a": "salt-of-tenant-a", "b": "salt-of-tenant-b", "c": "salt-of-tenant-c", "nobody": None}
PROMPT_TOKENS = 4 * CHUNK_TOKENS + 30


class Clients:
    """Tenants of one engine, one request at a time.

    Attributes:
        prompts, tasks: whatever was sent.
        block_hashes: vLLM's, of what was sent.
    """

    def __init__(self, engine: Engine) -> None:
        self.prompts: list[list[int]] = []
        self.tasks: list[str] = []
        self.block_hashes: set[str] = set()
        self._engine = engine
        admission = engine.scheduler_connector._admission
        decide = admission.on_lookup

        def note(request: Any, host_match_tokens: Any) -> None:
            self.block_hashes |= {bytes(block).hex() for block in request.block_hashes}
            decide(request, host_match_tokens)

        admission.on_lookup = note

    def send(self, tenant: str, prompt: list[int], **transfer_params: Any) -> dict[str, Any]:
        """One request; whatever its client or /metrics can tell of what was there before it."""
        from vllm import SamplingParams

        self.prompts.append(prompt)
        if "efficient_lmcache.task_id" in transfer_params:
            self.tasks.append(transfer_params["efficient_lmcache.task_id"])
        extra_args = {"kv_transfer_params": transfer_params} if transfer_params else None
        params = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra_args)
        salt = TENANTS[tenant]
        asked = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        before = _counters()
        output = self._engine.llm.generate([asked], params, use_tqdm=False)[0]
        after = _counters()
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached_tokens": output.num_cached_tokens,
            "counters": {
                name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)
            },
        }


def _counters() -> dict[str, float]:
    """All that vLLM's /metrics counts, times left out."""
    from prometheus_client import REGISTRY

    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if family.type == "counter"
        and sample.name.endswith("_total")
        and sample.name.startswith(("vllm:", "efficient"))
    }


def _start(model: str, remote_url: str, **options: Any) -> tuple[Engine, Clients]:
    engine = Engine(model, host_mib=64, remote_url=remote_url, options=options)
    return engine, Clients(engine)


def first_engine(model: str, remote_url: str, telemetry_url: str) -> dict[str, Any]:
    """Tenants one after another, then all at once."""
    engine, clients = _start(
        model,
        remote_url,
        **{"telemetry.transport": "redis", "telemetry.redis_url": telemetry_url, "report_interval_s": 0.1},
    )
    result = {
        "views": _what_b_sees(engine, clients),
        "own": _what_a_has_of_its_own(engine, clients),
        "tags": _with_tags_of_ones_own(engine, clients),
        "without_lmcache": _where_tags_are_not_heeded(engine, clients),
    }
    _load(engine, clients)
    keys = list(engine.tier.hot_cache)
    shared = clients.prompts[0][: 4 * CHUNK_TOKENS]
    _wait_for_remote_writes(remote_url, {key.to_string() for key in keys})
    return {
        **result,
        "shared_prompt": clients.prompts[0],
        "keys": [key.to_string() for key in keys],
        "lmcaches_own_keys": [key.to_string() for _, _, key in engine.lmcache.token_database.process_tokens(shared)],
        "prompts": clients.prompts,
        "tasks": clients.tasks,
        "block_hashes": sorted(clients.block_hashes),
        "chunk_hashes": sorted({key.chunk_hash for key in keys}),
        "state": engine.state_left(),
    }


def second_engine(model: str, remote_url: str, shared_prompt: list[int]) -> dict[str, Any]:
    """What tenants of another engine find in the remote tier."""
    os.environ["LMCACHE_ENABLE_ASYNC_LOADING"] = "True"
    engine, clients = _start(model, remote_url)
    seen = {}
    for tenant in ("c", "a", "nobody"):
        seen[tenant] = clients.send(tenant, shared_prompt)
        engine.forget_gpu()
    return {"seen": seen, "state": engine.state_left()}


def _what_b_sees(engine: Engine, clients: Clients) -> dict[str, Any]:
    in_gpu, in_tier, unknown = random_prompts(3, PROMPT_TOKENS)
    clients.send("a", in_gpu)
    views = {"A's is in both tiers": clients.send("b", in_gpu)}
    clients.send("a", in_tier)
    engine.forget_gpu()
    return {**views, "A's is in the CPU tier": clients.send("b", in_tier), "nobody sent it": clients.send("b", unknown)}


def _what_a_has_of_its_own(engine: Engine, clients: Clients) -> dict[str, Any]:
    prompt = clients.prompts[0]
    own = {}
    for tenant in ("a", "b", "nobody", "nobody"):
        engine.forget_gpu()
        own[tenant + ", again" * (tenant in own)] = clients.send(tenant, prompt)
    return own


def _with_tags_of_ones_own(engine: Engine, clients: Clients) -> dict[str, Any]:
    from efficient_lmcache.connector.isolation import TENANT_TAG_KEY
    from efficient_lmcache.connector.tenants import tenant_digest

    salt = TENANTS["a"]
    assert salt is not None
    tagged, stolen = random_prompts(2, PROMPT_TOKENS, seed=1)
    team = {"lmcache.tag.team": "x"}
    seen = {}
    for name, tenant, tags, prompt in (
        ("first", "a", team, tagged),
        ("same tag", "a", team, tagged),
        ("without the tag", "a", {}, tagged),
        ("another tenant's", "nobody", team, tagged),
        ("unsalted, same tag", "nobody", team, tagged),
        ("A's own", "a", {}, stolen),
        ("a stolen tag", "nobody", {TENANT_TAG_KEY: tenant_digest(salt)}, stolen),
    ):
        engine.forget_gpu()
        seen[name] = clients.send(tenant, prompt, **tags)
    return seen


def _where_tags_are_not_heeded(engine: Engine, clients: Clients) -> dict[str, Any]:
    """A fake: on the CPU there is no configuration of LMCache that loses tags."""
    from efficient_lmcache.connector.isolation import RequestIsolation

    connector = engine.scheduler_connector
    heeded, connector._isolation = connector._isolation, RequestIsolation("a test says so")
    [prompt] = random_prompts(1, PROMPT_TOKENS, seed=2)
    seen = {}
    for name, tenant in (
        ("salted", "a"),
        ("salted, again", "a"),
        ("unsalted", "nobody"),
        ("unsalted, again", "nobody"),
    ):
        engine.forget_gpu()
        seen[name] = clients.send(tenant, prompt)
    remembered = len(connector._isolation.without_lmcache)
    connector._isolation = heeded
    return {"seen": seen, "remembered": remembered}


def _load(engine: Engine, clients: Clients) -> None:
    """Named and unnamed tasks of every tenant in turn."""
    for turn in range(24):
        tenant = list(TENANTS)[turn % len(TENANTS)]
        [prompt] = random_prompts(1, 300 + 10 * turn, seed=100 + turn)
        label = {"efficient_lmcache.task_id": f"label-{tenant}-{turn}"} if turn // len(TENANTS) % 2 else {}
        clients.send(tenant, prompt, **label)
    time.sleep(1.0)  # the last observation comes after the last lookup


def _wait_for_remote_writes(remote_url: str, keys: set[str]) -> None:
    """LMCache sends to the remote tier in the background."""
    import redis
    from redis_process import wait_until

    client = redis.Redis.from_url(remote_url)

    def all_there() -> bool:
        names = {name.decode() for name in client.scan_iter(count=1000)}
        return all(any(name.startswith(key) for name in names) for key in keys)

    wait_until(all_there, "the remote tier")
