"""Files that tests of sweeps need: a model that is only its configuration."""

from __future__ import annotations

import json
from pathlib import Path


def model_directory(directory: Path, vocab_size: int = 64, context_tokens: int = 65_536) -> Path:
    """1 KiB of KV per token, as the model of `model create`; nothing that could serve."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 128,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "max_position_embeddings": context_tokens,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
