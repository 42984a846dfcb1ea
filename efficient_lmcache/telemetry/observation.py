"""The wire format of an observation: one msgpack map, described in docs/telemetry.md."""

from __future__ import annotations

import struct
from typing import Any

from efficient_lmcache.core.observation import HASH_RANGE, MAX_TASK_HASHES, Observation
from efficient_lmcache.telemetry import wire
from efficient_lmcache.telemetry.wire import ReportError

#: As of `report.FORMAT_VERSION`.
FORMAT_VERSION = 1
MAX_OBSERVATION_BYTES = 8 * MAX_TASK_HASHES + 4096

_COUNT_FIELDS = ("sequence", "window_lookups", "prompt_lookups", "prompt_tokens")


def encode(observation: Observation) -> bytes:
    """Encodes everything but `received_s`.

    Raises:
        ReportError: a field is out of range or of the wrong type, or the payload is too long.
    """
    fields = {
        "engine_id": observation.engine_id,
        "window_s": observation.window_s,
        "tasks": _packed(observation.task_hashes),
        "hash_threshold": observation.hash_threshold,
        "pressure": observation.pressure,
        **{name: getattr(observation, name) for name in _COUNT_FIELDS},
    }
    _check(fields)
    return wire.pack(FORMAT_VERSION, fields, MAX_OBSERVATION_BYTES)


def decode(payload: bytes, received_s: float = float("-inf")) -> Observation:
    """The observation in `payload`, stamped with the time of receipt. Unknown fields are ignored.

    Raises:
        ReportError: whatever else `payload` holds; no input raises anything else.
    """
    fields = wire.unpack(payload, FORMAT_VERSION, MAX_OBSERVATION_BYTES)
    hashes = _check(fields)
    return Observation(
        engine_id=fields["engine_id"],
        window_s=float(fields["window_s"]),
        task_hashes=hashes,
        hash_threshold=fields["hash_threshold"],
        pressure=fields.get("pressure"),
        received_s=received_s,
        **{name: fields[name] for name in _COUNT_FIELDS},
    )


def _packed(hashes: tuple[int, ...]) -> bytes:
    try:
        return struct.pack(f">{len(hashes)}Q", *hashes)
    except struct.error as error:
        raise ReportError(f"tasks: {error}") from None


def _check(fields: dict[Any, Any]) -> tuple[int, ...]:
    """Raises ReportError; returns the task hashes."""
    wire.check_engine_id(fields)
    for name in _COUNT_FIELDS:
        wire.check_count(fields, name)
    wire.check_count(fields, "hash_threshold", most=HASH_RANGE)
    window_s, pressure, tasks = fields.get("window_s"), fields.get("pressure"), fields.get("tasks")
    if not isinstance(window_s, float | int) or isinstance(window_s, bool) or not 0 < window_s < float("inf"):
        raise ReportError(f"window_s is {window_s!r:.60}; it must be a positive number")
    if pressure is not None and type(pressure) is not bool:
        raise ReportError(f"pressure is {pressure!r:.60}; it must be true, false or null")
    if not isinstance(tasks, bytes) or len(tasks) % 8:
        raise ReportError(f"tasks is {tasks!r:.60}; it must be 8 bytes for every task")
    hashes = struct.unpack(f">{len(tasks) // 8}Q", tasks)
    # An engine checks its whole pool's every second: no loop here.
    if list(hashes) != sorted(set(hashes)) or (hashes and hashes[-1] >= fields["hash_threshold"]):
        raise ReportError("tasks do not ascend, or reach hash_threshold")
    if fields["hash_threshold"] < HASH_RANGE and len(hashes) < MAX_TASK_HASHES:
        raise ReportError(f"tasks are {len(hashes)}; hash_threshold allows for leaving some out of {MAX_TASK_HASHES}")
    return hashes
