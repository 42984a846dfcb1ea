"""The default transport: one file per engine, for a worker and a scheduler of one user on one host.

    <memory-backed dir>/efficient-lmcache-<uid>/     0700; locked (flock) while anyone changes what is listed in it
        <hash of the engine id>/                     locked by the engine's live sink, so unlocked means dead
            report                                   replaced by an atomic rename, so a reader never sees half of it

The kernel drops a lock with its process, however that dies, so locks tell the living from the dead where process ids,
which are reused, do not.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from efficient_lmcache.telemetry.report import MAX_PAYLOAD_BYTES
from efficient_lmcache.telemetry.transport import ReportSink, ReportSource

_REPORT = "report"
_UNFINISHED = "report.new"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def runtime_directory() -> Path:
    """Where this user's channels are. The same in all processes of one engine.

    Memory-backed where possible: the scheduler reads it, and must not wait for a disk that a cache tier keeps busy.
    Not XDG_RUNTIME_DIR, which is unset in most containers and goes away when its user logs out.
    """
    shared_memory = Path("/dev/shm")
    base = shared_memory if os.access(shared_memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"efficient-lmcache-{os.geteuid()}"


class LocalSink(ReportSink):
    """Publishes into this host's channel of `engine_id`, and removes the channels of engines that died.

    `engine_id` is unique to one start of one engine, or names what several engines share, who `claim` before they
    publish: a second live sink of the same id fails with BlockingIOError. Nothing is touched before the first of these.
    """

    def __init__(self, engine_id: str, directory: Path | None = None) -> None:
        self._directory = directory or runtime_directory()
        self._name = _channel_name(engine_id)
        self._channel_fd: int | None = None

    def claim(self) -> bool:
        """Whether the channel is ours, from now on if it was nobody's. Raises OSError."""
        if self._channel_fd is None:
            try:
                self._channel_fd = self._claim_channel()
            except BlockingIOError:
                return False
        return True

    def publish(self, payload: bytes) -> None:
        if self._channel_fd is None:
            self._channel_fd = self._claim_channel()
        try:
            _write(self._channel_fd, payload)
        except FileNotFoundError:  # someone removed the channel: make it anew next time
            self._release()
            raise

    def close(self) -> None:
        if self._channel_fd is None:
            return
        try:
            with _locked_root(self._directory) as root_fd:
                _remove_channel(root_fd, self._name, self._channel_fd)
        finally:
            self._release()

    def _claim_channel(self) -> int:
        with suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)
        with _locked_root(self._directory) as root_fd:
            _remove_dead_channels(root_fd)
            with suppress(FileExistsError):
                os.mkdir(self._name, 0o700, dir_fd=root_fd)
            try:
                return _open_locked(root_fd, self._name)
            except BlockingIOError as error:
                raise BlockingIOError(error.errno, "a live process already publishes under this engine id") from None

    def _release(self) -> None:
        if self._channel_fd is not None:
            os.close(self._channel_fd)
            self._channel_fd = None


class LocalSource(ReportSource):
    """Reads this host's channel of `engine_id`. Holds nothing open, so a channel made anew is found at once."""

    def __init__(self, engine_id: str, directory: Path | None = None) -> None:
        self._directory = directory or runtime_directory()
        self._report = f"{_channel_name(engine_id)}/{_REPORT}"

    def latest(self) -> bytes | None:
        try:
            root_fd = _open_private(self._directory)
        except FileNotFoundError:
            return None
        try:
            report_fd = os.open(self._report, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root_fd)
        except FileNotFoundError:
            return None
        finally:
            os.close(root_fd)
        try:
            return os.read(report_fd, MAX_PAYLOAD_BYTES + 1)  # one more, so that the codec notices what is too long
        finally:
            os.close(report_fd)

    def close(self) -> None:
        pass


def _channel_name(engine_id: str) -> str:
    """A file name for any engine id, which may hold slashes or be longer than a name can be."""
    return hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _open_private(directory: Path) -> int:
    """A descriptor of `directory`, once it is sure that nobody else can have put anything into it.

    Anyone may create the directory in a shared /tmp first, or a link in its place. What is opened through the
    descriptor stays in the directory that was checked.
    """
    directory_fd = os.open(directory, _DIRECTORY_FLAGS)
    status = os.fstat(directory_fd)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and not mode & 0o077:
        return directory_fd
    os.close(directory_fd)
    raise PermissionError(
        errno.EPERM,
        f"owned by user {status.st_uid} with mode {mode:04o}; it must be owned by user {os.geteuid()} with mode 0700",
        str(directory),
    )


@contextmanager
def _locked_root(directory: Path) -> Iterator[int]:
    """Opens `directory` and keeps every other sink from adding or removing channels meanwhile."""
    root_fd = _open_private(directory)
    try:
        fcntl.flock(root_fd, fcntl.LOCK_EX)
        yield root_fd
    finally:
        os.close(root_fd)


def _open_locked(root_fd: int, name: str) -> int:
    """A descriptor of channel `name`, which is locked until it is closed. BlockingIOError when a live sink has it."""
    channel_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=root_fd)
    try:
        fcntl.flock(channel_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(channel_fd)
        raise
    return channel_fd


def _write(channel_fd: int, payload: bytes) -> None:
    report_fd = os.open(_UNFINISHED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=channel_fd)
    with open(report_fd, "wb") as report:
        report.write(payload)
    os.replace(_UNFINISHED, _REPORT, src_dir_fd=channel_fd, dst_dir_fd=channel_fd)


def _remove_dead_channels(root_fd: int) -> None:
    for name in os.listdir(root_fd):
        with suppress(OSError):  # alive, or nothing of ours: neither may keep the caller from its own channel
            channel_fd = _open_locked(root_fd, name)
            try:
                _remove_channel(root_fd, name, channel_fd)
            finally:
                os.close(channel_fd)


def _remove_channel(root_fd: int, name: str, channel_fd: int) -> None:
    for file in (_REPORT, _UNFINISHED):
        with suppress(FileNotFoundError):
            os.unlink(file, dir_fd=channel_fd)
    os.rmdir(name, dir_fd=root_fd)
