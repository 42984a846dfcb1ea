"""Names of what LMCache's keys leave out of a request, wherever such a name is written down: keyed digests.

A tenant is who sends a `cache_salt`. A salt is what keeps a tenant's prefixes its own, as good as a password: keys,
logs and telemetry never hold it. An adapter's name is no secret, but what its keys are called cannot be guessed either.
"""

from __future__ import annotations

import functools
import hashlib
import os

#: The digests' secret, the same for all engines that share a remote tier or a telemetry deployment. Unset, whoever sees
#: a digest can test guesses at the salt.
TENANT_KEY_VARIABLE = "EFFICIENT_LMCACHE_TENANT_KEY"


def tenant_digest(cache_salt: str) -> str:
    """32 hexadecimal digits, the same in every process with the same `TENANT_KEY_VARIABLE`."""
    return _digest(cache_salt, b"tenant")


def adapter_digest(name: str, path: str) -> str:
    """As `tenant_digest`, for a LoRA adapter: one that is loaded under an old name from elsewhere is another one."""
    return _digest(repr((name, path)), b"adapter")


def _digest(text: str, person: bytes) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, key=_key(), digest_size=16, person=person).hexdigest()


@functools.cache
def _key() -> bytes:
    # Of any length, where BLAKE2b takes 64 bytes.
    return hashlib.blake2b(os.environ.get(TENANT_KEY_VARIABLE, "").encode("utf-8", "surrogateescape")).digest()
