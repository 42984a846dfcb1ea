"""Whether this machine is the one that a plan asks for.

The tests' machines have no such GPUs, so `nvidia-smi` is a fake executable that prints what the real one prints for the
query (columns and units as NVIDIA documents them); nothing else is faked.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from efficient_lmcache.sweep.plan import PlanError, load_plan
from efficient_lmcache.sweep.requirements import Gpu, Machine, Requirements, check, observe

H20 = Gpu("NVIDIA H20", 95.6, 5, 16)
PAPER = Requirements(gpu="H20", gpus=8, host_memory_gib=700, link="PCIe Gen5 x16")


def machine(gpu: Gpu = H20, count: int = 8, **changed: Any) -> Machine:
    fields = {"no_gpus_because": None, "host_memory_gib": 960.0, "free_disk_gib": 500.0, **changed}
    return Machine(gpus=(gpu,) * count, **fields)


def fake_nvidia_smi(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    executable = directory / "nvidia-smi"
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def printing(*lines: str) -> str:
    return "\n".join(f"echo '{line}'" for line in lines)


def test_the_machine_of_the_plan_lacks_nothing() -> None:
    assert check(PAPER, machine(), host_tier_gib=640, disk_gib=2) == []


def test_everything_that_is_missing_is_said_at_once_with_what_is_there() -> None:
    other = machine(Gpu("NVIDIA H200", 140.4, 5, 16), 1, host_memory_gib=120.0, free_disk_gib=0.5)
    assert check(PAPER, other, host_tier_gib=640, disk_gib=2) == [
        "needs 8 x H20; this machine has 1 x NVIDIA H200 (140 GiB)",
        "needs 700 GiB of host memory, 640 of them for host tiers; 120 GiB are available",
        "needs 2 GiB of disk; 0.5 GiB are free",
    ]


@pytest.mark.parametrize(
    ("name", "device", "fits"),
    [
        ("H20", "NVIDIA H20", True),
        ("h20", "NVIDIA H20-3e", True),
        ("H20", "NVIDIA H200", False),
        ("H20", "NVIDIA GH200 480GB", False),
        ("H800", "NVIDIA H800 PCIe", True),
        ("RTX 3090", "NVIDIA GeForce RTX 3090", True),
        ("RTX 3090", "NVIDIA GeForce RTX 3080", False),
    ],
)
def test_a_device_is_known_by_whole_words_of_its_name(name: str, device: str, fits: bool) -> None:
    assert (not check(Requirements(gpu=name), machine(Gpu(device, 24.0, 4, 16), 1))) == fits


@pytest.mark.parametrize(
    ("link", "generation", "width", "fits"),
    [
        ("PCIe Gen4", 4, 8, True),
        ("PCIe Gen4", 5, 16, True),
        ("PCIe Gen5", 4, 16, False),
        ("PCIe Gen5 x16", 5, 8, False),
        ("PCIe Gen5 x16", 5, 16, True),
        ("PCIe Gen5 x16", None, None, False),
    ],
)
def test_a_link_is_at_least_as_wide_and_as_new(
    link: str, generation: int | None, width: int | None, fits: bool
) -> None:
    failures = check(Requirements(link=link), machine(Gpu("NVIDIA H20", 95.6, generation, width), 2))
    there = "NVIDIA H20 of unknown link" if width is None else f"NVIDIA H20 at PCIe Gen{generation} x{width}"
    assert failures == ([] if fits else [f"needs {link} to each GPU; this machine has 2 x {there}"])


def test_a_plan_that_asks_nothing_runs_anywhere() -> None:
    nothing = Machine(gpus=(), no_gpus_because="no nvidia-smi", host_memory_gib=None, free_disk_gib=0.0)
    assert check(Requirements(), nothing) == []


def test_host_tiers_need_memory_whatever_the_plan_says() -> None:
    assert check(Requirements(), machine(), host_tier_gib=1280) == [
        "needs 1280 GiB of host memory, 1280 of them for host tiers; 960 GiB are available"
    ]


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ({"gpu": "H20", "driver": 570}, "requires.driver is not a key of a plan; allowed there: gpu, gpus, "),
        ({"gpus": 0}, "requires.gpus is 0: input should be greater than or equal to 1"),
        ({"gpu": ""}, "requires.gpu is '': string should have at least 1 character"),
        ({"host_memory_gib": "400"}, "requires.host_memory_gib is '400': input should be a valid number"),
        ({"link": "NVLink"}, "requires.link: 'NVLink' is no link; allowed: PCIe Gen<generation>, "),
    ],
)
def test_bad_requirements_are_refused_with_the_plan(tmp_path: Path, requires: Any, message: str) -> None:
    path = tmp_path / "plan.yaml"
    runs = [{"admission": "recompute", "active_pool": 1}]
    path.write_text(json.dumps({"name": "bad", "requires": requires, "runs": runs}))
    with pytest.raises(PlanError, match="^" + re.escape(f"{path}: {message}")):
        load_plan(path)


def test_gpus_are_read_as_the_driver_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi(
        monkeypatch, tmp_path, printing(*["NVIDIA H20, 97871, 5, 16"] * 7, "NVIDIA H20, [N/A], [N/A], [N/A]")
    )
    seen = observe(tmp_path)
    assert seen.gpus == (Gpu("NVIDIA H20", 97871 / 1024, 5, 16),) * 7 + (Gpu("NVIDIA H20", 0.0, None, None),)
    assert seen.no_gpus_because is None


def test_the_query_is_one_that_needs_no_header_and_no_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi(monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/arguments')
    observe(tmp_path)
    query = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
    assert (tmp_path / "arguments").read_text() == f"--query-gpu={query} --format=csv,noheader,nounits\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'No devices were found'; exit 6", "nvidia-smi failed with status 6: No devices were found"),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "nvidia-smi failed with status 18: Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("exit 9", "nvidia-smi failed with status 9: nothing"),
        ("true", "nvidia-smi lists no GPU"),
        ("echo 'Hello'", "nvidia-smi printed what is no list of GPUs: 'Hello'"),
    ],
)
def test_without_gpus_the_driver_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    fake_nvidia_smi(monkeypatch, tmp_path, script)
    assert check(Requirements(gpu="H20", gpus=8), observe(tmp_path)) == [f"needs 8 x H20; {reason}"]


def test_without_a_driver_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check(Requirements(gpus=2), observe(tmp_path)) == [
        "needs 2 x NVIDIA GPU; no nvidia-smi: this machine has no NVIDIA GPU, or no driver"
    ]


@pytest.mark.parametrize(("visible", "left"), [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-8932f937", 1)])
def test_gpus_hidden_from_cuda_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, left: int
) -> None:
    fake_nvidia_smi(monkeypatch, tmp_path, printing(*["NVIDIA H20, 97871, 5, 16"] * 8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = observe(tmp_path)
    assert len(seen.gpus) == left
    if not left:
        assert seen.no_gpus_because == f"CUDA_VISIBLE_DEVICES={visible!r} hides all 8 GPUs"


def test_memory_and_disk_are_this_machines_own(tmp_path: Path) -> None:
    seen = observe(tmp_path / "runs" / "not-yet-there")
    assert seen.host_memory_gib is not None
    assert 0 < seen.host_memory_gib < 1 << 14
    assert 0 < seen.free_disk_gib < 1 << 24
