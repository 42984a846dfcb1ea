"""How messages name what a user typed."""

from __future__ import annotations


def option(field: str) -> str:
    """The command-line option of a field: `active_pool` is --active-pool."""
    return "--" + field.replace("_", "-")
