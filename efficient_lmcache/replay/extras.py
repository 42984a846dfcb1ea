"""Packages that only some commands need."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, purpose: str) -> Any:
    """Import `module`, or raise ValueError saying what needs it and which extras bring it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{purpose} needs the package {package}: install efficient-lmcache[cpu] or efficient-lmcache[gpu]"
        ) from error
