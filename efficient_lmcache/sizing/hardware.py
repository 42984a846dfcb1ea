"""Hardware profiles: what a GPU computes and what its host link carries, each number with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from efficient_lmcache.core.offload_benefit import OffloadCost, least_prefill_s_per_token

_GIB = 1 << 30
_REQUIRED = ("bf16_tflops", "host_link_gb_s", "memory_gb")
_OPTIONAL = ("restore_gib_s",)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU and its host link.

    Attributes:
        bf16_tflops: peak dense BF16 in 1e12 FLOP/s.
        host_link_gb_s: host link per direction in 1e9 bytes/s.
        memory_gb: in 1e9 bytes.
        source: where the numbers are from.
        restore_gib_s: measured rate of restores per rank in 2^30 bytes/s; None where nobody measured.
    """

    name: str
    bf16_tflops: float
    host_link_gb_s: float
    memory_gb: float
    source: str
    restore_gib_s: float | None = None

    @property
    def peak_flop_per_s(self) -> float:
        """Dense BF16."""
        return self.bf16_tflops * 1e12

    @property
    def flop_per_byte(self) -> float:
        """Table 1: peak FLOP per host-link byte; what a hit is worth falls as it rises."""
        return self.peak_flop_per_s / (self.host_link_gb_s * 1e9)

    @property
    def restore_bytes_per_s(self) -> float:
        """B_H2D per rank: as measured, else the link's peak."""
        return self.host_link_gb_s * 1e9 if self.restore_gib_s is None else self.restore_gib_s * _GIB

    @property
    def restore_measured(self) -> bool:
        """Whether `restore_bytes_per_s` was measured; the link's peak makes restores look cheaper than they are."""
        return self.restore_gib_s is not None

    def least_prefill_s_per_token(self, activated_parameters: float, ranks: int) -> float:
        """Prefill time per token of the whole engine at the peak of all ranks."""
        return least_prefill_s_per_token(activated_parameters, ranks, self.peak_flop_per_s)

    def offload_cost(self, bytes_per_token: int, activated_parameters: float, ranks: int) -> OffloadCost:
        """The costs of Eq. 2 with prefill at its peak: an OBR from them is a lower bound if restores were measured."""
        prefill_s = self.least_prefill_s_per_token(activated_parameters, ranks)
        return OffloadCost(bytes_per_token, prefill_s, self.restore_bytes_per_s)


def load_hardware(name: str, user_file: Path | None = None) -> Hardware:
    """The profile of that name, upper or lower case: the user's own before the package's.

    Raises:
        ValueError: naming the file, the profile, the field and what is allowed.
    """
    packaged = resources.files(__package__).joinpath("hardware.yaml").read_text()
    profiles = _profiles(packaged, "hardware.yaml")
    if user_file is not None:
        try:
            text = user_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--hardware {user_file}: cannot be read ({error})") from error
        profiles |= _profiles(text, str(user_file))
    if name.lower() not in profiles:
        known = ", ".join(sorted(profile.name for profile in profiles.values()))
        raise ValueError(f"--gpu {name!r} has no profile; known are {known}; --hardware FILE.yaml adds yours")
    return profiles[name.lower()]


def _profiles(text: str, where: str) -> dict[str, Hardware]:
    """Profiles by lower-case name."""
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f", line {line + 1}"
        raise ValueError(f"{where}{at}: not YAML") from error
    if not isinstance(document, dict) or not all(isinstance(entry, dict) for entry in document.values()):
        raise ValueError(f"{where}: must map names of GPUs to their fields: {', '.join((*_REQUIRED, *_OPTIONAL))}")
    return {str(name).lower(): _profile(str(name), entry, where) for name, entry in document.items()}


def _profile(name: str, entry: Mapping[str, Any], where: str) -> Hardware:
    known = (*_REQUIRED, *_OPTIONAL, "source")
    if unknown := [str(field) for field in entry if field not in known]:
        raise ValueError(f"{where}: {name} has unknown fields {', '.join(unknown)}; allowed are {', '.join(known)}")
    numbers = {field: _positive(name, field, entry, where) for field in _REQUIRED}
    numbers |= {field: _positive(name, field, entry, where) for field in _OPTIONAL if entry.get(field) is not None}
    return Hardware(name=name, source=str(entry.get("source", where)).strip(), **numbers)


def _positive(name: str, field: str, entry: Mapping[str, Any], where: str) -> float:
    value = entry.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{where}: {name}.{field} is {value!r}; it must be a number > 0")
    return float(value)
