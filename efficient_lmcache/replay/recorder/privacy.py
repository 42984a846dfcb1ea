"""Token ids that say nothing of the text, and everything of what is reused.

Each token is replaced by a pseudonym that depends on a secret key, on the token, and on all tokens before it. Two
sequences therefore agree after the replacement exactly as far as they agreed before it, an output stays the
continuation of its prompt, and every length is as it was; but the same token at another place has another pseudonym,
so that counting words tells nothing.

Of a prefix, a pseudorandom function gives two numbers a, b, and the token x after it becomes (a x + b) mod p, p the
first prime not below the vocabulary; results outside the vocabulary are mapped again until they are inside. That is
a bijection of the vocabulary for each prefix: tokens that differ after the same prefix never collide, and which two
they are cannot be told from two pseudonyms. The function is keyed BLAKE2b over blocks of 16 tokens, each chained to the
one before, and inside a block SipHash-1-3 under the block's own key, computed for all blocks at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from efficient_lmcache.replay.recorder.key_file import KEY_BYTES
from efficient_lmcache.replay.trace import Tokens, common_prefix_tokens

BLOCK_TOKENS = 16  # more hashes of a new prompt, but fewer steps for the little that most prompts add
MAX_VOCAB_SIZE = 1 << 31  # products of two ids fit 64 bits
_DIGEST_BYTES = 16

_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Known:
    """A sequence already replaced: its tokens, their pseudonyms, and the chained digest before each whole block."""

    tokens: Tokens
    pseudonyms: Tokens
    digests: list[bytes]


def task_pseudonym(key: bytes, name: str) -> str:
    """A pseudonym for a task's name."""
    return "task-" + hashlib.blake2b(name.encode(), key=key, digest_size=8).hexdigest()


class Pseudonyms:
    """Replaces sequences of token ids below `vocab_size`; the same key gives the same pseudonyms.

    A sequence that extends the last one costs only what it adds.
    """

    def __init__(self, key: bytes, vocab_size: int) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size is {vocab_size}; it must be from 1 to {MAX_VOCAB_SIZE}")
        self._key = key
        self._vocab_size = vocab_size
        self._prime = _prime_from(vocab_size)
        nothing = np.empty(0, np.uint32)
        self._known = _Known(nothing, nothing, [self._chain(b"", nothing)])

    def replace(self, tokens: Tokens) -> Tokens:
        """uint32 [n] for uint32 [n], every id below the vocabulary's size (ValueError otherwise)."""
        if len(tokens) and int(tokens.max()) >= self._vocab_size:
            raise ValueError(f"token id {tokens.max()} is not below the vocabulary's {self._vocab_size}")
        known = self._known
        blocks = common_prefix_tokens(tokens, known.tokens) // BLOCK_TOKENS
        kept = blocks * BLOCK_TOKENS
        digests = known.digests[: blocks + 1]
        for start in range(kept, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            digests.append(self._chain(digests[-1], tokens[start : start + BLOCK_TOKENS]))
        added = self._mapped(tokens[kept:], digests[blocks:])
        pseudonyms = np.concatenate((known.pseudonyms[:kept], added))
        self._known = _Known(tokens, pseudonyms, digests)
        return pseudonyms

    def _chain(self, digest: bytes, block: Tokens) -> bytes:
        data = digest + block.astype("<u4").tobytes()
        return hashlib.blake2b(data, key=self._key, digest_size=_DIGEST_BYTES).digest()

    def _mapped(self, tokens: Tokens, digests: list[bytes]) -> Tokens:
        """The pseudonyms of tokens that start a block; `digests` are those before each of their blocks."""
        if not len(tokens):
            return tokens
        blocks = -(-len(tokens) // BLOCK_TOKENS)
        padded = np.zeros(blocks * BLOCK_TOKENS, np.uint64)
        padded[: len(tokens)] = tokens
        keys = np.frombuffer(b"".join(digests[:blocks]), "<u8").reshape(blocks, 2).astype(np.uint64)
        secret = _prefix_hashes(padded.reshape(blocks, BLOCK_TOKENS), keys).reshape(-1)[: len(tokens)]
        prime = np.uint64(self._prime)
        factor = np.uint64(1) + (secret >> np.uint64(32)) % (prime - np.uint64(1))
        shift = (secret & np.uint64(0xFFFFFFFF)) % prime
        mapped = (factor * tokens + shift) % prime
        while (outside := mapped >= self._vocab_size).any():
            mapped[outside] = (factor[outside] * mapped[outside] + shift[outside]) % prime
        return mapped.astype(np.uint32)


def _prefix_hashes(blocks: _Words, keys: _Words) -> _Words:
    """uint64 [n, b]: SipHash-1-3 of the tokens before each token of its block.

    Args:
        blocks: [n, b] tokens.
        keys: [n, 2], a key for each block.
    """
    # The state before each token, [4, b, n], then all of them finished together.
    states = np.empty((4, blocks.shape[1], blocks.shape[0]), np.uint64)
    constants = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    v = [keys[:, i % 2] ^ np.uint64(constant) for i, constant in enumerate(constants)]
    for position in range(blocks.shape[1]):
        states[:, position] = v
        token = blocks[:, position]
        v[3] = v[3] ^ token
        _round(v)
        v[0] = v[0] ^ token
    v = list(states)
    v[2] = v[2] ^ np.uint64(0xFF)
    for _ in range(3):
        _round(v)
    hashes: _Words = v[0] ^ v[1] ^ v[2] ^ v[3]
    return hashes.T


def _round(v: list[_Words]) -> None:
    """One SipRound on arrays; wraps around as its additions must."""
    v[0] = v[0] + v[1]
    v[1] = _rotated(v[1], 13) ^ v[0]
    v[0] = _rotated(v[0], 32)
    v[2] = v[2] + v[3]
    v[3] = _rotated(v[3], 16) ^ v[2]
    v[0] = v[0] + v[3]
    v[3] = _rotated(v[3], 21) ^ v[0]
    v[2] = v[2] + v[1]
    v[1] = _rotated(v[1], 17) ^ v[2]
    v[2] = _rotated(v[2], 32)


def _rotated(words: _Words, bits: int) -> _Words:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _prime_from(number: int) -> int:
    """The first prime that is not below `number` (and not below 3)."""
    candidate = max(number, 3)
    while any(candidate % divisor == 0 for divisor in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate
