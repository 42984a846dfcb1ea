"""Requests that users of LMCache have reported; `test_odd_requests.py` runs each scenario in a fresh process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import CHUNK_TOKENS, Engine, configure_environment, metric, random_prompts

RESTORED_TOKENS = "efficient_lmcache:restored_tokens_total"
HIDDEN_SIZE = 128


def without_restores(model: str) -> dict[str, Any]:
    """More requests than the GPU holds, none of which vLLM restores anything of."""
    engine = Engine(
        model,
        host_mib=64,
        gpu_blocks=40,
        max_model_len=2048,
        max_num_seqs=16,
        options={"admission": "none"},
        llm_options={"enable_prompt_embeds": True},
    )
    # Seven of them fit, until each has grown by eight tokens.
    prompts = random_prompts(8, 2 * CHUNK_TOKENS + 120)
    engine.generate(prompts, max_tokens=1)
    answers = _generate(engine.llm, [{"prompt_token_ids": prompt} for prompt in prompts], 16, prompt_logprobs=1)
    after_logprobs = _preemptions(engine)
    _generate(engine.llm, [{"prompt_embeds": _embeddings(seed, 2 * CHUNK_TOKENS + 120)} for seed in range(8)], 16)
    twice = [_embeddings(seed, 2 * CHUNK_TOKENS + 10) for seed in (0, 1)]
    stored = len(engine.tier.hot_cache)
    embedded = []
    for order in (twice, twice[::-1]):
        engine.forget_gpu()
        embedded.append([_generate(engine.llm, [{"prompt_embeds": one}], 8)[0] for one in order])
    engine.generate(random_prompts(1, 20, seed=1), max_tokens=1)
    return {
        "answered_tokens": [len(answer) for answer in answers],
        "preempted_with_logprobs": after_logprobs,
        "preempted_with_embeddings": _preemptions(engine) - after_logprobs,
        "embedded": embedded,
        "stored_of_embeddings": len(engine.tier.hot_cache) - stored,
        "without_lmcache": len(engine.scheduler_connector._isolation.without_lmcache),
        "state": engine.state_left(),
    }


def adapters_and_embeddings_beside_a_server(
    model: str, transfer_options: dict[str, Any], directory: str
) -> dict[str, Any]:
    """Inside vLLM's MultiConnector, as deployments with several connectors have it."""
    configure_environment(host_mib=16)
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    ours = {
        "kv_connector": "EfficientLMCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**transfer_options, "efficient.admission": "none"},
    }
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        block_size=128,
        num_gpu_blocks_override=40,
        max_model_len=2048,
        max_num_seqs=4,
        disable_log_stats=False,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=8,
        enable_prompt_embeds=True,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours]},
        },
    )
    [tokens] = random_prompts(1, 2 * CHUNK_TOKENS + 10)
    adapters = {f"adapter {seed}": LoRARequest(f"{seed}", seed, _adapter(Path(directory), seed)) for seed in (1, 2)}
    who = {"base": None, **adapters}
    answers: dict[str, list[Any]] = {name: [] for name in [*who, "embeddings 0", "embeddings 1"]}
    restored = []
    for order in (list(who), list(who)[::-1]):
        before = metric(RESTORED_TOKENS)
        for name in order:
            _forget_gpu(llm)
            answers[name] += _generate(llm, [{"prompt_token_ids": tokens}], 8, lora_request=who[name])
        restored.append(metric(RESTORED_TOKENS) - before)
    for seed in (0, 1, 1, 0):
        _forget_gpu(llm)
        answers[f"embeddings {seed}"] += _generate(llm, [{"prompt_embeds": _embeddings(seed, len(tokens))}], 8)
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector.sub_connectors[0]
    return {
        "answers": answers,
        "restored_tokens": restored,
        "restored_in_all": metric(RESTORED_TOKENS),
        "remembered": [len(connector._aborted_restores), len(connector._offered), len(connector.request_trackers)],
    }


def _generate(llm: Any, prompts: list[Any], max_tokens: int, lora_request: Any = None, **params: Any) -> list[Any]:
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, **params)
    outputs = llm.generate(prompts, asked, use_tqdm=False, lora_request=lora_request)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _embeddings(seed: int, tokens: int) -> Any:
    import torch

    return 0.02 * torch.randn(tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))


def _preemptions(engine: Engine) -> float:
    return engine.metrics()["vllm:num_preemptions_total"]


def _forget_gpu(llm: Any) -> None:
    """Only when the server has what it was to store are an ended request's blocks free."""
    from server_scenarios import wait_until

    def forgotten() -> bool:
        llm.llm_engine.step()
        return bool(llm.reset_prefix_cache())

    wait_until(forgotten, "free blocks")


def _adapter(directory: Path, seed: int) -> str:
    """A random adapter for the queries and values of the small model, large enough to change its answers."""
    import torch
    from safetensors.torch import save_file

    path, rank, generator = directory / f"adapter-{seed}", 8, torch.Generator().manual_seed(seed)
    path.mkdir()
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", HIDDEN_SIZE), ("v_proj", HIDDEN_SIZE // 2)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(rank, HIDDEN_SIZE, generator=generator)
            weights[f"{module}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)
