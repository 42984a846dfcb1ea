"""Whether this machine is the one that a sweep plan was written for: checked before the first run."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

_GIB = 1 << 30
_KIB_PER_GIB = 1 << 20
_MIB_PER_GIB = 1 << 10
# The maximum, since an idle GPU runs its link at a lower generation.
_QUERY = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
_NVIDIA_SMI_TIMEOUT_S = 60.0  # without persistence mode each call initialises every GPU
_LINK = re.compile(r"PCIe Gen(\d+)(?: x(\d+))?", re.IGNORECASE)


class Requirements(BaseModel):
    """What a plan asks of the machine; None asks nothing.

    Attributes:
        gpu: a word or words of the device name: `H20` is the NVIDIA H20 and not the H200.
        gpus: how many of them.
        host_memory_gib: available memory of the whole node, host tiers included.
        link: of each GPU to the host at least, as `PCIe Gen5` or `PCIe Gen5 x16`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gpu: str | None = Field(default=None, min_length=1)
    gpus: int = Field(default=1, ge=1)
    host_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    link: str | None = None

    @field_validator("link")
    @classmethod
    def _is_link(cls, link: str | None) -> str | None:
        if link is not None and not _LINK.fullmatch(link):
            raise ValueError(f"{link!r} is no link; allowed: PCIe Gen<generation>, optionally followed by x<width>")
        return link


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device; the link is None where the driver does not tell."""

    name: str
    memory_gib: float
    link_generation: int | None
    link_width: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is.

    Attributes:
        gpus: those that CUDA may use.
        no_gpus_because: why `gpus` is empty.
        host_memory_gib: available now, within the container's limit; None where the system does not tell.
        free_disk_gib: where the runs go.
    """

    gpus: tuple[Gpu, ...]
    no_gpus_because: str | None
    host_memory_gib: float | None
    free_disk_gib: float


def check(requires: Requirements, machine: Machine, *, host_tier_gib: float = 0.0, disk_gib: float = 0.0) -> list[str]:
    """What is missing, one sentence each, with what is needed and what there is; empty if nothing is.

    Args:
        host_tier_gib: host tiers of all ranks at the plan's largest capacity: they are allocated whatever it says.
        disk_gib: what the runs will leave.
    """
    fitting = [gpu for gpu in machine.gpus if _is_named(gpu, requires.gpu)]
    failures = [
        *_missing_gpus(requires, machine, fitting),
        *_slow_links(requires, fitting),
        *_missing_memory(max(requires.host_memory_gib or 0.0, host_tier_gib), host_tier_gib, machine.host_memory_gib),
    ]
    if machine.free_disk_gib < disk_gib:
        failures.append(f"needs {disk_gib:.3g} GiB of disk; {machine.free_disk_gib:.3g} GiB are free")
    return failures


def observe(directory: Path) -> Machine:
    """This machine; `directory`, or the nearest of its parents that exists, is where the runs go."""
    gpus, reason = _observe_gpus()
    existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.is_dir())
    return Machine(gpus, reason, _available_memory_gib(), shutil.disk_usage(existing).free / _GIB)


def _is_named(gpu: Gpu, wanted: str | None) -> bool:
    return wanted is None or bool(re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", gpu.name, re.IGNORECASE))


def _missing_gpus(requires: Requirements, machine: Machine, fitting: list[Gpu]) -> Iterable[str]:
    if requires.gpu is None and "gpus" not in requires.model_fields_set:
        return
    if len(fitting) < requires.gpus:
        there = (
            machine.no_gpus_because
            or f"this machine has {_counted(f'{gpu.name} ({gpu.memory_gib:.0f} GiB)' for gpu in machine.gpus)}"
        )
        yield f"needs {requires.gpus} x {requires.gpu or 'NVIDIA GPU'}; {there}"


def _slow_links(requires: Requirements, fitting: list[Gpu]) -> Iterable[str]:
    match = _LINK.fullmatch(requires.link or "")
    if match is None:
        return
    generation, width = int(match[1]), int(match[2] or 0)
    slow = [gpu for gpu in fitting if (gpu.link_generation or 0) < generation or (gpu.link_width or 0) < width]
    if slow:
        yield f"needs {requires.link} to each GPU; this machine has {_counted(map(_link_name, slow))}"


def _missing_memory(needed_gib: float, host_tier_gib: float, available_gib: float | None) -> Iterable[str]:
    if available_gib is not None and available_gib < needed_gib:
        tiers = f", {host_tier_gib:.4g} of them for host tiers" if host_tier_gib else ""
        yield f"needs {needed_gib:.4g} GiB of host memory{tiers}; {available_gib:.4g} GiB are available"


def _link_name(gpu: Gpu) -> str:
    if gpu.link_generation is None or gpu.link_width is None:
        return f"{gpu.name} of unknown link"
    return f"{gpu.name} at PCIe Gen{gpu.link_generation} x{gpu.link_width}"


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _observe_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S)
    except FileNotFoundError:
        return (), "no nvidia-smi: this machine has no NVIDIA GPU, or no driver"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not answer ({error})"
    if result.returncode:
        said = (result.stdout.strip() or result.stderr.strip() or "nothing").splitlines()[0]
        return (), f"nvidia-smi failed with status {result.returncode}: {said}"
    try:
        found = tuple(_gpu(row) for row in csv.reader(result.stdout.splitlines(), skipinitialspace=True) if row)
    except ValueError:
        return (), f"nvidia-smi printed what is no list of GPUs: {result.stdout.strip()[:200]!r}"
    return _visible(found)


def _gpu(row: list[str]) -> Gpu:
    name, memory_mib, generation, width = row
    memory_gib = float(memory_mib) / _MIB_PER_GIB if memory_mib.replace(".", "").isdigit() else 0.0
    return Gpu(name.strip(), memory_gib, _count(generation), _count(width))


def _count(text: str) -> int | None:
    """None for `[N/A]` and its like."""
    return int(text) if text.strip().isdigit() else None


def _visible(found: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], str | None]:
    """As many as CUDA_VISIBLE_DEVICES leaves; which of unlike ones is up to CUDA's own order."""
    if not found:
        return (), "nvidia-smi lists no GPU"
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return found, None
    left = found[: len([name for name in names.split(",") if name.strip() not in ("", "-1")])]
    return left, None if left else f"CUDA_VISIBLE_DEVICES={names!r} hides all {len(found)} GPUs"


def _available_memory_gib() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return min(kib["MemAvailable"] / _KIB_PER_GIB, _container_limit_gib())


def _container_limit_gib() -> float:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text()) / _GIB
    except (OSError, ValueError):  # no control group, or "max"
        return float("inf")
