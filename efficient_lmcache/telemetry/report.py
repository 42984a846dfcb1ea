"""The wire format of a tier report: one msgpack map, described in docs/telemetry.md."""

from __future__ import annotations

from typing import Any

import msgpack

from efficient_lmcache.core.tier import TierReport

#: Rises when a field's meaning changes or a field goes away. A new field that old readers can do without leaves it.
FORMAT_VERSION = 1
MAX_PAYLOAD_BYTES = 4096
_MAX_COUNT = 2**63 - 1

_COUNT_FIELDS = (
    "sequence",
    "chunk_tokens",
    "chunk_bytes",
    "registered_chunks",
    "capacity_chunks",
    "evicted_chunks",
    "evicted_chunks_total",
)


class ReportError(ValueError):
    """A report that cannot be sent, or a payload that is no report. The message names the field."""


def encode(report: TierReport) -> bytes:
    """Encodes everything but `received_s`, which only means something to the receiver.

    Raises:
        ReportError: a field is out of range or of the wrong type, or the payload exceeds `MAX_PAYLOAD_BYTES`.
    """
    fields = {"engine_id": report.engine_id, **{name: getattr(report, name) for name in _COUNT_FIELDS}}
    _check_fields(fields)
    try:
        payload: bytes = msgpack.packb({"version": FORMAT_VERSION, **fields})
    except UnicodeEncodeError as error:
        raise ReportError(f"engine_id cannot be written as UTF-8: {error}") from None
    _check_size(payload)
    return payload


def decode(payload: bytes) -> TierReport:
    """The report in `payload`, with `received_s` left at its default. Fields unknown to this version are ignored.

    Raises:
        ReportError: whatever else `payload` holds; no input raises anything else.
    """
    _check_size(payload)
    try:
        fields = msgpack.unpackb(payload)
    except Exception as error:  # msgpack names no closed set of errors, and the bytes may be anything
        raise ReportError(f"not msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(fields, dict):
        raise ReportError(f"payload is a {type(fields).__name__}; it must be a map")
    version = fields.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ReportError(f"version is {version!r:.60}; this reader knows {FORMAT_VERSION}")
    _check_fields(fields)
    try:
        return TierReport(engine_id=fields["engine_id"], **{name: fields[name] for name in _COUNT_FIELDS})
    except ValueError as error:  # TierReport's own rules
        raise ReportError(str(error)) from None


def _check_size(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ReportError(f"payload has {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")


def _check_fields(fields: dict[Any, Any]) -> None:
    engine_id = fields.get("engine_id")
    if not isinstance(engine_id, str) or not engine_id:
        raise ReportError(f"engine_id is {engine_id!r:.60}; it must be a non-empty string")
    for name in _COUNT_FIELDS:
        value = fields.get(name)
        if type(value) is not int or not 0 <= value <= _MAX_COUNT:  # `type`, because True is an int to isinstance
            raise ReportError(f"{name} is {value!r:.60}; it must be an integer between 0 and {_MAX_COUNT}")
