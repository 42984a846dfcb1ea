"""Every vLLM internal that the connector reads or sets (vLLM 0.32). `tests/integration/test_upstream.py` guards it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from efficient_lmcache.connector.tenants import tenant_digest
from efficient_lmcache.core.footprint import KVFootprint, asks_for_8_bits

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

TASK_ID_KEY = "efficient_lmcache.task_id"
#: A longer name is replaced by its digest: names are remembered, and may be logged.
MAX_TASK_CHARACTERS = 256
_NO_PARAMS: Mapping[str, Any] = {}


def adopt_logging() -> None:
    """Log as vLLM does: it sets up its own loggers only, and what others say below a warning is lost."""
    vllm_logger, ours = logging.getLogger("vllm"), logging.getLogger("efficient_lmcache")
    if not ours.handlers and vllm_logger.handlers:
        ours.handlers = list(vllm_logger.handlers)
        ours.setLevel(vllm_logger.level)
        ours.propagate = False


def stage_bytes_per_token(vllm_config: VllmConfig) -> list[int]:
    """beta on the ranks of every pipeline stage, as the engine really lays KV out: their layers and heads, in the KV
    cache's own type."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, parallel = vllm_config.model_config, copy.copy(vllm_config.parallel_config)
    latent = bool(model.use_mla)
    cache_dtype = vllm_config.cache_config.cache_dtype
    # What compressed-tensors asks for, vLLM learns with the weights: in the workers, and not in their scheduler.
    if cache_dtype == "auto" and asks_for_8_bits(getattr(model.hf_config, "quantization_config", None)):
        cache_dtype = "fp8"
    stages = []
    for stage in range(parallel.pipeline_parallel_size):
        parallel.rank = stage * parallel.tensor_parallel_size
        footprint = KVFootprint(
            layers=model.get_num_layers(parallel),
            # What vLLM returns is already per rank, replication included.
            kv_heads=1 if latent else model.get_num_kv_heads(parallel),
            head_dim=model.get_head_size(),
            element_bytes=kv_cache_dtype_str_to_dtype(cache_dtype, model).itemsize,
            latent=latent,
        )
        stages.append(footprint.bytes_per_token_per_rank())
    return stages


def grouped_bytes_per_token(kv_cache_config: KVCacheConfig, tokens_per_block: Sequence[int]) -> int:
    """beta on the ranks of the first stage where layers of several kinds form groups of KV caches: attention to
    everything, to a window, a recurrent state.

    Args:
        tokens_per_block: of each group; 0 for one that is not cached.
    """
    bytes_per_token = 0.0
    for group, tokens in zip(kv_cache_config.kv_cache_groups, tokens_per_block, strict=True):
        if tokens:
            bytes_per_token += len(group.layer_names) * group.kv_cache_spec.page_size_bytes / tokens
    return round(bytes_per_token)


def is_first_rank(vllm_config: VllmConfig) -> bool:
    """True in the scheduler, and in the first rank's worker, which is on its machine."""
    return vllm_config.parallel_config.rank == 0


def speaks_for_all_ranks(vllm_config: VllmConfig) -> bool:
    """Whether this worker's CPU tier stands for those of all ranks.

    It is the first one of a stage with most layers: such a tier has room for the fewest tokens, and what it has lost no
    other one can make up for. Stages differ by a layer where they do not divide the layers. With MLA, LMCache stores on
    the first rank.
    """
    stages = stage_bytes_per_token(vllm_config)
    stage = 0 if vllm_config.model_config.use_mla else stages.index(max(stages))
    parallel = vllm_config.parallel_config
    return bool(parallel.rank == stage * parallel.tensor_parallel_size)


def engine_id(vllm_config: VllmConfig) -> str:
    """Shared by the scheduler and the workers of one engine, different for every start of it.

    A user may fix `engine_id`; vLLM draws `instance_id` anew each time.
    """
    return f"{_transfer_config(vllm_config).engine_id}/{vllm_config.instance_id}"


def extra_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """`kv_connector_extra_config` as the user gave it."""
    return _transfer_config(vllm_config).kv_connector_extra_config or {}


