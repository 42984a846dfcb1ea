"""Copies between vLLM's paged KV and LMCache's chunks on vLLM's CPU backend, bit for bit.

paged layer   [num_blocks, kv_heads, block_tokens, 2 * head_dim], keys then values in the last dimension
chunk         [2, layers, tokens, kv_heads * head_dim]
slot          block * block_tokens + position in the block; negative: the token has no place in the paged KV
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_paged_to_chunk(layers: Sequence[torch.Tensor], slots: torch.Tensor, chunk: torch.Tensor) -> None:
    """Fill `chunk` with the KV at `slots`; where a slot is negative the chunk keeps what it has."""
    tokens, slots = _placed(slots)
    for index, layer in enumerate(layers):
        block, position, heads, head_dim = _locate(layer, slots)
        kv = layer[block, :, position, :].view(-1, heads, 2, head_dim)
        for half in (0, 1):
            chunk[half, index, tokens] = kv[:, :, half].reshape(-1, heads * head_dim)


def copy_chunk_to_paged(chunk: torch.Tensor, layers: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Write the chunk's tokens to `slots`; tokens with a negative slot are not written."""
    tokens, slots = _placed(slots)
    for index, layer in enumerate(layers):
        block, position, heads, head_dim = _locate(layer, slots)
        kv = chunk[:, index, tokens].view(2, -1, heads, head_dim)
        layer[block, :, position, :] = torch.cat((kv[0], kv[1]), dim=-1)


def _placed(slots: torch.Tensor) -> tuple[torch.Tensor | slice, torch.Tensor]:
    if slots.numel() and int(slots.min()) >= 0:
        return slice(None), slots
    tokens = (slots >= 0).nonzero().flatten()
    return tokens, slots[tokens]


def _locate(layer: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    _, heads, block_tokens, width = layer.shape
    return slots // block_tokens, slots % block_tokens, heads, width // 2
