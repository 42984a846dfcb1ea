"""What a token takes on each rank, and the rank whose tier counts for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")

import torch
from vllm.config import ModelConfig

from efficient_lmcache.connector import vllm_adapter


class Model:
    """vLLM's own split of layers and heads over ranks; making a whole configuration takes a directory and seconds."""

    get_num_layers = ModelConfig.get_num_layers
    get_layers_start_end_indices = ModelConfig.get_layers_start_end_indices
    get_total_num_hidden_layers = ModelConfig.get_total_num_hidden_layers
    get_num_kv_heads = ModelConfig.get_num_kv_heads
    dtype = torch.bfloat16
    quantization = None

    def __init__(
        self, layers: int, kv_heads: int = 4, use_mla: bool = False, asks: dict[str, Any] | None = None
    ) -> None:
        self.hf_config = SimpleNamespace(quantization_config=asks) if asks else SimpleNamespace()
        self.model_arch_config = SimpleNamespace(total_num_hidden_layers=layers, total_num_kv_heads=kv_heads)
        self.use_mla = use_mla

    def get_head_size(self) -> int:
        return 64


def ranks(model: Model, tensor: int, stages: int) -> list[Any]:
    """The configuration as each worker has it."""
    return [
        SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=tensor, pipeline_parallel_size=stages),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        for rank in range(tensor * stages)
    ]


def speakers(model: Model, tensor: int, stages: int) -> list[int]:
    return [
        config.parallel_config.rank
        for config in ranks(model, tensor, stages)
        if vllm_adapter.speaks_for_all_ranks(config)
    ]


PER_LAYER_AND_HEAD = 2 * 64 * 2


@pytest.mark.parametrize(
    ("tensor", "stages", "layers_and_heads"),
    [(1, 1, [(5, 4)]), (2, 1, [(5, 2)]), (8, 1, [(5, 1)]), (1, 2, [(3, 4), (2, 4)]), (2, 3, [(2, 2), (2, 2), (1, 2)])],
)
def test_a_stage_keeps_its_layers_and_a_rank_its_heads(tensor, stages, layers_and_heads):
    for config in ranks(Model(layers=5), tensor, stages):
        expected = [layers * heads * PER_LAYER_AND_HEAD for layers, heads in layers_and_heads]
        assert vllm_adapter.stage_bytes_per_token(config) == expected


def test_a_scheduler_counts_the_8_bits_that_its_workers_find_in_the_checkpoint():
    asks = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    (config,) = ranks(Model(layers=5, asks=asks), 1, 1)
    assert vllm_adapter.stage_bytes_per_token(config) == [5 * 4 * PER_LAYER_AND_HEAD // 2]
    config.cache_config.cache_dtype = "bfloat16"
    assert vllm_adapter.stage_bytes_per_token(config) == [5 * 4 * PER_LAYER_AND_HEAD]


def test_one_rank_speaks_for_all_and_it_is_one_with_most_layers():
    assert speakers(Model(layers=4), 1, 1) == [0]
    assert speakers(Model(layers=4), 4, 2) == [0]
    # Of four stages vLLM gives the middle ones the layers that are left over: 1, 2, 2, 1.
    assert vllm_adapter.stage_bytes_per_token(ranks(Model(layers=6), 2, 4)[0])[1] == 2 * 2 * PER_LAYER_AND_HEAD
    assert speakers(Model(layers=6), 2, 4) == [2]


def test_with_mla_ranks_hold_copies_and_the_first_one_speaks():
    model = Model(layers=6, kv_heads=1, use_mla=True)
    assert vllm_adapter.stage_bytes_per_token(ranks(model, 4, 1)[0]) == [6 * 64 * 2]
    assert speakers(model, 2, 4) == [0]
