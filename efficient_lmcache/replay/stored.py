"""Stored JSON, read and checked: run.json and sweep.json, which name their schema, and JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from efficient_lmcache.replay.shapes import Shape, problem

T = TypeVar("T")


def read_stored(file: Path, schema: str, type_: TypeAdapter[T], made_by: str, error: type[ValueError]) -> T:
    """The content of `file`.

    Args:
        made_by: the command whose directories hold such a file.

    Raises:
        error: it is absent, not JSON, of another schema, or lacks or garbles a field.
    """
    try:
        text = file.read_bytes()
        content = json.loads(text)
    except OSError as unread:
        raise error(f"{file}: {unread.strerror}; expected a directory made by `{made_by}`") from unread
    except (ValueError, RecursionError) as unread:
        raise error(f"{file}: not JSON ({unread})") from unread
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise error(f"{file}: its schema is {found!r}; only {schema!r} can be read")
    try:
        # From JSON, a strict check takes lists for tuples and objects for dataclasses; a text is no number in any case.
        return type_.validate_json(text, strict=True)
    except ValidationError as invalid:
        raise error(f"{file}: {problem(invalid)}") from invalid


def read_rows(file: Path, fields: type[Shape], error: type[ValueError]) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, none for an absent one; a last line cut short by a kill is left out.

    Raises:
        error: a line that is not a JSON object with these fields.
    """
    try:
        lines = file.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as unread:
        raise error(f"{file}: cannot be read: {unread.strerror}") from unread
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as unread:
            raise error(f"{file}: line {number}: not JSON ({unread})") from unread
        if not isinstance(row, dict):
            raise error(f"{file}: line {number}: {type(row).__name__}; it must be an object")
        try:
            fields.model_validate(row)
        except ValidationError as invalid:
            raise error(f"{file}: line {number}: {problem(invalid)}") from invalid
        rows.append(row)
    return rows
