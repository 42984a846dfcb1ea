"""What admission and deduplication cost, as ratios to LMCache's own lookup and store in the same run.

    python benchmarks/admission_overhead.py [--prompt-tokens 8192 33234] [--requests 40] [--hash sha256_cbor|builtin]

The defaults are the paper's: prompts up to its mean of 33,234 tokens, chunks of 1,024, keys by sha256_cbor.

A real in-process vLLM engine on whatever device is there serves agents whose prompts grow; each request's first lookup
and its decision are timed back to back, with and without a task id from the client, and each store with the key checks
inside it. Medians; a machine's noise hits both sides of a ratio.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

CHUNK_TOKENS = 1024
GROWTH_TOKENS = 700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[8192, 33_234])
    parser.add_argument("--requests", type=int, default=40, help="per prompt length and kind of client")
    parser.add_argument("--hash", default="sha256_cbor", help="LMCache's pre_caching_hash_algorithm")
    arguments = parser.parse_args()
    engine = _start_engine(max(arguments.prompt_tokens), arguments.hash)
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = engine.llm_engine.engine_core.engine_core.scheduler.connector
    offload = get_kv_transfer_group()._offload
    lmcache = get_kv_transfer_group()._lmcache_engine.lmcache_engine
    seconds: dict[str, list[float]] = {"lookup": [], "decision": [], "store": [], "checks": []}
    _time_first_lookups(scheduler, seconds)
    _time_stores(lmcache, offload, seconds)
    print(
        f"{'client':<12}{'prompt tokens':>14}{'lookup':>12}{'decision':>12}{'ratio':>9}"
        f"   {'store':>10}{'checks':>11}{'ratio':>9}"
    )
    for prompt_tokens in arguments.prompt_tokens:
        for labelled in (True, False):
            for samples in seconds.values():
                samples.clear()
            _serve(engine, prompt_tokens, arguments.requests, labelled)
            lookup, decision, store, checks = (statistics.median(seconds[name]) for name in seconds)
            print(
                f"{'labelled' if labelled else 'unlabelled':<12}{prompt_tokens:>14,}"
                f"{lookup * 1e6:>9.0f} us{decision * 1e6:>9.1f} us{decision / lookup:>9.2%}"
                f"   {store * 1e3:>7.2f} ms{checks * 1e6:>8.1f} us{checks / store:>9.2%}",
                flush=True,
            )
    os._exit(0)  # LMCache's threads would keep the interpreter from ending


def _start_engine(prompt_tokens: int, key_hash: str) -> Any:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        LMCACHE_CHUNK_SIZE=str(CHUNK_TOKENS),
        LMCACHE_MAX_LOCAL_CPU_SIZE="2",
        LMCACHE_PRE_CACHING_HASH_ALGORITHM=key_hash,
        LMCACHE_TRACK_USAGE="false",
        LMCACHE_DISABLE_BANNER="1",
        LMCACHE_LOG_LEVEL="ERROR",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM

    from efficient_lmcache.replay.model import create_model

    model = create_model(tempfile.mkdtemp(), vocab_size=4096)
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=prompt_tokens + 1024,
        num_gpu_blocks_override=2 * (prompt_tokens + 1024) // 128,
        max_num_seqs=4,
        kv_transfer_config={"kv_connector": "EfficientLMCacheConnector", "kv_role": "kv_both"},
    )


def _time_first_lookups(connector: Any, seconds: dict[str, list[float]]) -> None:
    """Split a first lookup into LMCache's part and the decision that follows it."""
    lookup, decide = connector._lmcache_engine.get_num_new_matched_tokens, connector._admission.on_lookup
    latest_s = 0.0

    def timed_lookup(*args: Any) -> Any:
        nonlocal latest_s
        start_s = time.perf_counter()
        result = lookup(*args)
        latest_s = time.perf_counter() - start_s
        return result

    def timed_decision(request: Any, host_match_tokens: Any) -> None:
        if request.request_id in connector._admission._decided:
            return decide(request, host_match_tokens)
        start_s = time.perf_counter()
        decide(request, host_match_tokens)
        seconds["decision"].append(time.perf_counter() - start_s)
        seconds["lookup"].append(latest_s)

    connector._lmcache_engine.get_num_new_matched_tokens = timed_lookup
    connector._admission.on_lookup = timed_decision


def _time_stores(lmcache: Any, offload: Any, seconds: dict[str, list[float]]) -> None:
    """Split a store into all of it and the key checks inside it."""
    store: Callable[..., None] = lmcache.store
    contains = offload._lmcache.contains
    checks_s = 0.0

    def timed_contains(key: Any) -> bool:
        nonlocal checks_s
        start_s = time.perf_counter()
        held = contains(key)
        checks_s += time.perf_counter() - start_s
        return bool(held)

    def timed_store(*args: Any, **kwargs: Any) -> None:
        nonlocal checks_s
        checks_s, start_s = 0.0, time.perf_counter()
        store(*args, **kwargs)
        seconds["store"].append(time.perf_counter() - start_s)
        seconds["checks"].append(checks_s)

    offload._lmcache.contains = timed_contains
    lmcache.store = timed_store


def _serve(engine: Any, prompt_tokens: int, requests: int, labelled: bool) -> None:
    """Four agents take turns, all near `prompt_tokens`; every prompt extends its agent's previous one by 700 tokens."""
    from vllm import SamplingParams

    generator = random.Random(prompt_tokens + labelled)
    turns = -(-requests // 4)
    histories = [_tokens(generator, max(256, prompt_tokens - GROWTH_TOKENS * turns)) for _ in range(4)]
    for call in range(requests):
        agent = call % 4
        histories[agent] += _tokens(generator, GROWTH_TOKENS)
        label = {"kv_transfer_params": {"efficient_lmcache.task_id": f"agent-{agent}"}} if labelled else None
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True, extra_args=label)
        engine.generate([{"prompt_token_ids": histories[agent]}], params, use_tqdm=False)


def _tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(4096) for _ in range(count)]


if __name__ == "__main__":
    main()
