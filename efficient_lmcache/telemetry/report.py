"""The wire format of a tier report: one msgpack map, described in docs/telemetry.md."""

from __future__ import annotations

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import wire
from efficient_lmcache.telemetry.wire import ReportError

__all__ = ["FORMAT_VERSION", "MAX_PAYLOAD_BYTES", "ReportError", "decode", "encode"]

#: Rises when a field's meaning changes or a field goes away. A new field that old readers can do without leaves it.
FORMAT_VERSION = 1
MAX_PAYLOAD_BYTES = 4096

_COUNT_FIELDS = (
    "sequence",
    "chunk_tokens",
    "chunk_bytes",
    "registered_chunks",
    "capacity_chunks",
    "evicted_chunks",
    "evicted_chunks_total",
    "rank",
    "eviction_batch_chunks",
    "backing_tiers",
)
# Fields younger than the format's version.
_DEFAULTS = {"rank": 0, "eviction_batch_chunks": 0, "backing_tiers": 0}


def encode(report: TierReport) -> bytes:
    """Encodes everything but `received_s`, which only means something to the receiver.

    Raises:
        ReportError: a field is out of range or of the wrong type, or the payload exceeds `MAX_PAYLOAD_BYTES`.
    """
    fields = {"engine_id": report.engine_id, **{name: getattr(report, name) for name in _COUNT_FIELDS}}
    wire.check_engine_id(fields)
    for name in _COUNT_FIELDS:
        wire.check_count(fields, name)
    return wire.pack(FORMAT_VERSION, fields, MAX_PAYLOAD_BYTES)


def decode(payload: bytes, received_s: float = float("-inf")) -> TierReport:
    """The report in `payload`, stamped with the time of receipt. Fields unknown to this version are ignored.

    Raises:
        ReportError: whatever else `payload` holds; no input raises anything else.
    """
    fields = {**_DEFAULTS, **wire.unpack(payload, FORMAT_VERSION, MAX_PAYLOAD_BYTES)}
    wire.check_engine_id(fields)
    for name in _COUNT_FIELDS:
        wire.check_count(fields, name)
    try:
        counts = {name: fields[name] for name in _COUNT_FIELDS}
        return TierReport(engine_id=fields["engine_id"], received_s=received_s, **counts)
    except ValueError as error:  # TierReport's own rules
        raise ReportError(str(error)) from None
