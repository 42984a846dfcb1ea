"""Writes the table of values into the Helm chart's README, from its schema and its defaults.

python scripts/write_chart_reference.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "deploy/helm/efficient-lmcache"
README = CHART / "README.md"
_BEGIN, _END = "<!-- values: written by scripts/write_chart_reference.py -->\n", "<!-- end of values -->\n"


def rows(schema: dict[str, Any], defaults: Any, name: str = "") -> Iterator[str]:
    """A row per value, in the schema's order. A value without a default is required or left to the software."""
    required = schema.get("required", [])
    for key, value in schema["properties"].items():
        path = f"{name}{key}"
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if value.get("properties"):
            yield from rows(value, default, f"{path}.")
        elif path != "global":
            shown = "" if default is None else f"`{json.dumps(default)}`"
            # An empty text is a value, unless it is too short.
            if key in required and (default is None or (default == "" and "minLength" in value)):
                shown = "**required**"
            yield f"| `{path}` | {shown} | {_allowed(value)} | {value['description']} |"


def _allowed(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    limits = [f"{sign} {value[keyword]:g}" for keyword, sign in signs.items() if keyword in value]
    return " ".join([value["type"], ", ".join(limits)]).strip()


def readme() -> str:
    """README.md with its table as schema and values.yaml have it."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    head, _, rest = README.read_text().partition(_BEGIN)
    tail = rest.partition(_END)[2]
    table = ["| value | default | allowed | meaning |", "|---|---|---|---|", *rows(schema, defaults)]
    return head + _BEGIN + "\n" + "\n".join(table) + "\n\n" + _END + tail


if __name__ == "__main__":
    README.write_text(readme())
