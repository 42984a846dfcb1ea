"""KV bytes that one token occupies on one rank (paper, Eq. 1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a layer of this type keeps does not grow with the prompt: a recurrent state, or nothing.
_BOUNDED_LAYER_TYPES = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe", "mlp"})
# Layers that attend to a window are among them: LMCache stores their KV of every token, too, as vLLM lays it out for a
# connector.
_GROWING_LAYER_TYPES = frozenset(
    {"full_attention", "attention", "global_attention", "hybrid", "sliding_attention", "chunked_attention"}
)
_ELEMENT_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class KVFootprint:
    """Eq. 1: beta = 2 L d s max(1, ceil(H_kv / TP)); with a latent cache (MLA): L (r + d_rope) s on every rank.

    Attributes:
        layers: L, layers that keep KV for every token of the prompt.
        kv_heads: H_kv over all ranks; ignored with a latent cache.
        head_dim: d, elements per head and token; with a latent cache the latent's elements per token.
        element_bytes: s, bytes per element (2 for bf16, 1 for fp8).
        latent: one latent vector per token and layer instead of keys and values; ranks hold copies, not shards.
    """

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2
    latent: bool = False

    def __post_init__(self) -> None:
        for name, least in (("layers", 0), ("kv_heads", 1), ("head_dim", 1), ("element_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"KVFootprint.{name} is {getattr(self, name)}; it must be at least {least}")

    def bytes_per_token_per_rank(self, tensor_parallel: int = 1) -> int:
        """beta_rank in bytes. Heads are replicated once there are more ranks than heads."""
        if tensor_parallel < 1:
            raise ValueError(f"tensor_parallel is {tensor_parallel}; it must be at least 1")
        if self.latent:
            return self.layers * self.head_dim * self.element_bytes
        heads_per_rank = max(1, -(-self.kv_heads // tensor_parallel))
        return 2 * self.layers * self.head_dim * self.element_bytes * heads_per_rank

    @classmethod
    def from_config(cls, config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> KVFootprint:
        """Read a Hugging Face `config.json` that is already parsed.

        Args:
            config: the configuration; of a multimodal model, its `text_config` is read.
            kv_cache_dtype: `auto` (the model's own), `bfloat16`, `float16`, `float32`, or any `fp8…`.

        Raises:
            ValueError: naming the key that is missing or not understood, and what is allowed.
        """
        text = text_config(config)
        element_bytes = _element_bytes(text, config, kv_cache_dtype)
        layers = _growing_layers(text)
        if not layers:
            raise ValueError("no layer keeps KV for every token of a prompt; there is nothing that a tier could hold")
        if text.get("kv_lora_rank") is not None:
            latent_dim = _integer(text, "kv_lora_rank") + _integer(text, "qk_rope_head_dim")
            return cls(layers, 1, latent_dim, element_bytes, latent=True)
        query_heads = _integer(text, "num_attention_heads", "n_head")
        if not query_heads:
            raise ValueError("the number of attention heads is 0; it must be at least 1")
        kv_heads = _integer(text, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
        if text.get("multi_query") and "num_key_value_heads" not in text:
            kv_heads = 1
        if text.get("head_dim") is not None:
            return cls(layers, kv_heads, _integer(text, "head_dim"), element_bytes)
        return cls(layers, kv_heads, _integer(text, "hidden_size", "n_embd") // query_heads, element_bytes)

    @classmethod
    def from_config_file(cls, path: str | Path, kv_cache_dtype: str = "auto") -> KVFootprint:
        """Read `config.json`, or the one inside a model directory. Errors name the file."""
        config = load_config(path)
        try:
            return cls.from_config(config, kv_cache_dtype)
        except ValueError as error:
            raise ValueError(f"{_config_file(path)}: {error}") from error
        except (TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
            raise ValueError(f"{_config_file(path)}: a field is of another kind than expected: {error}") from error


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also sees or hears, its language model's part; elsewhere all of it."""
    return config.get("text_config") or config


def load_config(path: str | Path) -> dict[str, Any]:
    """Parse a Hugging Face `config.json`, or the one inside a model directory.

    Raises:
        ValueError: naming the file.
    """
    file = _config_file(path)
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; expected a Hugging Face config.json") from error
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); expected a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: holds {type(config).__name__}; expected a Hugging Face config.json object")
    return config


def _config_file(path: str | Path) -> Path:
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def _integer(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{key} is {value!r}; it must be a non-negative integer")
            return value
    raise ValueError(f"has none of the keys {', '.join(keys)}; one of them must be an integer")


def _element_bytes(text: Mapping[str, Any], config: Mapping[str, Any], kv_cache_dtype: str) -> int:
    if kv_cache_dtype.startswith("fp8"):
        return 1
    name = kv_cache_dtype
    if name == "auto" and asks_for_8_bits(config.get("quantization_config") or text.get("quantization_config")):
        return 1
    if name == "auto":
        name = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
        # A configuration that names no type is served in 16 bits.
        name = "bfloat16" if name == "None" else name.removeprefix("torch.")
    if name not in _ELEMENT_BYTES:
        raise ValueError(f"KV cache type {name!r} is not known; allowed: auto, fp8…, {', '.join(_ELEMENT_BYTES)}")
    return _ELEMENT_BYTES[name]


def asks_for_8_bits(quantization: Any) -> bool:
    """Whether a checkpoint asks for a KV cache of 8 bits, as vLLM reads what ModelOpt and compressed-tensors write.

    Args:
        quantization: its configuration's `quantization_config`, whatever that is.
    """
    if not isinstance(quantization, Mapping):
        return False
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return str(scheme).lower().startswith("fp8")


def _growing_layers(text: Mapping[str, Any]) -> int:
    """Count the layers whose KV grows by one entry per token."""
    types = text.get("layer_types") or text.get("layers_block_type")
    if types is not None:
        unknown = sorted({str(kind) for kind in types} - _BOUNDED_LAYER_TYPES - _GROWING_LAYER_TYPES)
        if unknown:
            allowed = ", ".join(sorted(_BOUNDED_LAYER_TYPES | _GROWING_LAYER_TYPES))
            raise ValueError(f"layer type {unknown[0]!r} is not known; allowed: {allowed}")
        return sum(kind in _GROWING_LAYER_TYPES for kind in types)
    if (pattern := text.get("hybrid_override_pattern")) is not None:
        return str(pattern).count("*")
    layers = _integer(text, "num_hidden_layers", "n_layer")
    if (indices := text.get("attn_layer_indices")) is not None:
        return len(indices)
    if (kinds := text.get("attn_type_list")) is not None:
        return sum(kind == 1 for kind in kinds)
    if (linear := text.get("linear_attn_config")) is not None:
        return len(linear["full_attn_layers"])
    if text.get("attn_layer_period") is not None:
        return len(range(text.get("attn_layer_offset") or 0, layers, _integer(text, "attn_layer_period")))
    if text.get("full_attention_interval") is not None:
        return layers // _integer(text, "full_attention_interval")
    return layers
