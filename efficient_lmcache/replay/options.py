"""What `replay run` is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.driver import DriverOptions, ReplayOptionError
from efficient_lmcache.replay.lmcache_server import l1_gib
from efficient_lmcache.replay.routing import ROUTES
from efficient_lmcache.replay.spelling import option

DEFAULT_BLOCK_TOKENS = 128  # of vLLM's KV cache: the default on CPUs, and every GPU backend takes it
ADMISSIONS = ("recompute", "none", "fixed", "conditioned")
CONNECTORS = ("efficient", "lmcache")
MODES = ("in_process", "server")
TELEMETRIES = ("local", "redis")
_CHOICES = {"admission": ADMISSIONS, "connector": CONNECTORS, "mode": MODES, "route": ROUTES, "telemetry": TELEMETRIES}
_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len_tokens",
    "gpu_kv_tokens",
    "chunk_tokens",
    "block_tokens",
    "tensor_parallel",
    "engines",
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `replay run` is told.

    Attributes:
        admission: recompute (no host tier) | none (plain offload) | fixed | conditioned.
        host_gib: host tier in GiB per rank: what it holds before it evicts. In mode `server` all engines share it,
            else each has one. `recompute` ignores it.
        active_pool, time_scale, label_tasks, call_timeout_s: see `driver.DriverOptions`.
        gpu_kv_tokens: K_G; None leaves it to vLLM.
        chunk_tokens: b, a multiple of block_tokens.
        block_tokens: tokens per block of the GPU's KV cache.
        connector: efficient (ours) | lmcache (LMCache's own, unmodified; admission none).
        write_threshold_chunks, occupancy_threshold: kappa and theta; None leaves them to the connector.
        activity_window_s: for how long a task counts as active, and an eviction; None leaves it to the connector.
        max_num_seqs, max_num_batched_tokens: vLLM's limits per step.
        max_model_len_tokens: the server's context; None: as long as the trace's longest call.
        tensor_parallel: ranks.
        gpu_memory_utilization: share of each GPU's memory that vLLM may use; None leaves it to vLLM.
        prefix_caching: whether the GPU's KV cache is searched for prefixes at all.
        vllm_args: more words for vLLM's command line.
        start_timeout_s: the server must be ready within that time.
        mode: in_process (LMCache within each engine) | server (one `lmcache server`). `recompute` ignores it.
        lazy_offload: LMCache's server mode stores what the GPU is about to evict, and not all that is computed.
        engines: vLLM servers.
        route: load | session; see `routing.Router`.
        telemetry: of our connector: local | redis (a redis-server of the run's own). None: redis for several engines.
    """

    trace: Path
    model: Path
    admission: str
    host_gib: float
    active_pool: int
    out: Path
    time_scale: float = 1.0
    gpu_kv_tokens: int | None = None
    chunk_tokens: int = 256
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    connector: str = "efficient"
    write_threshold_chunks: int | None = None
    occupancy_threshold: float | None = None
    activity_window_s: float | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    max_model_len_tokens: int | None = None
    tensor_parallel: int = 1
    gpu_memory_utilization: float | None = None
    prefix_caching: bool = True
    vllm_args: tuple[str, ...] = ()
    label_tasks: bool = True
    call_timeout_s: float = 3600.0
    start_timeout_s: float = 900.0
    mode: str = "in_process"
    lazy_offload: bool = False
    engines: int = 1
    route: str = "load"
    telemetry: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ReplayOptionError(f"{option(name)} is {value!r}; allowed: {', '.join(allowed)}")
        if self.connector == "lmcache" and self.admission not in ("none", "recompute"):
            raise ReplayOptionError(
                f"--connector lmcache has no write admission: --admission is {self.admission!r}; it must be none"
            )
        if self.has_tier and not 0 < self.host_gib < float("inf"):
            raise ReplayOptionError(
                f"--host-gib is required for admission {self.admission}: a positive number, not {self.host_gib:g}"
            )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ReplayOptionError(f"{option(name)} is {value}; it must be at least 1")
        if self.chunk_tokens % self.block_tokens:
            raise ReplayOptionError(
                f"--chunk-tokens is {self.chunk_tokens}; it must be a multiple of --block-tokens, {self.block_tokens}"
            )
        self._check_rule()
        self._check_deployment()
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ReplayOptionError(f"--gpu-memory-utilization is {share:g}; it must be above 0 and at most 1")
        self.driver  # noqa: B018 - checks its own options

    def _check_rule(self) -> None:
        """kappa, theta and the window."""
        kappa, theta, window_s = self.write_threshold_chunks, self.occupancy_threshold, self.activity_window_s
        for name, value, users in (
            ("write_threshold_chunks", kappa, ("fixed", "conditioned")),
            ("occupancy_threshold", theta, ("conditioned",)),
        ):
            if value is not None and self.admission not in users:
                raise ReplayOptionError(f"{option(name)} is for admission {' or '.join(users)}, not {self.admission}")
        if kappa is not None and kappa < 0:
            raise ReplayOptionError(f"--write-threshold-chunks is {kappa}; it must be at least 0")
        if window_s is not None and not 0 < window_s < math.inf:
            raise ReplayOptionError(f"--activity-window-s is {window_s:g}; it must be a finite number > 0")
        if theta is not None and not 0 <= theta <= 1:
            raise ReplayOptionError(f"--occupancy-threshold is {theta:g}; it must be from 0 to 1")

    def _check_deployment(self) -> None:
        """Which parts go together. A sweep's server options hold for its `recompute` runs too, and mean nothing."""
        if self.lazy_offload and self.mode != "server":
            raise ReplayOptionError(f"--lazy-offload is for --mode server, not {self.mode}")
        if self.lazy_offload and self.has_tier and not self.prefix_caching:
            raise ReplayOptionError("--lazy-offload needs --prefix-caching: it waits for evictions of cached prefixes")
        if self.telemetry == "redis" and not self.has_our_connector:
            used = "recompute" if not self.has_tier else f"--connector {self.connector}"
            raise ReplayOptionError(f"--telemetry redis is for our connector; {used} has no telemetry")

    @property
    def has_tier(self) -> bool:
        """Whether there is a connector at all."""
        return self.admission != "recompute"

    @property
    def has_our_connector(self) -> bool:
        return self.has_tier and self.connector == "efficient"

    @property
    def has_lmcache_server(self) -> bool:
        return self.has_tier and self.mode == "server"

    @property
    def has_redis(self) -> bool:
        """Whether engines tell each other of their pools."""
        return self.has_our_connector and (self.telemetry or ("redis" if self.engines > 1 else "local")) == "redis"

    @property
    def tiers(self) -> int:
        """Host tiers of `host_gib` per rank."""
        return 0 if not self.has_tier else 1 if self.mode == "server" else self.engines

    @property
    def host_memory_gib(self) -> float:
        """What all host tiers take."""
        if self.has_lmcache_server:
            return l1_gib(self.host_gib, self.tensor_parallel)
        return self.tiers * self.host_gib * self.tensor_parallel

    @property
    def driver(self) -> DriverOptions:
        """The driver's share."""
        # Without a connector vLLM warns of every label.
        label_tasks = self.label_tasks and self.has_tier
        return DriverOptions(self.active_pool, self.time_scale, label_tasks, self.call_timeout_s)

    def command(self) -> list[str]:
        """The command line that makes this run; defaults are left out."""
        words = ["efficient-lmcache", "replay", "run"]
        for each in fields(self):
            value = getattr(self, each.name)
            if value == each.default or (each.name == "host_gib" and not self.has_tier):
                continue
            if each.name == "vllm_args":
                words += [f"--vllm-arg={word}" for word in value]
            elif isinstance(value, bool):
                words.append(option(each.name) if value else option(f"no_{each.name}"))
            else:
                words += [option(each.name), str(value)]
        return words

    def to_json(self) -> dict[str, Any]:
        """As JSON would read it again."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {**plain, "vllm_args": list(self.vllm_args)}


def with_defaults(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a run.json or a sweep.json has them, with the defaults of those that are newer than the file."""
    newer = ("mode", "lazy_offload", "engines", "route", "telemetry")
    defaults = {each.name: each.default for each in fields(RunOptions) if each.name in newer}
    return {**defaults, **recorded}
