"""The processes of one run: its engines, and where asked for one LMCache server and one redis-server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from efficient_lmcache.replay.lmcache_server import lmcache_command, lmcache_environment, lmcache_is_ready
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.preflight import ModelFacts
from efficient_lmcache.replay.redis_server import redis_command, redis_is_ready
from efficient_lmcache.replay.rundir import RunDirectory
from efficient_lmcache.replay.server import (
    LMCachePorts,
    Server,
    ServerOptions,
    engine_is_ready,
    environment,
    free_ports,
    is_cpu_build,
    serve_command,
    share_of,
)

CommandOf = Callable[[ServerOptions, int], list[str]]


@dataclass(frozen=True, slots=True)
class Ports:
    """On 127.0.0.1; None where the run has no such process."""

    engines: tuple[int, ...]
    lmcache: LMCachePorts | None
    redis: int | None

    @classmethod
    def of(cls, options: RunOptions, ports: list[int]) -> Ports:
        """The first ones of `ports`, which are at least the engines' number and three."""
        rest = iter(ports)
        engines = tuple(next(rest) for _ in range(options.engines))
        lmcache = LMCachePorts(next(rest), next(rest)) if options.has_lmcache_server else None
        return cls(engines, lmcache, next(rest) if options.has_redis else None)

    @classmethod
    def free(cls, options: RunOptions) -> Ports:
        """That nobody listens on now."""
        return cls.of(options, free_ports(options.engines + 3))


@dataclass(frozen=True, slots=True)
class Part:
    """One process: how it is started, and how one sees that it is ready."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    log: Path
    is_ready: Callable[[int], bool] = engine_is_ready

    def server(self) -> Server:
        return Server(self.command, self.environment, self.port, self.log, self.name, self.is_ready)


@dataclass(frozen=True, slots=True)
class Deployment:
    """All processes of a run, before any is started.

    Attributes:
        shared: what the engines need and share, to be started before them.
        lmcache: the LMCache server among `shared`, if there is one.
        engines: in the order of their numbers.
    """

    shared: tuple[Part, ...]
    lmcache: Part | None
    engines: tuple[Part, ...]

    @contextmanager
    def started(self, timeout_s: float) -> Iterator[list[Server]]:
        """The engines' servers, all ready.

        Raises:
            ServerError: a process died, or was not ready after `timeout_s`.
        """
        with ExitStack() as stopping:
            for part in self.shared:
                stopping.enter_context(part.server()).wait_until_ready(timeout_s)
            servers = [stopping.enter_context(part.server()) for part in self.engines]
            for server in servers:
                server.wait_until_ready(timeout_s)
            yield servers


def plan_deployment(
    options: RunOptions,
    model: ModelFacts,
    context_tokens: int,
    directory: RunDirectory,
    metrics_dir: Path,
    ports: Ports,
    inherited: Mapping[str, str],
    command_of: CommandOf = serve_command,
) -> Deployment:
    """What the run starts, with its logs in `directory`.

    Args:
        metrics_dir: where each engine's processes share their counters, each engine's in a directory of its own.
        inherited: the caller's environment.
        command_of: an engine's command line.
    """
    shared: list[Part] = []
    lmcache = None
    if ports.lmcache is not None:
        words = lmcache_command(options.host_gib, options.tensor_parallel, options.chunk_tokens, ports.lmcache)
        variables, log = lmcache_environment(inherited), directory.path / "lmcache-server.log"
        lmcache = Part("the LMCache server", words, variables, ports.lmcache.http, log, lmcache_is_ready)
        shared.append(lmcache)
    if ports.redis is not None:
        words, log = redis_command(ports.redis, directory.path), directory.path / "redis.log"
        shared.append(Part("redis-server", words, dict(inherited), ports.redis, log, redis_is_ready))
    engines = []
    for number, port in enumerate(ports.engines):
        of_engine = directory.of_engine(number, options.engines)
        engine = _engine_options(options, model, context_tokens, of_engine, metrics_dir, ports, number)
        name = "the server" if options.engines == 1 else f"engine {number}"
        words, variables = command_of(engine, port), environment(engine, inherited)
        engines.append(Part(name, words, variables, port, of_engine.server_log))
    return Deployment(tuple(shared), lmcache, tuple(engines))


def _engine_options(
    options: RunOptions,
    model: ModelFacts,
    context_tokens: int,
    directory: RunDirectory,
    metrics_dir: Path,
    ports: Ports,
    number: int,
) -> ServerOptions:
    return ServerOptions(
        compile_model=not is_cpu_build(),
        model=options.model,
        vocab_size=model.vocab_size,
        connector=options.connector if options.has_tier else "none",
        admission=options.admission,
        host_gib=options.host_gib,
        chunk_tokens=options.chunk_tokens,
        max_model_len_tokens=context_tokens,
        bytes_per_token=model.bytes_per_token,
        decision_log=directory.decisions.resolve(),
        metrics_dir=metrics_dir / f"engine-{number}",
        gpu_kv_tokens=options.gpu_kv_tokens,
        block_tokens=options.block_tokens,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        write_threshold_chunks=options.write_threshold_chunks,
        occupancy_threshold=options.occupancy_threshold,
        activity_window_s=options.activity_window_s,
        tensor_parallel=options.tensor_parallel,
        gpu_memory_utilization=options.gpu_memory_utilization,
        prefix_caching=options.prefix_caching,
        vllm_args=options.vllm_args,
        lmcache_server=ports.lmcache,
        lazy_offload=options.lazy_offload and options.has_lmcache_server,
        redis_url=None if ports.redis is None else f"redis://127.0.0.1:{ports.redis}",
        cpus=_cpus(number, options.engines),
    )


def _cpus(number: int, engines: int) -> tuple[int, ...] | None:
    return None if engines == 1 else share_of(os.sched_getaffinity(0), number, engines)
