"""A tenant's name wherever one is written down: a keyed digest of the `cache_salt` that its requests carry.

A salt is what keeps a tenant's prefixes its own, as good as a password: keys, logs and telemetry never hold it.
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
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(salt, key=_key(), digest_size=16, person=b"tenant").hexdigest()


@functools.cache
def _key() -> bytes:
    # Of any length, where BLAKE2b takes 64 bytes.
    return hashlib.blake2b(os.environ.get(TENANT_KEY_VARIABLE, "").encode("utf-8", "surrogateescape")).digest()
