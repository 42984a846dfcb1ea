"""Records of text recordings: lines of a plain or gzip file, and their fields, checked.

Every error names the file, the line, the field and what is allowed there.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from efficient_lmcache.core.references import Ints

Progress = Callable[[int, int], None]
"""Called with how much of the recording is read, and how much there is."""

LARGEST_TIME = 1e20
"""In any unit; beyond it sums of times are no numbers any more. Nanoseconds since 1970 are below 1e19."""

_LATEST_S = 1e11
"""In seconds since 1970 the year 5138; milliseconds since 1970 are above it from 1973 on."""

_GZIP_MAGIC = b"\x1f\x8b"
_UNREAD_MAGICS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RecordingError(ValueError):
    """A recording that cannot be read as it is, whichever of its records are skipped."""


class RecordError(RecordingError):
    """One malformed record; the records after it can still be read."""


_Record = TypeVar("_Record")

Skip = Callable[[RecordError], None]
"""Is called with the error of a malformed record, which is left out unless this raises it."""


def stop(error: RecordError) -> None:
    """The `Skip` that leaves nothing out."""
    raise error


def ignore(error: RecordError) -> None:
    """The `Skip` for another pass over the same recording, whose first one has counted or raised it."""


def kept(reads: Iterable[Callable[[], _Record]], skip: Skip) -> Iterator[_Record]:
    """What each of `reads` returns, without those that raise RecordError."""
    for read in reads:
        try:
            record = read()
        except RecordError as error:
            skip(error)
        else:
            yield record


def lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[str, bytes]]:
    """Every non-empty line with "file: line number"; `progress` counts the file's bytes.

    A file that is one object written over several lines comes whole, with "file". Raises RecordingError where the file
    cannot be read on, naming the last line that could.
    """
    number = 0
    try:
        total = path.stat().st_size
        with path.open("rb") as raw:
            stream = _decompressed(raw, path)
            for number, line in enumerate(stream, start=1):
                if number == 1 and _opens_array(line):
                    raise RecordingError(f"{path}: is one JSON array; its records need lines: jq -c '.[]' does that")
                if number == 1 and _goes_on(line, stream):
                    yield str(path), line + stream.read()
                elif line.strip():
                    yield f"{path}: line {number}", line
                if progress is not None:
                    progress(raw.tell(), total)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path}: cannot be read after line {number}: {error}") from error


def _opens_array(first: bytes) -> bool:
    """Whether a first line opens an array of objects."""
    begin = first.removeprefix(_BYTE_ORDER_MARK).strip()
    return begin == b"[" or begin.startswith(b"[{")


def _goes_on(first: bytes, stream: BufferedReader) -> bool:
    """Whether a first line opens an object and nothing else, whose fields follow."""
    return first.removeprefix(_BYTE_ORDER_MARK).strip() == b"{" and stream.peek(1).lstrip().startswith(b'"')


def _decompressed(raw: BufferedReader, path: Path) -> BufferedReader:
    if not raw.seekable():
        raise RecordingError(f"{path}: is a pipe; a recording is read more than once, so it must be a file")
    head = raw.read(8)
    raw.seek(0)
    for magic, name in _UNREAD_MAGICS.items():
        if head.startswith(magic):
            raise RecordingError(f"{path}: is a {name} file; plain and gzip ones are read, so unpack it first")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise RecordingError(f"{path}: is UTF-16; recordings are UTF-8: iconv -f UTF-16 -t UTF-8 makes one")
    return cast(BufferedReader, gzip.GzipFile(fileobj=raw)) if head.startswith(_GZIP_MAGIC) else raw


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        record = json.loads(line)
    except ValueError as error:
        what = " but binary; unpack an archive first" if b"\0" in line else f": {error}"
        raise RecordError(f"{where}: not JSON{what}") from error
    except RecursionError:
        raise RecordError(f"{where}: not a record: nested too deep") from None
    return as_object(record, where)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """`value` itself, if it is a JSON object."""
    if not isinstance(value, dict):
        raise RecordError(f"{where} must be a JSON object, not {_kind(value)}")
    return value


def objects(record: dict[str, Any], field: str, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object of a list, and where it is."""
    value = record.get(field)
    if not isinstance(value, list):
        raise RecordError(f"{where}: {field} must be a list of objects, not {_kind(value)}")
    for number, entry in enumerate(value):
        place = f"{where}: {field}[{number}]"
        yield as_object(entry, place), place


def text(record: dict[str, Any], field: str, where: str) -> str:
    """A text with at least one character."""
    value = record.get(field)
    if not isinstance(value, str) or not value:
        raise RecordError(f"{where}: {field} must be a non-empty text, not {_kind(value)}")
    check_unicode(value, f"{where}: {field}")
    return value


