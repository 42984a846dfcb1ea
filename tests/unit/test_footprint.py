"""Eq. 1 and Table 6, and the configurations it is read from."""

from __future__ import annotations

import json

import pytest

from efficient_lmcache.core.footprint import KVFootprint

KIB = 1024
MOE = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
}
DENSE = {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120}


@pytest.mark.parametrize(
    ("config", "ranks", "kib"),
    [
        *((MOE, ranks, kib) for ranks, kib in ((1, 96), (2, 48), (4, 24), (8, 24))),
        *((DENSE, ranks, kib) for ranks, kib in ((1, 256), (2, 128), (4, 64), (8, 32))),
    ],
)
def test_table_6_is_reproduced_with_head_replication_beyond_the_head_count(config, ranks, kib):
    assert KVFootprint.from_config(config).bytes_per_token_per_rank(ranks) == kib * KIB


def test_heads_that_do_not_divide_evenly_load_the_fullest_rank():
    assert KVFootprint(1, 6, 64, 2).bytes_per_token_per_rank(4) == 2 * 64 * 2 * 2


def test_fp8_halves_bf16_whatever_the_models_own_type():
    config = {**MOE, "torch_dtype": "bfloat16"}
    fp8 = KVFootprint.from_config(config, "fp8_e4m3").bytes_per_token_per_rank(8)
    assert fp8 * 2 == KVFootprint.from_config(config).bytes_per_token_per_rank(8)


@pytest.mark.parametrize(
    ("quantization", "element_bytes"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1),
        ({"quant_method": "fp8", "kv_cache_scheme": None}, 2),
        (None, 2),
    ],
)
def test_a_checkpoint_that_asks_for_an_8_bit_cache_gets_one_unless_told_otherwise(quantization, element_bytes):
    config = {**MOE, "torch_dtype": "bfloat16", "quantization_config": quantization}
    assert KVFootprint.from_config(config).element_bytes == element_bytes
    assert KVFootprint.from_config(config, "bfloat16").element_bytes == 2


def test_mla_keeps_one_latent_on_every_rank():
    deepseek = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    footprint = KVFootprint.from_config(deepseek)
    assert footprint.bytes_per_token_per_rank(1) == 61 * 576 * 2
    assert footprint.bytes_per_token_per_rank(8) == footprint.bytes_per_token_per_rank(1)


@pytest.mark.parametrize(
    ("extra", "growing"),
    [
        ({}, 12),
        ({"sliding_window": 4096}, 12),
        ({"layer_types": ["sliding_attention", "full_attention"] * 6, "sliding_window": 128}, 12),
        ({"layer_types": ["linear_attention"] * 9 + ["full_attention"] * 3}, 3),
        ({"full_attention_interval": 4}, 3),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 1),
        ({"attn_layer_indices": [2, 7]}, 2),
        ({"attn_type_list": [0, 0, 1] * 4}, 4),
        ({"layers_block_type": ["mamba", "mamba", "hybrid"] * 4}, 4),
        ({"hybrid_override_pattern": "M-M*-M-M*-M-"}, 2),
        ({"linear_attn_config": {"full_attn_layers": [4, 8, 12]}}, 3),
    ],
)
def test_layers_whose_kv_a_tier_keeps_for_every_token_count(extra, growing):
    config = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, **extra}
    assert KVFootprint.from_config(config).layers == growing


def test_a_multimodal_models_text_config_is_read():
    assert KVFootprint.from_config({"text_config": DENSE, "torch_dtype": "float32"}).element_bytes == 4


def test_multi_head_attention_without_kv_heads_keeps_all_heads():
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    assert KVFootprint.from_config(gpt2) == KVFootprint(12, 12, 64, 2)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "num_hidden_layers"),
        ({**MOE, "num_key_value_heads": [4] * 48}, "num_key_value_heads is"),
        ({**MOE, "torch_dtype": "int3"}, "allowed: auto, fp8"),
        ({**MOE, "layer_types": ["full_attention", "telepathy"]}, "'telepathy' is not known; allowed"),
        ({**MOE, "layer_types": ["mamba"] * 4}, "nothing that a tier could hold"),
        ({"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 0}, "attention heads is 0"),
    ],
)
def test_a_bad_configuration_names_the_key_and_what_is_allowed(config, complaint):
    with pytest.raises(ValueError, match=complaint):
        KVFootprint.from_config(config)


def test_errors_of_a_file_name_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ValueError, match=r"config\.json: has none of the keys num_hidden_layers"):
        KVFootprint.from_config_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        KVFootprint.from_config_file(tmp_path)
    with pytest.raises(ValueError, match=r"missing.json: No such file"):
        KVFootprint.from_config_file(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": [1]},
        {"layer_types": 3},
        {"linear_attn_config": {}},
        {"full_attention_interval": 0},
    ],
)
def test_a_field_of_another_kind_names_the_file(change: dict[str, object], tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, **change}))
    with pytest.raises(ValueError, match=r"config\.json: a field is of another kind than expected"):
        KVFootprint.from_config_file(tmp_path)
