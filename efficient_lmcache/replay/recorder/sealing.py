"""What a private journal holds of token ids: ciphertext, whose key lies in a file beside it until the trace is made.

Pseudonyms of a long prompt take several times what a proxy may add to a call, and hold up the loop for all others. A
cipher takes nothing of note, and leaves the pseudonyms to the making of the trace. It is a keystream of SHAKE-128,
keyed by its prefix, with a random nonce for each piece of data. Damage is the business of the frames' checksums.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

_NONCE_BYTES = 16


class Seal:
    """Enciphers and deciphers with a recording's key."""

    def __init__(self, key: bytes) -> None:
        # Pseudonyms are made with the key itself.
        self._key = hashlib.blake2b(key=key, person=b"journal").digest()

    def close(self, data: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._mask(nonce, data)

    def open(self, sealed: bytes) -> bytes:
        return self._mask(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:])

    def _mask(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_128(self._key + nonce).digest(len(data))
        return (np.frombuffer(data, np.uint8) ^ np.frombuffer(stream, np.uint8)).tobytes()
