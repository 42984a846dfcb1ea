"""What admission and deduplication cost, as ratios to LMCache's own lookup and store in the same run.

    python benchmarks/admission_overhead.py [--prompt-tokens 8192 33234] [--requests 40] [--hash sha256_cbor|builtin]

The defaults are the paper's: prompts up to its mean of 33,234 tokens, chunks of 1,024, keys by sha256_cbor.

A real vLLM engine, its scheduler and its worker in processes of their own as in `vllm serve`, on whatever device is
there, serves agents whose prompts grow. Each request's first lookup and its decision are timed back to back, with and
without a task id from the client, and each store with the key checks inside it. Medians; a machine's noise hits both
sides of a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quiet import QUIET

CHUNK_TOKENS = 1024
GROWTH_TOKENS = 700
AGENTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[8192, 33_234])
    parser.add_argument("--requests", type=int, default=40, help="per prompt length and kind of client")
    parser.add_argument("--hash", default="sha256_cbor", help="LMCache's pre_caching_hash_algorithm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        engine = _start_engine(Path(directory), max(arguments.prompt_tokens), arguments.hash)
        timings = Timings(Path(directory))
        print(
            f"{'client':<12}{'prompt tokens':>14}{'lookup':>12}{'decision':>12}{'ratio':>9}"
            f"   {'store':>10}{'checks':>11}{'ratio':>9}"
        )
        for prompt_tokens in arguments.prompt_tokens:
            for labelled in (True, False):
                _serve(engine, prompt_tokens, arguments.requests, labelled)
                seconds = timings.medians_s()
                lookup, decision, store, checks = (seconds[name] for name in ("lookup", "decision", "store", "checks"))
                print(
                    f"{'labelled' if labelled else 'unlabelled':<12}{prompt_tokens:>14,}"
                    f"{lookup * 1e6:>9.0f} us{decision * 1e6:>9.1f} us{decision / lookup:>9.2%}"
                    f"   {store * 1e3:>7.2f} ms{checks * 1e6:>8.1f} us{checks / store:>9.2%}",
                    flush=True,
                )
        # Left to the interpreter's exit, the engine's processes may never end.
        engine.llm_engine.engine_core.shutdown(timeout=10)


def _start_engine(directory: Path, prompt_tokens: int, key_hash: str) -> Any:
    os.environ.update(
        QUIET,
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        TIMINGS_DIR=str(directory),
        VLLM_CPU_KVCACHE_SPACE="1",
        LMCACHE_CHUNK_SIZE=str(CHUNK_TOKENS),
        LMCACHE_MAX_LOCAL_CPU_SIZE="2",
        LMCACHE_PRE_CACHING_HASH_ALGORITHM=key_hash,
        PYTHONHASHSEED="0",
    )
    from vllm import LLM

    from efficient_lmcache.replay.model import create_model

    model = create_model(directory / "model", vocab_size=4096)
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=prompt_tokens + 1024,
        num_gpu_blocks_override=2 * (prompt_tokens + 1024) // 128,
        max_num_seqs=AGENTS,
        kv_transfer_config={
            "kv_connector": "TimedConnector",
            "kv_connector_module_path": "timed_connector",
            "kv_role": "kv_both",
        },
    )


class Timings:
    """What the engine's processes wrote since it was last asked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}

    def medians_s(self) -> dict[str, float]:
        seconds: dict[str, list[float]] = {}
        for row in self._new_rows():
            for name, value in row.items():
                seconds.setdefault(name, []).append(value)
        return {name: statistics.median(values) for name, values in seconds.items()}

    def _new_rows(self) -> Iterator[dict[str, float]]:
        for path in self._directory.glob("*.jsonl"):
            rows = path.read_bytes()[self._read_bytes.get(path, 0) :]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(rows)
            yield from (json.loads(line) for line in rows.splitlines())


def _serve(engine: Any, prompt_tokens: int, requests: int, labelled: bool) -> None:
    """Agents take turns, all near `prompt_tokens`; every prompt extends its agent's previous one by 700 tokens."""
    from vllm import SamplingParams

    generator = random.Random(prompt_tokens + labelled)
    turns = -(-requests // AGENTS)
    histories = [_tokens(generator, max(256, prompt_tokens - GROWTH_TOKENS * turns)) for _ in range(AGENTS)]
    for call in range(requests):
        agent = call % AGENTS
        histories[agent] += _tokens(generator, GROWTH_TOKENS)
        label = {"kv_transfer_params": {"efficient_lmcache.task_id": f"agent-{agent}"}} if labelled else None
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True, extra_args=label)
        engine.generate([{"prompt_token_ids": histories[agent]}], params, use_tqdm=False)


def _tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(4096) for _ in range(count)]


if __name__ == "__main__":
    main()
