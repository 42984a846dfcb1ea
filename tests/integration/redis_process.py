"""A real redis-server that tests kill, stop, restart, protect by passwords, and reach by TLS or a socket."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from efficient_lmcache.telemetry.redis_settings import RedisSettings


class RedisProcess:
    """Empty at every start. `cli` runs commands over its Unix socket, which reaches it wherever it runs.

    Args:
        directory: of its socket, its log and its files.
        arguments: of redis-server.
        tls: instead of plain connections.
        host: its address.
        prefix: of its command line, to run it elsewhere (`ip netns exec …`).
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        tls: bool = False,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        if shutil.which("redis-server") is None:
            # CI must not pass by skipping.
            give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
            give_up("no redis-server on PATH: apt-get install redis-server")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.host = host
        self.socket = directory / "redis.sock"
        self._log = directory / "redis.log"
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        bind = ["--bind", host, "--unixsocket", str(self.socket), "--protected-mode", "no"]
        self._command = [*prefix, "redis-server", *bind, *ports, "--save", "", "--dir", str(directory), *arguments]
        self.process = self._started()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}"

    def settings(self, **options: str) -> RedisSettings:
        return RedisSettings(self.url, **options)

    def cli(self, *command: str, login: Sequence[str] = ()) -> str:
        result = subprocess.run(
            ["redis-cli", "-s", str(self.socket), *login, *command], capture_output=True, text=True, timeout=10
        )
        return result.stdout.strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = self._started()

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                socket.create_connection((self.host, self.port), timeout=1).close()
                return process
            except OSError:
                time.sleep(0.02)
        process.kill()
        pytest.fail(f"redis-server did not start:\n{self._log.read_text()}")


def wait_until(holds: Callable[[], object], what: str = "it", patience_s: float = 40.0) -> None:
    """Waits as long as a very busy machine may need; a test that waits in vain fails."""
    deadline_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline_s, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(0.01)


def make_certificates(directory: Path) -> tuple[Path, Path, Path]:
    """A private authority, and the certificate and key that it gives to 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = builder("authority", authority_key).add_extension(x509.BasicConstraints(True, None), True)
    import ipaddress

    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server = builder("redis", server_key).add_extension(addresses, False)
    paths = directory / "ca.pem", directory / "redis.pem", directory / "redis.key"
    pem = serialization.Encoding.PEM
    paths[0].write_bytes(authority.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    paths[1].write_bytes(server.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    paths[2].write_bytes(server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return paths
