"""Hardware profiles as the simulator reads them: peaks, how close engines come, and where each number is from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from efficient_lmcache.simulate._engine_state import StepCosts
from efficient_lmcache.sizing.hardware import Hardware, load_hardware

_NUMBERS = ("memory_gb_s", "compute_efficiency", "memory_efficiency", "step_s", "sequence_s", "copy_s")
_TEXTS = ("source", "fitted")
_SCHEDULING = "async_scheduling"
_MEASURED = (*StepCosts._fields, "store_s", "stored_token_s")


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU as an engine uses it.

    Attributes:
        hardware: its peaks; None for a measured machine.
        memory_gb_s: of the GPU's own memory, in 1e9 bytes/s.
        compute_efficiency: of the peak, in prefill.
        memory_efficiency: of the memory's peak, in decoding.
        step_s, sequence_s: of every step, and of every call in it.
        copy_s: of every call that a step restores or stores for.
        measured: costs of one machine with one model, by the names of `StepCosts`, `store_s` and `stored_token_s`.
        async_scheduling: whether vLLM plans a step while the one before it is computed; it does not on CPUs.
        source: where all this is from.
    """

    name: str
    hardware: Hardware | None
    memory_gb_s: float
    compute_efficiency: float
    memory_efficiency: float
    step_s: float
    sequence_s: float
    copy_s: float
    measured: Mapping[str, float] | None
    async_scheduling: bool
    source: str

    def with_costs(self, costs: Mapping[str, float]) -> Profile:
        """The profile with other values of some of its costs and efficiencies."""
        if self.measured is not None:
            return replace(self, measured={**self.measured, **costs})
        fields: dict[str, Any] = dict(costs)
        return replace(self, **fields)

    def entry(self) -> dict[str, Any]:
        """As a file of profiles has it under its name."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        costs = numbers if self.measured is None else {"measured": dict(self.measured)}
        return {**costs, _SCHEDULING: self.async_scheduling, "source": self.source}


def load_profile(name: str, user_file: Path | None = None, hardware_file: Path | None = None) -> Profile:
    """The profile of that name, upper or lower case: the user's own before the package's.

    Raises:
        ValueError: naming the file, the profile, the field and what is allowed.
    """
    profiles = _entries(resources.files(__package__).joinpath("profiles.yaml").read_text(), "profiles.yaml")
    if user_file is not None:
        try:
            text = user_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--profiles {user_file}: cannot be read ({error})") from error
        profiles |= _entries(text, str(user_file))
    if name.lower() not in profiles:
        known = ", ".join(sorted(shown for shown, _, _ in profiles.values()))
        raise ValueError(f"--profile {name!r} is not known; known are {known}; --profiles FILE.yaml adds yours")
    return _profile(*profiles[name.lower()], hardware_file)


def _entries(text: str, where: str) -> dict[str, tuple[str, Mapping[str, Any], str]]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not YAML ({error})") from error
    if not isinstance(document, dict) or not all(isinstance(entry, dict) for entry in document.values()):
        raise ValueError(f"{where}: must map names to their fields: {', '.join(_NUMBERS)}, or measured")
    return {str(name).lower(): (str(name), entry, where) for name, entry in document.items()}


def _profile(name: str, entry: Mapping[str, Any], where: str, hardware_file: Path | None) -> Profile:
    allowed = (*(("measured",) if "measured" in entry else _NUMBERS), _SCHEDULING, *_TEXTS)
    if unknown := [str(field) for field in entry if field not in allowed]:
        raise ValueError(f"{where}: {name} has unknown fields {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    async_scheduling = entry.get(_SCHEDULING, True)
    if not isinstance(async_scheduling, bool):
        raise ValueError(f"{where}: {name}.{_SCHEDULING} is {async_scheduling!r}; it must be true or false")
    source = "; ".join(str(entry[field]).strip() for field in _TEXTS if field in entry) or where
    if "measured" in entry:
        costs = entry["measured"]
        if not isinstance(costs, dict) or set(costs) - set(_MEASURED):
            raise ValueError(f"{where}: {name}.measured must have fields of {', '.join(_MEASURED)}")
        measured = {field: _number(f"{name}.measured", field, costs, where) for field in costs}
        return Profile(name, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, measured, async_scheduling, source)
    numbers = {field: _number(name, field, entry, where) for field in _NUMBERS}
    for field in ("memory_gb_s", "compute_efficiency", "memory_efficiency"):
        if not numbers[field]:
            raise ValueError(f"{where}: {name}.{field} is 0; it must be a number > 0")
    hardware = load_hardware(name, hardware_file)
    return Profile(name, hardware, **numbers, measured=None, async_scheduling=async_scheduling, source=source)


def _number(name: str, field: str, entry: Mapping[str, Any], where: str) -> float:
    value = entry.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{where}: {name}.{field} is {value!r}; it must be a number >= 0")
    return float(value)
