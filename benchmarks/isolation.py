"""What a tenant's clock tells of another tenant's prompts: `python benchmarks/isolation.py [--prompt-tokens 8192]`.

Tenant A sends a prompt; then B sends it, with a salt of its own or with A's, and its time to the first token is held
against that of a prompt which nobody has sent. Both times A's KV lies in both tiers. A real engine on whatever device
is there; one request at a time, the three kinds in turns; medians of ratios within a turn, as a machine's noise hits
both sides of those, and the quartiles that say what they are worth.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quiet import QUIET

CHUNK_TOKENS = 256
VOCABULARY = 4096
ALONE, OTHER_SALT, SAME_SALT = "alone", "after A, other salt", "after A, same salt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30, help="prompts of each kind")
    parser.add_argument("--from-tier", action="store_true", help="empty the GPU's cache in between, not the CPU tier")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        llm = _start_engine(Path(directory), arguments.prompt_tokens)
        seconds = _measure(llm, arguments.prompt_tokens, arguments.rounds, arguments.from_tier)
    print(f"{'B sends a prompt':<22}{'first token':>13}{'to alone':>12}{'quartiles':>16}")
    for kind, samples in seconds.items():
        ratios = [sample / alone for sample, alone in zip(samples, seconds[ALONE], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"{kind:<22}{statistics.median(samples) * 1e3:>10.1f} ms{statistics.median(ratios):>12.3f}"
            f"{low:>9.3f}–{high:.3f}",
            flush=True,
        )


def _start_engine(directory: Path, prompt_tokens: int) -> Any:
    os.environ.update(
        QUIET,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{(os.cpu_count() or 1) - 1}",
        LMCACHE_CHUNK_SIZE=str(CHUNK_TOKENS),
        LMCACHE_MAX_LOCAL_CPU_SIZE="1",
    )
    from vllm import LLM

    from efficient_lmcache.replay.model import create_model

    return LLM(
        str(create_model(directory / "model", vocab_size=VOCABULARY)),
        skip_tokenizer_init=True,
        max_model_len=prompt_tokens + 1024,
        block_size=128,
        # Of A's KV and B's: what B measures must not be A's eviction.
        num_gpu_blocks_override=4 * (prompt_tokens // 128 + 8),
        kv_transfer_config={"kv_connector": "EfficientLMCacheConnector", "kv_role": "kv_both"},
    )


def _measure(llm: Any, prompt_tokens: int, rounds: int, from_tier: bool) -> dict[str, list[float]]:
    """Seconds to B's first token."""
    seconds: dict[str, list[float]] = {ALONE: [], OTHER_SALT: [], SAME_SALT: []}
    generator = random.Random(0)
    for turn in range(rounds + 1):
        for kind, samples in seconds.items():
            prompt = [generator.randrange(VOCABULARY) for _ in range(prompt_tokens)]
            # In every kind the engine has just served A.
            sent_by_a = [generator.randrange(VOCABULARY) for _ in prompt] if kind == ALONE else prompt
            _first_token_s(llm, sent_by_a, "tenant-a")
            if from_tier:
                llm.reset_prefix_cache()
            elapsed_s = _first_token_s(llm, prompt, "tenant-a" if kind == SAME_SALT else "tenant-b")
            if turn:  # the first round warms up
                samples.append(elapsed_s)
    return seconds


def _first_token_s(llm: Any, prompt: list[int], salt: str) -> float:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    started_s = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], params, use_tqdm=False)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
