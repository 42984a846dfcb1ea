"""What admission and deduplication cost, as ratios to LMCache's own lookup and store in the same run.

    python benchmarks/admission_overhead.py [--prompt-tokens 8192 33234] [--requests 40] [--hash sha256_cbor|builtin]

The defaults are the paper's: prompts up to its mean of 33,234 tokens, chunks of 1,024, keys by sha256_cbor.

A real vLLM engine, its scheduler and its worker in processes of their own as in `vllm serve`, on whatever device is
there, serves agents whose prompts grow, one request at a time: every lookup starts, and every decision follows it, with
caches that an engine step has filled with other things. What the connector remembers is as full as after hours.

    lookup      LMCache's own
    decision    what stands between that and the lookup's answer, with and without a task id from the client
    in all      everything that the connector adds to a request in the scheduler: the decision, what is checked before
                the lookup, what follows once the request is scheduled, and counting it all
    checks      the key checks inside a store

Medians over requests, of seconds and of each request's own ratio: a machine's noise hits both sides of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from quiet import QUIET

#: Seconds by name.
Row: TypeAlias = "dict[str, float]"

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
        longest = max(arguments.prompt_tokens) + GROWTH_TOKENS * _turns(arguments.requests) // 2
        engine = _start_engine(Path(directory), longest + 1024, arguments.hash)
        timings = Timings(Path(directory))
        print(
            f"{'client':<12}{'prompt tokens':>14}{'lookup':>12}{'decision':>12}{'ratio':>9}{'in all':>12}{'ratio':>9}"
            f"{'store':>13}{'checks':>12}{'ratio':>9}"
        )
        for prompt_tokens in arguments.prompt_tokens:
            for labelled in (True, False):
                _serve(engine, prompt_tokens, arguments.requests, labelled)
                lookups, stores = timings.new_rows()
                print(
                    f"{'labelled' if labelled else 'unlabelled':<12}{prompt_tokens:>14,}"
                    f"{_median(lookups, 'lookup') * 1e6:>9.0f} us"
                    f"{_cost(lookups, 'decision', 'lookup')}{_cost(lookups, 'in all', 'lookup')}"
                    f"{_median(stores, 'store') * 1e3:>10.2f} ms{_cost(stores, 'checks', 'store')}",
                    flush=True,
                )
        # Left to the interpreter's exit, the engine's processes may never end.
        engine.llm_engine.engine_core.shutdown(timeout=10)


def _start_engine(directory: Path, max_tokens: int, key_hash: str) -> Any:
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
        max_model_len=max_tokens,
        num_gpu_blocks_override=2 * max_tokens // 128,
        max_num_seqs=AGENTS,
        kv_transfer_config={
            "kv_connector": "TimedConnector",
            "kv_connector_module_path": "timed_connector",
            "kv_role": "kv_both",
        },
    )


class Timings:
    """What the engine's processes write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}

    def new_rows(self) -> tuple[list[Row], list[Row]]:
        """Lookups and stores since it was last asked."""
        rows: list[Row] = []
        for path in self._directory.glob("*.jsonl"):
            written = path.read_bytes()[self._read_bytes.get(path, 0) :]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(written)
            rows += (json.loads(line) for line in written.splitlines())
        lookups = [row for row in rows if "lookup" in row]
        for row in lookups:
            row["in all"] = row["whole"] - row["lookup"] + row["scheduled"] + row["counted"]
        return lookups, [row for row in rows if "store" in row]


def _median(rows: list[Row], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _cost(rows: list[Row], name: str, of: str) -> str:
    ratio = statistics.median(row[name] / row[of] for row in rows)
    return f"{_median(rows, name) * 1e6:>9.1f} us{ratio:>9.2%}"


def _turns(requests: int) -> int:
    return -(-requests // AGENTS)


def _serve(engine: Any, prompt_tokens: int, requests: int, labelled: bool) -> None:
    """Agents take turns; every prompt extends its agent's previous one by 700 tokens, `prompt_tokens` on average."""
    from vllm import SamplingParams

    generator = random.Random(prompt_tokens + labelled)
    first_tokens = max(256, prompt_tokens - GROWTH_TOKENS * (_turns(requests) + 1) // 2)
    histories = [_tokens(generator, first_tokens) for _ in range(AGENTS)]
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
