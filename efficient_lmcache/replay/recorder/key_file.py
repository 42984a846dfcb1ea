"""The key of a private recording: it lies beside the journal, and goes with it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from efficient_lmcache.replay.recorder.journal import JournalError

KEY_BYTES = 32


def key_path(out: Path) -> Path:
    return out.with_name(out.name + ".key")


def new_key(path: Path) -> bytes:
    """A random key, in a file that only its owner can read."""
    key = secrets.token_bytes(KEY_BYTES)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    return key


def read_key(path: Path) -> bytes:
    """The key of a journal that holds records. JournalError if it is gone or damaged."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise JournalError(
            f"{path}: the private journal's key cannot be read: {error.strerror}; without it the journal tells nothing"
        ) from error
    if len(key) != KEY_BYTES:
        raise JournalError(f"{path}: has {len(key)} bytes; the private journal's key has {KEY_BYTES}")
    return key
