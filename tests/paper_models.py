"""The paper's two models as directories with nothing but their architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3-Coder-30B-A3B-Instruct": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 5472,
        "vocab_size": 151_936,
        "max_position_embeddings": 262_144,
        "rope_theta": 10_000_000,
    },
    "Qwen2.5-Coder-32B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27_648,
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000,
        # As its model card says for prompts beyond 32,768 tokens.
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    },
}


def paper_model(directory: Path, name: str) -> Path:
    """`directory`/`name` with a config.json; no weights, no tokenizer."""
    model = directory / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **_ARCHITECTURES[name]}))
    return model
