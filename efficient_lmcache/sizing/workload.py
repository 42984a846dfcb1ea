"""One recording at the two granularities of its caches: the host tier's chunks and the GPU's blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import numpy as np

from efficient_lmcache.core.references import References
from efficient_lmcache.core.reuse import salted
from efficient_lmcache.sizing.streams import RecordingError, open_stream

VLLM_BLOCK_TOKENS = 16
# Beyond so many references the GPU's blocks are merged: each merge halves the time and hides at most a block per call.
MOST_BLOCK_REFERENCES = 500_000


@dataclass(frozen=True, slots=True)
class Workload:
    """The same calls in the same order, twice.

    Attributes:
        chunks: the host tier's chunks of b tokens, of prompts only (LMCache stores no chunk of an output).
        blocks: the GPU cache's blocks, outputs included where they are known (vLLM keeps what it generated).
        name: of the recording.
        notes: what it does not tell, and what is assumed instead.
        lanes: lane names by number, where the recording has names.
        lanes_are_guessed: some are a guess; a call that extends none then begins one, whatever it goes on from.
    """

    chunks: References
    blocks: References
    name: str = ""
    notes: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    lanes_are_guessed: bool = False

    def __post_init__(self) -> None:
        if not np.array_equal(self.chunks.prompt_tokens, self.blocks.prompt_tokens):
            raise ValueError("Workload.chunks and Workload.blocks are not the same calls")

    @property
    def mean_prompt_tokens(self) -> float:
        """N."""
        return float(self.chunks.prompt_tokens.mean())

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(np.unique(self.chunks.session))

    def with_notes(self, *notes: str) -> Workload:
        """The workload with more to say."""
        return replace(self, notes=(*self.notes, *notes))

    def salted(self) -> Workload:
        """The workload when every session's keys are salted, in both caches."""
        return replace(self, chunks=salted(self.chunks), blocks=salted(self.blocks))

    @classmethod
    def of(
        cls,
        references: References,
        chunk_tokens: int,
        name: str = "",
        notes: tuple[str, ...] = (),
        gpu_block_tokens: int = VLLM_BLOCK_TOKENS,
        most_block_references: int = MOST_BLOCK_REFERENCES,
    ) -> Workload:
        """From references in blocks of which a chunk is a multiple, outputs included where they are known.

        Args:
            most_block_references: beyond so many the GPU's blocks are merged.
        """
        factor, rest = divmod(chunk_tokens, references.chunk_tokens)
        if rest or not factor:
            raise ValueError(
                f"--chunk-tokens is {chunk_tokens}; it must be a multiple of {references.chunk_tokens}, "
                "the recording's block size"
            )
        if not len(references):
            raise ValueError(f"{name}: holds no calls; there is nothing to plan for")
        merged = 1
        while len(references.keys) > merged * most_block_references and factor % (2 * merged) == 0:
            merged *= 2
        blocks = coarsened(references, merged)
        if blocks.chunk_tokens > gpu_block_tokens:
            notes = (*notes, f"the GPU's cache is modelled in blocks of {blocks.chunk_tokens} tokens")
        return cls(_prompts_only(coarsened(references, factor)), blocks, name, notes)


def open_workload(
    path: str | os.PathLike[str],
    chunk_tokens: int,
    *,
    tokenizer: str | None = None,
    skip_bad: bool = False,
    gpu_block_tokens: int = VLLM_BLOCK_TOKENS,
    most_block_references: int = MOST_BLOCK_REFERENCES,
    progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Read a recording of any format once, whole, into memory: 8 bytes per block that a call references.

    Args:
        gpu_block_tokens: vLLM's block size, where the recording can be cut so finely.
        most_block_references: beyond so many blocks are merged.

    Raises:
        RecordingError, ValueError: naming file, record and field, and what is allowed.
    """
    if chunk_tokens < 1:
        raise ValueError(f"--chunk-tokens is {chunk_tokens}; it must be at least 1")
    open_ = partial(open_stream, path, tokenizer=tokenizer, skip_bad=skip_bad, with_outputs=True, progress=progress)
    try:
        stream = open_(gcd(chunk_tokens, gpu_block_tokens))
    except RecordingError:
        # Recordings of tokens can be cut at will, recordings of blocks only at theirs.
        stream = open_(None)
    batches = list(stream)
    if not batches:
        raise ValueError(f"{path}: holds no calls; there is nothing to plan for")
    skipped = (f"{stream.skipped} bad records were left out",) if stream.skipped else ()
    references = References.concatenate(batches)
    notes = (*stream.notes, *skipped, *_unknown_pauses(references))
    workload = Workload.of(references, chunk_tokens, stream.name, notes, gpu_block_tokens, most_block_references)
    return replace(workload, lanes=tuple(stream.lanes), lanes_are_guessed=stream.lanes_are_guessed)


def _unknown_pauses(references: References) -> tuple[str, ...]:
    """What is assumed of pauses that a recording does not tell."""
    later = np.ones(len(references), bool)
    later[np.unique(references.lane, return_index=True)[1]] = False
    unknown = int(np.isnan(references.interval_s[later]).sum())
    if not unknown:
        return ()
    return (
        f"pauses before {unknown:,} of the {later.sum():,} calls that continue a lane are unknown, and taken for 0 s",
    )


def coarsened(references: References, factor: int) -> References:
    """The same calls in chunks of `factor` old ones: a chunk is named by its last part, which identifies its prefix."""
    if factor == 1:
        return references
    lengths = np.diff(references.offsets) // factor
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    lasts = references.keys[np.repeat(references.offsets[:-1], lengths) + (within + 1) * factor - 1]
    _, first, inverse = np.unique(lasts, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return replace(
        references,
        chunk_tokens=references.chunk_tokens * factor,
        keys=numbers[inverse],
        offsets=offsets,
        lookup_chunks=references.lookup_chunks // factor,
    )


def _prompts_only(references: References) -> References:
    """Without the chunks that only outputs fill."""
    lengths = np.diff(references.offsets)
    kept = np.arange(len(references.keys)) - np.repeat(references.offsets[:-1], lengths) < np.repeat(
        references.lookup_chunks, lengths
    )
    offsets = np.concatenate(([0], np.cumsum(np.minimum(lengths, references.lookup_chunks)))).astype(np.int64)
    return replace(references, keys=references.keys[kept], offsets=offsets)
