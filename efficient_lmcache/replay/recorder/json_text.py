"""JSON as Python's own reader takes it, at several times its speed where the text is ordinary."""

from __future__ import annotations

import json
from typing import Any

import orjson


def read_object(text: bytes) -> dict[str, Any] | None:
    """The object that `text` is; None if it is none."""
    try:
        fields = orjson.loads(text)
    except ValueError:
        # Unlike orjson, vLLM and its clients take NaN and halves of surrogate pairs.
        try:
            fields = json.loads(text)
        except ValueError:
            return None
    return fields if isinstance(fields, dict) else None