def hash_block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens per block hash of `Request.block_hashes`; several groups of KV caches share hashes of smaller blocks."""
    assert kv_cache_config.hash_block_size is not None, "vLLM made a connector before it knew its block hashes"
    return kv_cache_config.hash_block_size


def hands_over_kv(vllm_config: VllmConfig) -> bool:
    """Whether stores are another engine's input (disaggregated prefill) and not ours to decline."""
    return _transfer_config(vllm_config).kv_role != "kv_both"


def fails_lost_restores(vllm_config: VllmConfig) -> bool:
    """Whether a request fails when a chunk that its lookup found is gone at its restore; else it is computed."""
    return _transfer_config(vllm_config).kv_load_failure_policy == "fail"


def task_and_tenant(request: Request) -> tuple[str, str | None] | None:
    """The task that the client named, if it did, and whose it is. An empty name is what clients send that have none."""
    transfer_params = request.kv_transfer_params
    task = transfer_params.get(TASK_ID_KEY) if transfer_params else None
    if task is None or task == "":
        return None
    name = task if type(task) is str else str(task)
    if len(name) > MAX_TASK_CHARACTERS:
        name = f"long-{hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
    return name, tenant_digest(request.cache_salt) if request.cache_salt else None


def qualified_task(task: str, tenant: str | None) -> str:
    """One name, as two tenants may use the same ones."""
    return task if tenant is None else f"{task}@{tenant}"


def prompt(request: Request) -> tuple[Sequence[Hashable], Sequence[int], str | None]:
    """What tells whose prompt this is; nothing is copied.

    Returns:
        The chained hashes of the request's full blocks, salted by tenant where the client gave a salt; the prompt's
        token ids, none where the client sent embeddings instead; the tenant's salt.
    """
    return request.block_hashes, request.prompt_token_ids or (), request.cache_salt


def adapter(request: Request) -> tuple[str, str] | None:
    """Name and path of the request's LoRA adapter, which tell adapters apart in vLLM's own block hashes too."""
    lora = request.lora_request
    return (lora.lora_name, lora.lora_path) if lora is not None else None


def sends_embeddings(request: Request) -> bool:
    """Whether some of the prompt came as embeddings; its token ids say nothing of them."""
    return request.prompt_embeds is not None


def resumed(scheduled: SchedulerOutput) -> Collection[str]:
    """Requests that go on in this step after a preemption."""
    return scheduled.scheduled_cached_reqs.resumed_req_ids


def with_token_ids(scheduled: SchedulerOutput) -> SchedulerOutput:
    """The same step, where a new request of embeddings alone has zeros for token ids, as in vLLM's `all_token_ids`."""
    if all(new.prompt_token_ids is not None for new in scheduled.scheduled_new_reqs):
        return scheduled
    seen = copy.copy(scheduled)
    seen.scheduled_new_reqs = [
        dataclasses.replace(new, prompt_token_ids=[0] * new.prompt_len) if new.prompt_token_ids is None else new
        for new in scheduled.scheduled_new_reqs
    ]
    return seen


def kv_transfer_params(request: Request) -> Mapping[str, Any]:
    """The transfer parameters as they will reach the worker."""
    params = request.sampling_params
    given = (params.extra_args or _NO_PARAMS).get("kv_transfer_params") if params is not None else None
    return given if isinstance(given, dict) else _NO_PARAMS


def set_kv_transfer_param(request: Request, key: str, value: Any) -> None:
    """Set one transfer parameter of this request alone, as its last; None takes it away.

    The sampling parameters are copied: offline users hand one object to many requests.
    """
    params = copy.copy(request.sampling_params)
    assert params is not None, "pooling requests are not decided on"
    extra_args = dict(params.extra_args or {})
    transfer_params = dict(extra_args.get("kv_transfer_params") or {})
    transfer_params.pop(key, None)
    if value is not None:
        transfer_params[key] = value
    extra_args["kv_transfer_params"] = transfer_params
    params.extra_args = extra_args
    request.sampling_params = params


def drop_kv_transfer_params(request: Request, names: Collection[str]) -> None:
    """Take parameters away, from what the scheduler reads and from what reaches the worker."""
    request.kv_transfer_params = {
        name: value for name, value in (request.kv_transfer_params or {}).items() if name not in names
    }
    if request.sampling_params is not None:
        for name in names:
            set_kv_transfer_param(request, name, None)


def _transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    config = vllm_config.kv_transfer_config
    assert config is not None, "vLLM made a connector without a transfer configuration"
    return config
