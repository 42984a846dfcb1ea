"""A real in-process vLLM engine with our connector, for scenarios that look inside it."""

from __future__ import annotations

import os
import random
from typing import Any

CHUNK_TOKENS = 256
VOCABULARY = 4096


def configure_environment(host_mib: float, remote_url: str | None = None, ranks: int = 1) -> None:
    """Set what vLLM and LMCache read from the environment; call before importing either."""
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=(
            ",".join(cpus) if ranks == 1 else "|".join(cpus[rank % len(cpus)] for rank in range(ranks))
        ),
        LMCACHE_LOG_LEVEL="WARNING",
        LMCACHE_CHUNK_SIZE=str(CHUNK_TOKENS),
        LMCACHE_LOCAL_CPU="True",
        LMCACHE_MAX_LOCAL_CPU_SIZE=str(host_mib / 1024),
    )
    if remote_url is not None:
        os.environ["LMCACHE_REMOTE_URL"] = remote_url
        os.environ["LMCACHE_REMOTE_SERDE"] = "naive"


class Engine:
    """vLLM, its scheduler's and its worker's connector, and LMCache's engine, all in this process."""

    def __init__(
        self,
        model: str,
        *,
        host_mib: float = 16,
        connector: str = "EfficientLMCacheConnector",
        options: dict[str, Any] | None = None,
        remote_url: str | None = None,
        gpu_blocks: int = 80,
        max_num_seqs: int = 8,
        max_model_len: int = 4096,
        transfer_config: dict[str, Any] | None = None,
        compile_model: bool = False,
        llm_options: dict[str, Any] | None = None,
        ranks: int = 1,
    ) -> None:
        configure_environment(host_mib, remote_url, ranks)
        from vllm import LLM

        self.llm = LLM(
            model,
            tensor_parallel_size=ranks,
            skip_tokenizer_init=True,
            block_size=128,
            num_gpu_blocks_override=gpu_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            disable_log_stats=False,
            enforce_eager=not compile_model,  # compiling takes longer than most scenarios
            **(llm_options or {}),
            kv_transfer_config={
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {f"efficient.{key}": value for key, value in (options or {}).items()},
                **(transfer_config or {}),
            },
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.scheduler_connector = self.scheduler.connector
        self._find_worker()

    def _find_worker(self) -> None:
        """Not where each worker, or LMCache, is in a process of its own."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker_connector = get_kv_transfer_group()
        self.lmcache = self.worker_connector._lmcache_engine.lmcache_engine
        self.tier = self.lmcache.storage_manager.local_cpu_backend

    def generate(self, prompts: list[list[int]], max_tokens: int = 4, task_ids: list[str] | None = None) -> list[Any]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"efficient_lmcache.task_id": task_ids[i]}} if task_ids else None,
            )
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, so that only the host tier can restore."""
        assert self.llm.reset_prefix_cache()

    def metrics(self) -> dict[str, float]:
        """vLLM's own metrics, as /metrics shows them."""
        from prometheus_client import REGISTRY

        return {
            sample.name + ("" if "outcome" not in sample.labels else f"[{sample.labels['outcome']}]"): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if family.name.startswith(("efficient_lmcache:", "vllm:num_preemptions"))
        }

    def state_left(self) -> dict[str, int]:
        """Entries that the connector and LMCache keep per request, on either side."""
        impl = self.scheduler_connector._lmcache_engine
        admission = getattr(self.scheduler_connector, "_admission", None)
        return {
            "decisions": len(admission) if admission is not None else 0,
            "load_specs": len(impl.load_specs),
            "lookups": len(impl.lookup_client.reqs_status),
            "priorities": len(impl._requests_priority),
            "lookup_pins": len(self.lmcache.lookup_pins),
            "pinned_chunks": sum(chunk.is_pinned for chunk in self.tier.hot_cache.values()),
        }


def metric(name: str) -> float:
    """A sample of this process's metrics by its full name, summed over its labels."""
    from prometheus_client import REGISTRY

    return sum(sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name)


def random_prompts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]
