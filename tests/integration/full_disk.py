"""The disk of local telemetry, to be filled."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from efficient_lmcache.telemetry.local import runtime_directory

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18


@dataclass(frozen=True)
class FullDisk:
    """Attributes:
    directory: of local telemetry.
    kind: `tmpfs`, a small one of this process's own, or, where nothing can be mounted, `/dev/full` in the place of
        each file about to be written.
    """

    directory: Path
    kind: str

    @staticmethod
    def prepared() -> FullDisk:
        """For this thread and those that it starts; before the engine starts."""
        directory = runtime_directory()
        directory.mkdir(mode=0o700, exist_ok=True)
        libc = ctypes.CDLL(None)
        mounted = (
            libc.unshare(_CLONE_NEWNS) == 0
            and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
            and libc.mount(b"tmpfs", bytes(directory), b"tmpfs", 0, b"size=64k,mode=0700") == 0
        )
        return FullDisk(directory, "tmpfs" if mounted else "/dev/full")

    def fill(self) -> None:
        """Again and again, as whoever writes makes room for a moment when a file is replaced."""
        if self.kind == "tmpfs":
            with suppress(OSError), (self.directory / "fill").open("ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            return
        for channel in self.directory.iterdir():
            with suppress(OSError):
                os.symlink("/dev/full", channel / "report.new")

    def empty(self) -> None:
        for file in (self.directory / "fill", *self.directory.glob("*/report.new")):
            with suppress(OSError):
                if file.is_symlink() or file.name == "fill":
                    file.unlink()
