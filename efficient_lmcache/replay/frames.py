"""The byte layer of a trace file: checked, compressed records between a magic number and a trailer.

Layout: ``magic (8) version (u32)``, then frames ``length (u32) crc32 (u32) zstd(msgpack)``, the last of which is the
footer, then a trailer of fixed size ``footer offset (u64) crc32 of it (u32) end magic (8)``. All integers are
little-endian. A reader finds the footer from the end of the file, so that opening costs the same however long it is.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import zstandard

MAGIC = b"ELMTRACE"
END_MAGIC = b"ELMTREND"
VERSION = 1
READABLE_VERSIONS = (1,)

_PREAMBLE = struct.Struct("<8sI")
_FRAME = struct.Struct("<II")
_TRAILER = struct.Struct("<QI8s")
_COMPRESSION_LEVEL = 6


class TraceError(ValueError):
    """A trace that cannot be written or read as asked; the message names the file and, where known, the record."""


class NoTraceError(TraceError):
    """There is no trace of a readable version at that path; other errors of a reader are damage."""


def preamble() -> bytes:
    """The first bytes of every trace this build writes."""
    return _PREAMBLE.pack(MAGIC, VERSION)


def pack_frame(record: Any, level: int = _COMPRESSION_LEVEL) -> bytes:
    """One record (anything msgpack can carry) as a length-prefixed, checked frame, compressed at a zstd level."""
    payload = zstandard.ZstdCompressor(level=level).compress(msgpack.packb(record))
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def pack_trailer(footer_offset: int) -> bytes:
    """The last bytes of a finished trace: where its footer starts (bytes from the start of the file)."""
    offset = struct.pack("<Q", footer_offset)
    return _TRAILER.pack(footer_offset, zlib.crc32(offset), END_MAGIC)


def read_frame(file: BinaryIO, offset: int, path: Path, name: str) -> tuple[Any, int]:
    """The record at `offset` and the offset after it. `name` says in errors which record this is."""
    file.seek(offset)
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        raise TraceError(f"{path}: {name} is cut off: the file ends inside it")
    length, checksum = _FRAME.unpack(head)
    # A damaged length must not make us allocate gigabytes: never ask for more than the file has.
    if offset + _FRAME.size + length > os.fstat(file.fileno()).st_size:
        raise TraceError(f"{path}: {name} is cut off or its length is damaged: it would reach past the end of the file")
    payload = file.read(length)
    if zlib.crc32(payload) != checksum:
        raise TraceError(f"{path}: {name} is damaged: its checksum does not match")
    try:
        record = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(payload), strict_map_key=False)
    except (zstandard.ZstdError, ValueError, msgpack.UnpackException) as error:
        raise TraceError(f"{path}: {name} cannot be decoded: {error}") from error
    return record, offset + _FRAME.size + length


def check_preamble(file: BinaryIO, path: Path) -> int:
    """The offset of the first frame; NoTraceError unless `file` starts as a trace of a readable version."""
    head = file.read(_PREAMBLE.size)
    if len(head) < _PREAMBLE.size or not head.startswith(MAGIC):
        raise NoTraceError(f"{path}: not a trace, but `trace import` may make one of it")
    _, version = _PREAMBLE.unpack(head)
    if version not in READABLE_VERSIONS:
        readable = ", ".join(map(str, READABLE_VERSIONS))
        raise NoTraceError(f"{path}: trace format version {version}; this build reads version {readable}")
    return _PREAMBLE.size


def find_footer(file: BinaryIO, path: Path) -> int:
    """The offset of the footer frame, from the trailer; TraceError says where an unfinished file stops."""
    size = os.fstat(file.fileno()).st_size
    if size >= _PREAMBLE.size + _TRAILER.size:
        file.seek(size - _TRAILER.size)
        offset, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
        if magic == END_MAGIC and checksum == zlib.crc32(struct.pack("<Q", offset)):
            return int(offset)
    raise TraceError(f"{path}: unfinished, truncated or damaged at its end: {_last_whole_record(file, path)}")


def _last_whole_record(file: BinaryIO, path: Path) -> str:
    """Says which is the last record that a file without a trailer still holds whole."""
    offset, last, count = _PREAMBLE.size, None, 0
    while True:
        try:
            record, offset = read_frame(file, offset, path, "record")
        except TraceError:
            break
        if isinstance(record, dict) and "task_id" in record:
            last, count = record["task_id"], count + 1
    if last is None:
        return "it holds no whole task"
    return f"its last whole record is task {last!r} (number {count})"
