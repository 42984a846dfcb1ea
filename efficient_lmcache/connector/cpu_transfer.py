"""Copies between vLLM's paged KV and LMCache's chunks on vLLM's CPU backend, bit for bit.

paged layer   [num_blocks, kv_heads, block_tokens, parts * head_dim], keys then values in the last dimension
chunk         [parts, layers, tokens, kv_heads * head_dim]
parts         2, keys and values; with MLA 1, the latent, of one head
slot          block * block_tokens + position in the block; negative: the token has no place in the paged KV
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_paged_to_chunk(layers: Sequence[torch.Tensor], slots: torch.Tensor, chunk: torch.Tensor) -> None:
    """Fill `chunk` with the KV at `slots`; where a slot is negative the chunk keeps what it has."""
    tokens, slots = _placed(slots)
    parts = chunk.shape[0]
    for index, layer in enumerate(layers):
        block, position, heads, width = _locate(layer, slots)
        kv = layer[block, :, position, :].view(-1, heads, parts, width // parts)
        for part in range(parts):
            chunk[part, index, tokens] = kv[:, :, part].flatten(1)


def copy_chunk_to_paged(chunk: torch.Tensor, layers: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Write the chunk's tokens to `slots`; tokens with a negative slot are not written."""
    tokens, slots = _placed(slots)
    parts = chunk.shape[0]
    for index, layer in enumerate(layers):
        block, position, heads, width = _locate(layer, slots)
        kv = chunk[:, index, tokens].view(parts, -1, heads, width // parts)
        layer[block, :, position, :] = torch.cat(tuple(kv), dim=-1)


def _placed(slots: torch.Tensor) -> tuple[torch.Tensor | slice, torch.Tensor]:
    if slots.numel() and int(slots.min()) >= 0:
        return slice(None), slots
    tokens = (slots >= 0).nonzero().flatten()
    return tokens, slots[tokens]


def _locate(layer: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    _, heads, block_tokens, width = layer.shape
    return slots // block_tokens, slots % block_tokens, heads, width
