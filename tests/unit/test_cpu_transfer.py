"""Paged KV <-> chunk copies on the CPU, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed (the cpu or gpu extra)")

from efficient_lmcache.connector.cpu_transfer import copy_chunk_to_paged, copy_paged_to_chunk  # noqa: E402

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, HEAD_DIM = 3, 6, 2, 4, 5


def paged(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]


def empty_chunk(tokens):
    return torch.zeros((2, LAYERS, tokens, HEADS * HEAD_DIM), dtype=torch.bfloat16)


slots = st.lists(st.integers(0, BLOCKS * BLOCK_TOKENS - 1), unique=True, max_size=16)


@settings(deadline=None)
@given(slots, st.integers(0, 2**16))
def test_a_round_trip_restores_every_bit_at_the_slots_and_touches_nothing_else(slot_list, seed):
    source, target, index = paged(seed), paged(seed + 1), torch.tensor(slot_list, dtype=torch.long)
    before = [layer.clone() for layer in target]
    chunk = empty_chunk(len(slot_list))
    copy_paged_to_chunk(source, index, chunk)
    copy_chunk_to_paged(chunk, target, index)
    for layer in range(LAYERS):
        for slot in range(BLOCKS * BLOCK_TOKENS):
            block, position = divmod(slot, BLOCK_TOKENS)
            expected = source if slot in slot_list else before
            assert torch.equal(target[layer][block, :, position], expected[layer][block, :, position])


def test_a_chunk_is_laid_out_as_lmcache_lays_it_out():
    layers, chunk = paged(0), empty_chunk(1)
    copy_paged_to_chunk(layers, torch.tensor([BLOCK_TOKENS + 2]), chunk)
    token = layers[1][1, :, 2]
    assert torch.equal(chunk[0, 1, 0], token[:, :HEAD_DIM].reshape(-1))
    assert torch.equal(chunk[1, 1, 0], token[:, HEAD_DIM:].reshape(-1))


def test_tokens_with_a_negative_slot_are_left_alone_on_both_sides():
    layers, chunk = paged(0), empty_chunk(3)
    copy_paged_to_chunk(layers, torch.tensor([-1, 5, -1]), chunk)
    assert not chunk[:, :, [0, 2]].any()
    target = paged(9)
    before = [layer.clone() for layer in target]
    copy_chunk_to_paged(chunk, target, torch.tensor([-1, 5, -1]))
    assert torch.equal(target[0][1, :, 1], layers[0][1, :, 1])
    target[0][1, :, 1] = before[0][1, :, 1]
    assert torch.equal(target[0], before[0])


def test_with_mla_a_round_trip_restores_every_bit_at_the_slots_and_touches_nothing_else():
    generator = torch.Generator().manual_seed(0)
    shape = (BLOCKS, 1, BLOCK_TOKENS, 7)
    source, target = (
        [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)] for _ in range(2)
    )
    before = [layer.clone() for layer in target]
    slots = torch.tensor([-1, 9, 2])
    chunk = torch.zeros((1, LAYERS, 3, 7), dtype=torch.bfloat16)
    copy_paged_to_chunk(source, slots, chunk)
    assert torch.equal(chunk[0, 1, 1], source[1][9 // BLOCK_TOKENS, 0, 9 % BLOCK_TOKENS])
    copy_chunk_to_paged(chunk, target, slots)
    for layer in range(LAYERS):
        for slot in range(BLOCKS * BLOCK_TOKENS):
            block, position = divmod(slot, BLOCK_TOKENS)
            expected = source if slot in (9, 2) else before
            assert torch.equal(target[layer][block, 0, position], expected[layer][block, 0, position])
