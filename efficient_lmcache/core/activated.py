"""How many parameters a token activates, read from a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from efficient_lmcache.core.footprint import text_config

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# These multiply twice in a feed-forward layer; all others gate, which takes a third matrix.
_UNGATED = frozenset({"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "phi", "starcoder2"})

# Some layers are no attention, and what those compute is the model's own.
_MIXED = ("hybrid_override_pattern", "ssm_cfg", "attn_layer_period", "attn_layer_indices", "attn_type_list")


def activated_parameters(config: Mapping[str, Any]) -> int:
    """Weights of the matrices that one token passes, embedding and output head included, as model cards count them.

    Args:
        config: a parsed Hugging Face `config.json`; of a multimodal model, its `text_config` is read.

    Raises:
        ValueError: naming the key that is missing, or what this function does not know how to count.
    """
    text = text_config(config)
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    if kinds - {"full_attention", "sliding_attention", "chunked_attention", "attention"}:
        raise ValueError(f"layers of types {', '.join(sorted(map(str, kinds)))} cannot be counted")
    if mixed := [key for key in _MIXED if text.get(key) is not None]:
        raise ValueError(f"layers of several kinds ({mixed[0]}) cannot be counted")
    layers = _size(text, "num_hidden_layers", "n_layer")
    hidden = _size(text, "hidden_size", "n_embd")
    embeddings = _size(text, "vocab_size") * hidden * (1 if text.get("tie_word_embeddings") else 2)
    sparse_layers = _sparse_layers(text, layers)
    dense = (layers - sparse_layers) * _dense_feed_forward(text, hidden) if sparse_layers < layers else 0
    sparse = sparse_layers * _sparse_feed_forward(text, hidden) if sparse_layers else 0
    return layers * _attention(text, hidden) + dense + sparse + embeddings


class RoutedExperts(NamedTuple):
    """A mixture of experts.

    Attributes:
        parameters: of all routed experts of all layers; 0 for a dense model.
        share: of them that one token passes.
    """

    parameters: int
    share: float


def routed_experts(config: Mapping[str, Any]) -> RoutedExperts:
    """Weights of which a step reads only those that its tokens are routed to; config and errors as above."""
    text = text_config(config)
    layers = _sparse_layers(text, _size(text, "num_hidden_layers", "n_layer"))
    if not layers:
        return RoutedExperts(0, 1.0)
    experts = _size(text, *_EXPERTS)
    expert = 3 * _size(text, "hidden_size", "n_embd") * _size(text, "moe_intermediate_size", "intermediate_size")
    return RoutedExperts(layers * experts * expert, _size(text, "num_experts_per_tok") / experts)


def _attention(text: Mapping[str, Any], hidden: int) -> int:
    heads = _size(text, "num_attention_heads", "n_head")
    if text.get("kv_lora_rank") is not None:
        latent, rope = _size(text, "kv_lora_rank"), _size(text, "qk_rope_head_dim")
        nope, value = _size(text, "qk_nope_head_dim"), _size(text, "v_head_dim")
        rank = text.get("q_lora_rank")
        queries = heads * (nope + rope) * hidden if rank is None else rank * (hidden + heads * (nope + rope))
        return int(queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden)
    kv_heads = _size(text, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
    head_dim = text.get("head_dim") or hidden // heads
    return int(2 * hidden * head_dim * (heads + kv_heads))


def _sparse_layers(text: Mapping[str, Any], layers: int) -> int:
    """Layers whose feed-forward part is a mixture of experts."""
    if not any(text.get(key) for key in _EXPERTS):
        return 0
    step = text.get("decoder_sparse_step") or 1
    dense = set(text.get("mlp_only_layers") or ()) | set(range(text.get("first_k_dense_replace") or 0))
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _sparse_feed_forward(text: Mapping[str, Any], hidden: int) -> int:
    expert = _size(text, "moe_intermediate_size", "intermediate_size")
    # Llama 4 always has one, and does not say so.
    shared_experts = text.get("n_shared_experts") or int(str(text.get("model_type")).startswith("llama4"))
    shared = text.get("shared_expert_intermediate_size") or shared_experts * expert
    router = _size(text, *_EXPERTS)
    return int(3 * hidden * (_size(text, "num_experts_per_tok") * expert + shared) + router * hidden)


def _dense_feed_forward(text: Mapping[str, Any], hidden: int) -> int:
    matrices = 2 if text.get("model_type") in _UNGATED else 3
    return matrices * hidden * _size(text, "intermediate_size", "n_inner", "ffn_dim")


def _size(text: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ValueError(f"has none of the keys {', '.join(keys)}; one of them must be an integer > 0")
