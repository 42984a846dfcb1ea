"""What processes take over time: memory, descriptors, threads; and whether it grows. For `soak.py`."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

#: The first and the last such share of the samples are compared.
_ENDS = 0.2
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment.

    Attributes:
        process: a name that tells it from the others of its tree, and its process id.
        rss_bytes: resident, shared pages included.
        pss_bytes: resident, of each page its share.
        descriptors: open files and sockets.
    """

    process: str
    rss_bytes: int
    pss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Trend:
    """What became of a process: medians of the first and of the last fifth of its samples."""

    process: str
    samples: int
    rss_bytes: tuple[float, float]
    pss_bytes: tuple[float, float]
    descriptors: tuple[float, float]
    threads: tuple[float, float]

    @property
    def rss_drift(self) -> float:
        """Of the first fifth's median."""
        return _drift(self.rss_bytes)

    @property
    def pss_drift(self) -> float:
        return _drift(self.pss_bytes)

    @property
    def new_descriptors(self) -> float:
        return self.descriptors[1] - self.descriptors[0]

    def faults(self, allowed_drift: float) -> list[str]:
        """What is not as flat as it should be. Less than 1 MiB is an allocator's own, whatever it is a share of."""
        found = []
        gained_bytes = self.rss_bytes[1] - self.rss_bytes[0]
        if self.rss_drift > allowed_drift and gained_bytes > _MIB:
            found.append(f"memory grew by {self.rss_drift:.1%} ({gained_bytes / _MIB:.1f} MiB)")
        if self.new_descriptors > 0:
            found.append(f"{self.new_descriptors:g} more descriptors")
        if self.threads[1] > self.threads[0]:
            found.append(f"{self.threads[1] - self.threads[0]:g} more threads")
        return found


def _drift(ends: tuple[float, float]) -> float:
    return ends[1] / ends[0] - 1 if ends[0] else 0.0


def sample(roots: Mapping[str, int]) -> list[Sample]:
    """Every process of every tree; those that end meanwhile are left out.

    Args:
        roots: process ids by the name of what runs there.
    """
    found = []
    for name, root in roots.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(root)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    found.append(_sample(name, process))
    return found


def _sample(name: str, process: psutil.Process) -> Sample:
    with process.oneshot():
        memory = process.memory_full_info()
        title = _title(process)
        return Sample(
            process=f"{name} {title}".strip() + f" ({process.pid})",
            rss_bytes=memory.rss,
            pss_bytes=memory.pss,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
        )


def _title(process: psutil.Process) -> str:
    """What the process calls itself (`VLLM::EngineCore`), or which module of Python's own it is."""
    words = process.cmdline()
    joined = " ".join(words)
    for part in ("resource_tracker", "forkserver"):
        if part in joined:
            return part
    return words[0] if len(words) == 1 or "::" in words[0] else ""


def trends(moments: Sequence[Iterable[Sample]]) -> list[Trend]:
    """Of every process that is in all moments; there must be at least one."""
    by_process: dict[str, list[Sample]] = {}
    for moment in moments:
        for seen in moment:
            by_process.setdefault(seen.process, []).append(seen)
    return [_trend(name, rows) for name, rows in by_process.items() if len(rows) == len(moments)]


def _trend(name: str, rows: Sequence[Sample]) -> Trend:
    share = max(1, round(len(rows) * _ENDS))

    def ends(attribute: str) -> tuple[float, float]:
        values = [getattr(row, attribute) for row in rows]
        return statistics.median(values[:share]), statistics.median(values[-share:])

    return Trend(name, len(rows), ends("rss_bytes"), ends("pss_bytes"), ends("descriptors"), ends("threads"))


def come_and_gone(moments: Sequence[Iterable[Sample]]) -> list[str]:
    """Processes that are not in all moments: each ended, or started, during a time in which neither should happen."""
    seen_in = Counter(seen.process for moment in moments for seen in moment)
    return sorted(process for process, count in seen_in.items() if count < len(moments))
