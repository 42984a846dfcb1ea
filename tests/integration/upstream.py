"""How tests read the installed vLLM and LMCache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: Any) -> str:
    return inspect.getsource(thing)
