"""The images, without Docker: what their files say, and what the copied files alone install."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from helm_chart import CHART, container, find, manifests, values_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
PINS = {"gpu": DOCKER / "gpu-requirements.txt", "cpu": ROOT / "requirements" / "cpu.txt"}
every_flavour = pytest.mark.parametrize("flavour", PINS)


def instructions(flavour: str) -> list[tuple[str, str]]:
    """Keyword and argument of every instruction, continuation lines joined."""
    text = (DOCKER / f"{flavour}.Dockerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def copied(flavour: str) -> list[tuple[str, str]]:
    """Sources and destinations of COPY."""
    return [
        (source, words[-1])
        for keyword, argument in instructions(flavour)
        if keyword == "COPY"
        for words in [argument.split()]
        for source in words[:-1]
    ]


@every_flavour
def test_the_image_serves_as_a_user(flavour: str) -> None:
    by_keyword = dict(instructions(flavour))
    assert json.loads(by_keyword["ENTRYPOINT"]) == ["efficient-lmcache", "serve"]
    user = int(by_keyword["USER"].split(":")[0])
    assert user == yaml.safe_load((CHART / "values.yaml").read_text())["securityContext"]["runAsUser"]
    keywords = [keyword for keyword, _ in instructions(flavour)]
    assert "RUN" not in keywords[keywords.index("USER") :]


@every_flavour
def test_base_and_packages_are_pinned(flavour: str) -> None:
    by_keyword = dict(instructions(flavour))
    assert by_keyword["FROM"] == "${BASE_IMAGE}"
    base = dict(
        argument.split("=") for keyword, argument in instructions(flavour) if keyword == "ARG" and "=" in argument
    )
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base["BASE_IMAGE"])
    installs = [argument for keyword, argument in instructions(flavour) if "pip install" in argument]
    assert all("--no-deps" in argument for argument in installs)
    for line in PINS[flavour].read_text().splitlines():
        assert line.startswith("#") or re.match(r"[a-z0-9-]+==\S+", line), line


@every_flavour
def test_the_pins_hold_everything_that_the_package_asks_for(flavour: str) -> None:
    pins = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for line in PINS[flavour].read_text().splitlines()
        if not line.startswith("#")
        for pin in [Requirement(line)]
    }
    for line in requires("efficient-lmcache") or []:
        requirement = Requirement(line)
        extras = ("", flavour, "redis")
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            version = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement


@every_flavour
def test_what_is_copied_exists_and_is_not_ignored(flavour: str) -> None:
    ignore = (DOCKER / f"{flavour}.Dockerfile.dockerignore").read_text().split()
    assert ignore[0] == "*"
    for source, _ in copied(flavour):
        assert (ROOT / source).exists()
        assert f"!{source}" in ignore
    assert any(fnmatch("efficient_lmcache/core/__pycache__", pattern) for pattern in ignore[1:])


def test_the_copied_files_alone_install_the_command(tmp_path: Path) -> None:
    for source, destination in copied("cpu"):
        target = tmp_path / destination.lstrip("/")
        if destination.endswith("/"):
            target /= source
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, target)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
    subprocess.run([*build, "./src"], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(entry_points).decode())
    assert entries["console_scripts"]["efficient-lmcache"] == "efficient_lmcache.cli:main"
    assert entries["vllm.general_plugins"]
    source = ROOT / "efficient_lmcache"
    data = [str(path.relative_to(ROOT)) for path in source.rglob("*") if path.suffix in {".yaml", ".css", ".js"}]
    assert set(data) <= set(names)


def test_the_chart_starts_what_the_image_would() -> None:
    pytest.importorskip("helm_python", reason="no Helm engine (pip install helm-python-sdk)")
    for name, flavour in (("gpu", "gpu"), ("cpu-trial-bundled-redis", "cpu")):
        engine = container(find(manifests(values_of(name)), "Deployment"))
        assert engine["command"] == json.loads(dict(instructions(flavour))["ENTRYPOINT"])
        assert engine["image"].endswith(f"-{flavour}")
