"""JSON files that name their schema, as run.json and sweep.json do: read, checked, with one error for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def read_stored(file: Path, schema: str, type_: TypeAdapter[T], made_by: str, error: type[ValueError]) -> T:
    """The content of `file`.

    Args:
        made_by: the command whose directories hold such a file.

    Raises:
        error: it is absent, not JSON, of another schema, or lacks or garbles a field.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as problem:
        raise error(f"{file}: {problem.strerror}; expected a directory made by `{made_by}`") from problem
    except ValueError as problem:
        raise error(f"{file}: not JSON ({problem})") from problem
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise error(f"{file}: its schema is {found!r}; only {schema!r} can be read")
    try:
        return type_.validate_python(content)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise error(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from problem
