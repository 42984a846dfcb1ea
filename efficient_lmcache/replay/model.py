"""The small random model of demo and tests: real attention over real KV, 1 KiB of KV per token, nothing to download."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.extras import require

MARKER = "efficient_lmcache_model.json"
DEFAULT_VOCAB_SIZE = 16_384
DEFAULT_MAX_MODEL_LEN = 65_536
LARGEST = 1 << 20  # of both: 512 MiB of embeddings, and rotary tables of as many positions
_SEED = 0
# With tied embeddings and a usual initialisation random attention averages its context away, and greedy decoding
# repeats the last token whatever the KV holds. With these, zeroing an eighth of every chunk changes 99 % of greedy
# tokens, while recomputing in other batches changes none of 320.
_INITIALIZER_RANGE = 0.1
_ATTENTION_SHARPNESS = 2.0


def create_model(
    directory: str | os.PathLike[str],
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_model_len: int = DEFAULT_MAX_MODEL_LEN,
) -> Path:
    """Save a random Qwen3 (4 layers, 2 KV heads of 32, bf16) to `directory`; the same arguments give the same weights.

    It has no end-of-sequence token: what a replay forces must never stop a request early. Raises ValueError for a
    directory that holds anything but an earlier model of this function, and for missing torch or transformers.
    """
    for name, value in (("--vocab", vocab_size), ("--max-model-len", max_model_len)):
        if not 1 <= value <= LARGEST:
            raise ValueError(f"{name} is {value}; it must be from 1 to {LARGEST}")
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: not a directory")
    if target.is_dir() and any(target.iterdir()) and not (target / MARKER).is_file():
        raise ValueError(
            f"{target}: not empty and not a model made by `model create`; name an empty or a new directory"
        )
    torch = require("torch", "a model")
    transformers = require("transformers", "a model")
    config = transformers.Qwen3Config(**_architecture(vocab_size, max_model_len))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(_ATTENTION_SHARPNESS)
            layer.self_attn.k_norm.weight.fill_(_ATTENTION_SHARPNESS)
    model.to(torch.bfloat16)
    target.mkdir(parents=True, exist_ok=True)
    (target / MARKER).write_text(json.dumps({"vocab_size": vocab_size, "max_model_len": max_model_len}) + "\n")
    transformers.utils.logging.disable_progress_bar()  # one shard of a few MiB
    model.save_pretrained(target)
    return target


def _architecture(vocab_size: int, max_model_len: int) -> dict[str, Any]:
    """K and V x 4 layers x 2 KV heads x 32 x 2 bytes = 1,024 bytes of KV a token (vLLM's CPU attention needs 32)."""
    return {
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "initializer_range": _INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
