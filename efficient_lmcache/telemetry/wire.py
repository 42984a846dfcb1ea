"""What all messages have in common: one msgpack map with a version, of bounded size, and counts that are counts."""

from __future__ import annotations

from typing import Any

import msgpack

_MAX_COUNT = 2**63 - 1


class ReportError(ValueError):
    """A message that cannot be sent, or a payload that is no message. The text names the field."""


def pack(version: int, fields: dict[str, Any], max_bytes: int) -> bytes:
    """Raises ReportError for a text that is no UTF-8 and for a payload above `max_bytes`."""
    try:
        payload: bytes = msgpack.packb({"version": version, **fields})
    except UnicodeEncodeError as error:
        raise ReportError(f"engine_id cannot be written as UTF-8: {error}") from None
    check_size(payload, max_bytes)
    return payload


def unpack(payload: bytes, version: int, max_bytes: int) -> dict[Any, Any]:
    """The map in `payload`; its fields are still to be checked.

    Raises:
        ReportError: whatever else `payload` holds; no input raises anything else.
    """
    check_size(payload, max_bytes)
    try:
        fields = msgpack.unpackb(payload)
    except Exception as error:  # msgpack names no closed set of errors, and the bytes may be anything
        raise ReportError(f"not msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(fields, dict):
        raise ReportError(f"payload is a {type(fields).__name__}; it must be a map")
    found = fields.get("version")
    if type(found) is not int or found != version:
        raise ReportError(f"version is {found!r:.60}; this reader knows {version}")
    return fields


def check_size(payload: bytes, max_bytes: int) -> None:
    if len(payload) > max_bytes:
        raise ReportError(f"payload has {len(payload)} bytes; at most {max_bytes} are allowed")


def check_engine_id(fields: dict[Any, Any]) -> None:
    engine_id = fields.get("engine_id")
    if not isinstance(engine_id, str) or not engine_id:
        raise ReportError(f"engine_id is {engine_id!r:.60}; it must be a non-empty string")


def check_count(fields: dict[Any, Any], name: str, most: int = _MAX_COUNT) -> None:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= most:  # `type`, because True is an int to isinstance
        raise ReportError(f"{name} is {value!r:.60}; it must be an integer between 0 and {most}")
