"""What `replay run` is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.driver import DriverOptions, ReplayOptionError
from efficient_lmcache.replay.spelling import option

BLOCK_TOKENS = 128  # of vLLM's KV cache: the default on CPUs, and every GPU backend takes it
ADMISSIONS = ("recompute", "none", "fixed", "conditioned")
CONNECTORS = ("efficient", "lmcache")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `replay run` is told.

    Attributes:
        admission: recompute (no host tier) | none (plain offload) | fixed | conditioned.
        host_gib: host tier in GiB per rank; `recompute` ignores it.
        active_pool, time_scale, label_tasks, call_timeout_s: see `driver.DriverOptions`.
        gpu_kv_tokens: K_G; None leaves it to vLLM.
        chunk_tokens: b, a multiple of BLOCK_TOKENS.
        connector: efficient (ours) | lmcache (LMCache's own, unmodified; admission none).
        start_timeout_s: the server must be ready within that time.
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
    connector: str = "efficient"
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    label_tasks: bool = True
    call_timeout_s: float = 3600.0
    start_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if self.admission not in ADMISSIONS:
            raise ReplayOptionError(f"--admission is {self.admission!r}; allowed: {', '.join(ADMISSIONS)}")
        if self.connector not in CONNECTORS:
            raise ReplayOptionError(f"--connector is {self.connector!r}; allowed: {', '.join(CONNECTORS)}")
        if self.connector == "lmcache" and self.admission not in ("none", "recompute"):
            raise ReplayOptionError(
                f"--connector lmcache has no write admission: --admission is {self.admission!r}; it must be none"
            )
        if self.has_tier and not 0 < self.host_gib < float("inf"):
            raise ReplayOptionError(
                f"--host-gib is required for admission {self.admission}: a positive number, not {self.host_gib:g}"
            )
        if self.chunk_tokens < 1 or self.chunk_tokens % BLOCK_TOKENS:
            raise ReplayOptionError(f"--chunk-tokens is {self.chunk_tokens}; it must be a multiple of {BLOCK_TOKENS}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ReplayOptionError(f"{option(name)} is {value}; it must be at least 1")
        self.driver  # noqa: B018 - checks its own options

    @property
    def has_tier(self) -> bool:
        """Whether there is a connector at all."""
        return self.admission != "recompute"

    @property
    def driver(self) -> DriverOptions:
        """The driver's share."""
        # Without a connector vLLM warns of every label.
        label_tasks = self.label_tasks and self.has_tier
        return DriverOptions(self.active_pool, self.time_scale, label_tasks, self.call_timeout_s)

    def to_json(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
