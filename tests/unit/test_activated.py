"""Parameters that a token activates, against what model cards state."""

from __future__ import annotations

import pytest

from efficient_lmcache.core.activated import activated_parameters

QWEN3_CODER = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5472,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
QWEN25_CODER = {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27_648,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129_280,
}

LLAMA4_SCOUT = {
    "model_type": "llama4_text",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "vocab_size": 202_048,
}


@pytest.mark.parametrize(
    ("config", "billion"),
    [(QWEN3_CODER, 3.3), (QWEN25_CODER, 32.5), (DEEPSEEK_V3, 37.0), (LLAMA4_SCOUT, 17.2)],
    ids=["moe", "dense", "mla", "llama4"],
)
def test_model_cards_counts_are_reproduced(config, billion):
    assert activated_parameters(config) / 1e9 == pytest.approx(billion, rel=0.025)


def test_tied_embeddings_are_one_matrix_and_text_config_is_read():
    tied = {"text_config": {**QWEN25_CODER, "tie_word_embeddings": True}}
    assert activated_parameters(QWEN25_CODER) - activated_parameters(tied) == 152_064 * 5120


def test_dense_layers_of_a_mixture_pass_the_whole_feed_forward_part():
    every_second = activated_parameters({**QWEN3_CODER, "decoder_sparse_step": 2})
    router_and_experts = 2048 * 128 + 3 * 2048 * 8 * 768
    dense = 3 * 2048 * 5472
    assert every_second - activated_parameters(QWEN3_CODER) == 24 * (dense - router_and_experts)
    assert activated_parameters({**QWEN3_CODER, "mlp_only_layers": list(range(48))}) == activated_parameters(
        {name: value for name, value in QWEN3_CODER.items() if name != "num_experts"}
    )


def test_what_cannot_be_counted_is_an_error():
    with pytest.raises(ValueError, match="linear_attention cannot be counted"):
        activated_parameters({**QWEN25_CODER, "layer_types": ["linear_attention"]})
    with pytest.raises(ValueError, match="has none of the keys vocab_size"):
        activated_parameters({name: value for name, value in QWEN25_CODER.items() if name != "vocab_size"})


@pytest.mark.parametrize("key", ["hybrid_override_pattern", "attn_layer_period", "attn_layer_indices"])
def test_layers_of_several_kinds_are_not_guessed(key):
    with pytest.raises(ValueError, match=key):
        activated_parameters({**QWEN25_CODER, key: "M*M-"})
