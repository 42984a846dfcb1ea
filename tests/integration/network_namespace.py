"""Another machine, as far as the network knows: a network namespace at the end of a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Namespace:
    """Attributes:
    name: of the namespace, whose end of the cable is `el0`.
    address: of that end.
    """

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Of a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def cut_the_cable(self) -> None:
        subprocess.run(["ip", "-n", self.name, "link", "set", "el0", "down"], check=True)

    def mend_the_cable(self) -> None:
        subprocess.run(["ip", "-n", self.name, "link", "set", "el0", "up"], check=True)


@contextmanager
def network_namespace() -> Iterator[Namespace]:
    """Skips the test where there is none to have."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    name = here = f"el-{os.getpid()}"
    # Of the network for benchmarks (RFC 2544): four addresses for each process that may be testing.
    network, last = f"198.18.{os.getpid() // 64 % 256}", os.getpid() % 64 * 4
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        for command in (
            f"ip link add {here} type veth peer name el0 netns {name}",
            f"ip addr add {network}.{last + 1}/30 dev {here}",
            f"ip link set {here} up",
            f"ip -n {name} addr add {network}.{last + 2}/30 dev el0",
            f"ip -n {name} link set el0 up",
        ):
            subprocess.run(command.split(), check=True)
        yield Namespace(name, f"{network}.{last + 2}")
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
