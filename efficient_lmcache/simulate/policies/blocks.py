"""Which of the GPU's blocks complete a chunk."""

from __future__ import annotations

import numpy as np

from efficient_lmcache.core.references import Ints
from efficient_lmcache.sizing.workload import Workload

NONE = -1


def chunk_of_block(workload: Workload) -> Ints:
    """int64 [blocks]: the chunk whose last block this is, or NONE.

    A block is evicted before those in front of it, so a chunk is whole on the GPU until its last block goes.
    """
    chunks, blocks = workload.chunks, workload.blocks
    factor, lengths = chunks.chunk_tokens // blocks.chunk_tokens, np.diff(chunks.offsets)
    within = np.arange(len(chunks.keys)) - np.repeat(chunks.offsets[:-1], lengths)
    lasts = blocks.keys[np.repeat(blocks.offsets[:-1], lengths) + (within + 1) * factor - 1]
    numbers = np.full(int(blocks.keys.max(initial=-1)) + 1, NONE)
    numbers[lasts] = chunks.keys
    return numbers