def check_unicode(value: str, where: str) -> None:
    """RecordError for a text with half of a surrogate pair, as the JSON escape \\ud800: no encoding has it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(f"{where} is not Unicode: {error}") from error


def integer(record: dict[str, Any], field: str, where: str, least: int = 0) -> int:
    """An integer of at least `least`."""
    value = record.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise RecordError(f"{where}: {field} must be an integer >= {least}, not {_kind(value)}")
    return value


def seconds(record: dict[str, Any], field: str, where: str, *, required: bool = False) -> float:
    """A finite number >= 0 in the recording's own unit; nan where it is absent or null, unless `required`."""
    value = record.get(field)
    if value is None and not required:
        return math.nan
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise RecordError(f"{where}: {field} must be a finite number >= 0, not {_kind(value)}")
    if value > LARGEST_TIME:
        raise RecordError(f"{where}: {field} is {_kind(value)}; no time exceeds {LARGEST_TIME:g}")
    return float(value)


def clock_s(record: dict[str, Any], field: str, where: str) -> float:
    """A time in seconds, since 1970 or any moment later."""
    value_s = seconds(record, field, where, required=True)
    check_clock(value_s, f"{where}: {field}")
    return value_s


def check_clock(value_s: float | None, where: str) -> None:
    """RecordError for a time in another unit: pauses would be a thousand times as long."""
    if value_s is not None and value_s > _LATEST_S:
        raise RecordError(f"{where} is {value_s:.0f}; it must be in seconds, and no such time is beyond {_LATEST_S:g}")


def integers(record: dict[str, Any], field: str, where: str) -> Ints:
    """A list of 64-bit integers >= 0; those from 2^63 on become negative ones, as different from each other."""
    value = record.get(field)
    if not isinstance(value, list):
        raise RecordError(f"{where}: {field} must be a list of integers, not {_kind(value)}")
    if not value:
        return np.empty(0, np.int64)
    try:
        array = np.asarray(value)
        if array.dtype.kind == "f" and all(isinstance(each, int) for each in value):  # no signed type holds them all
            array = np.asarray(value, np.uint64)
    except (ValueError, OverflowError):  # ragged, or out of every integer type
        array = np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
        raise RecordError(f"{where}: {field} must hold integers from 0 to 2^64 - 1 only")
    return array.astype(np.int64, copy=False)


def identifier(record: dict[str, Any], field: str, where: str) -> int | str | None:
    """An integer or a text with at least one character; None where it is absent or null."""
    value = record.get(field)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return text(record, field, where)


def required_identifier(record: dict[str, Any], field: str, where: str) -> int | str:
    """An integer or a text with at least one character."""
    value = identifier(record, field, where)
    if value is None:
        raise RecordError(f"{where}: {field} must be an integer or a non-empty text; it is absent")
    return value


def block_counts(tokens: int, block_tokens: int) -> tuple[int, int]:
    """How many blocks a prompt of n tokens lists: its full ones, and possibly the last, partial one."""
    return tokens // block_tokens, -(-tokens // block_tokens)


def check_blocks(count: int, tokens: int, block_tokens: int, field: str, where: str) -> None:
    """RecordError for another number of blocks than `block_counts`."""
    full, _ = counts = block_counts(tokens, block_tokens)
    if count not in counts:
        raise RecordError(
            f"{where}: {field} has {count} entries; {tokens} tokens in blocks of {block_tokens} make {full} full ones, "
            f"and at most one more that is partial{_alike(count, tokens)}"
        )


def blocks(record: dict[str, Any], where: str, block_tokens: int) -> tuple[Ints, int]:
    """The block ids and the tokens of a prompt, `hash_ids` and `input_length`."""
    tokens = integer(record, "input_length", where, least=1)
    ids = integers(record, "hash_ids", where)
    check_blocks(len(ids), tokens, block_tokens, "hash_ids", where)
    return ids, tokens


def _alike(count: int, tokens: int) -> str:
    return f"; so many entries are blocks of about {-(-tokens // count)}" if count else ""


def _kind(value: Any) -> str:
    """A value as an error shows it: itself where it is short."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds, plain or gzip."""
    try:
        with path.open("rb") as raw:
            content = _decompressed(raw, path).read()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordingError(f"{path}: cannot be read: {reason}") from error
    return parse_object(content, str(path))


def files(directory: Path, suffix: str, *, deep: bool = False) -> list[Path]:
    """A directory's files whose names end so, plain or gzip, by path; with `deep`, also those of directories in it."""
    find = directory.rglob if deep else directory.glob
    return sorted((*find(f"*{suffix}"), *find(f"*{suffix}.gz")))


def stem(path: Path) -> str:
    """A file's name without what its format and packing add: a task's, where no field names it."""
    name = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".traj")
    return os.fsencode(name).decode("utf-8", "replace")
