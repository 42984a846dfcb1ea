"""The connector that vLLM instantiates: once in the scheduler, once in every worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from efficient_lmcache.connector import plugin, vllm_adapter
from efficient_lmcache.connector.admission import DecisionLog, RequestAdmission
from efficient_lmcache.connector.async_restores import forget_used
from efficient_lmcache.connector.client_params import ClientParams, drop_question
from efficient_lmcache.connector.isolation import RequestIsolation
from efficient_lmcache.connector.lost_restores import LossesHeard, LostRestores
from efficient_lmcache.connector.metrics import ConnectorPromMetrics, ConnectorStats, StatsCollector
from efficient_lmcache.connector.offload import WorkerOffload
from efficient_lmcache.connector.options import ConnectorOptions, OptionError, parse_options
from efficient_lmcache.connector.prerequisites import require_what_options_name
from efficient_lmcache.connector.remote import start_remote_admission
from efficient_lmcache.connector.telemetry import SchedulerTelemetry
from efficient_lmcache.core.admission import ADMISSIONS, AdmissionPolicy
from efficient_lmcache.core.tasks import TaskInference
from efficient_lmcache.telemetry.failure_log import FailureLog

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from efficient_lmcache.connector.lmcache_adapter import SchedulerSide

_logger = logging.getLogger(__name__)


class Closeable(Protocol):
    def close(self) -> None: ...


class EfficientLMCacheConnector(LMCacheConnectorV1):
    """LMCache in-process, with working-set-aware write admission and copy-time deduplication.

    Lookup, restore, eviction, keys and serialization are LMCache's. With `efficient.admission: none` stores are too.

    Raises:
        OptionError: for a bad `efficient.*` option, before LMCache starts.
    """

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> Any:
        """In server mode, a connector of another class: vLLM knows this one by name, and asks it for metrics."""
        # Where vLLM loaded this class by its module path, plugins may be switched off.
        plugin.register()
        vllm_adapter.adopt_logging()
        if parse_options(vllm_adapter.extra_config(vllm_config)).mode == "server":
            from efficient_lmcache.connector.server_connector import ServerConnector

            return ServerConnector(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._options = parse_options(vllm_adapter.extra_config(vllm_config))
        # In a worker, too, before LMCache starts: if the scheduler alone refused to start, LMCache's threads would keep
        # its workers, and vLLM would wait for them for ever.
        if vllm_adapter.is_first_rank(vllm_config):
            require_what_options_name(self._options)
        super().__init__(vllm_config, role, kv_cache_config)
        self._stats = StatsCollector()
        self._engine_id = vllm_adapter.engine_id(vllm_config)
        self._offload: WorkerOffload | None = None
        self._telemetry: SchedulerTelemetry | None = None
        self._admission: RequestAdmission | None = None
        self._failures: dict[str, FailureLog] = {}
        self._losses_heard = LossesHeard()
        self._lost = LostRestores(self._lmcache_engine)
        if role == KVConnectorRole.SCHEDULER:
            # vLLM also loads this module where it only wants our metrics; LMCache is not imported for that.
            from efficient_lmcache.connector.lmcache_adapter import SchedulerSide

            self._client_params = ClientParams()
            self._lmcache = SchedulerSide(self._lmcache_engine)
            self._isolation = RequestIsolation(self._lmcache.obstacle_to_tags)
            start_or_do_without(lambda: self._start_admission(vllm_config))

    def _start_admission(self, vllm_config: VllmConfig) -> None:
        lmcache = self._lmcache
        options = options_despite(_obstacle_to_admission(vllm_config, lmcache), self._options)
        bytes_per_token = max(vllm_adapter.stage_bytes_per_token(vllm_config))
        parameters = options.admission_parameters(
            chunk_tokens=lmcache.chunk_tokens,
            bytes_per_token=bytes_per_token,
            capacity_bytes=lmcache.host_tier_bytes,
        )
        policy = ADMISSIONS[options.admission](parameters)
        self._telemetry = telemetry = SchedulerTelemetry(options, self._engine_id, self._stats)
        self._admission = RequestAdmission(
            policy,
            TaskInference(vllm_adapter.hash_block_tokens(self._kv_cache_config)),
            reports=self._telemetry.reports,
            clock=time.monotonic,
            stats=self._stats,
            decision_log=open_decision_log(options, policy, self._engine_id),
            pool_lookups=self._telemetry.lookups,
            remote=start_remote_admission(
                options, lmcache, parameters, self._engine_id, lambda: telemetry.pool_estimate
            ),
        )
        _logger.info("%s", _start_up_line(options, lmcache, bytes_per_token))
        if lmcache.has_remote_tier and vllm_adapter.fails_lost_restores(vllm_config):
            _logger.warning(
                "kv_load_failure_policy is fail: vLLM fails a request whose chunks the remote tier evicts between "
                "lookup and restore. Set it to recompute"
            )

    # Scheduler

    def on_new_request(self, request: Request) -> None:
        self._client_params.check(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._isolation.may_use_lmcache(request):
            return 0, False
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if matched[0] is not None and self._admission is not None:
            self._admission.on_lookup(request, self._lmcache.host_match_tokens)
        return (self._lmcache.restorable_tokens(request, matched[0]) if matched[0] else matched[0]), matched[1]

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        # Again: the next input of a streaming session brings parameters of its own, and is not looked up.
        self._isolation.may_use_lmcache(request)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._admission is not None:
            self._admission.on_scheduled(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        resumed = vllm_adapter.resumed(scheduler_output)
        if resumed:
            self._guarded("Settling resumed requests", lambda: self._lmcache.settle_resumed(resumed))
        without_lmcache = self._isolation.without_lmcache
        if without_lmcache:
            scheduler_output = vllm_adapter.with_token_ids(scheduler_output)
        metadata = super().build_connector_meta(scheduler_output)
        self._lmcache.withhold(metadata, without_lmcache)
        self._losses_heard.tell(metadata)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._losses_heard.hear(connector_output.invalid_block_ids)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.num_output_tokens == 0:
            drop_question(request, "ret_first_tok")
        result = super().request_finished(request, block_ids)
        self._isolation.forget(request.request_id)
        if self._admission is not None:
            self._admission.forget(request.request_id)
        self._guarded("Forgetting an ended request", lambda: self._lmcache.forget(request.request_id))
        return result

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from efficient_lmcache.connector.lmcache_adapter import caches_of_the_model

        stored = caches_of_the_model(self._lmcache_engine, kv_caches)
        drafting = len(kv_caches) - len(stored)
        if drafting:
            _logger.warning("LMCache stores the model's KV, not that of the %d layers that draft for it", drafting)
        super().register_kv_caches(stored)
        self._guarded("Setting up deduplication and telemetry", self._start_offload)

    def _start_offload(self) -> None:
        engine = self._lmcache_engine.lmcache_engine
        # None: LMCache could not start and has said so, or this rank stores nothing (MLA).
        if engine is not None and engine.storage_manager is not None:
            from efficient_lmcache.connector.lmcache_adapter import WorkerSide

            # What the scheduler's side has logged: of another engine's input, not even duplicates are dropped.
            hands_over = handed_over_kv(self._vllm_config) is not None
            options = _without_admission(self._options) if hands_over else self._options
            speaks_for_all = vllm_adapter.speaks_for_all_ranks(self._vllm_config)
            self._offload = WorkerOffload(WorkerSide(engine), self._engine_id, options, speaks_for_all)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._guarded("Settling lost restores", lambda: self._lost.before_restores(self._get_connector_metadata()))
        super().start_load_kv(forward_context, **kwargs)
        self._guarded("Noting lost restores", self._lost.after_restores)
        self._guarded(
            "Releasing restored chunks once",
            lambda: forget_used(self._lmcache_engine, self._get_connector_metadata()),
        )

    def wait_for_save(self) -> None:
        self._guarded("Withholding stores", lambda: self._lost.withhold_stores(self._get_connector_metadata()))
        super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        offload = self._offload
        if offload is not None:
            self._guarded("Releasing ended requests", lambda: offload.requests_ended(finished_req_ids))
        return super().get_finished(finished_req_ids)

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._offload.take_stats() if self._offload is not None else self._stats.take()

    def _guarded(self, what: str, action: Callable[[], None]) -> None:
        """Nothing of ours may fail an engine that plain LMCache would keep serving."""
        failures = self._failures.get(what) or self._failures.setdefault(what, FailureLog(_logger, what))
        try:
            action()
        except Exception as error:
            failures.failed(error)
        else:
            failures.succeeded()

    def shutdown(self) -> None:
        close_parts(self._offload, self._telemetry, self._admission)
        super().shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ConnectorStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        # MultiConnector looks statistics up by their connector's name, in the API server too.
        plugin.register()
        arguments = (vllm_config, metric_types, labelnames, per_engine_labelvalues)
        if parse_options(vllm_adapter.extra_config(vllm_config)).mode == "server":
            from efficient_lmcache.connector.server_connector import ServerConnector

            return ServerConnector.build_prom_metrics(*arguments)
        return ConnectorPromMetrics(*arguments)


def _obstacle_to_admission(vllm_config: VllmConfig, lmcache: SchedulerSide) -> str | None:
    """Why write admission makes no sense in this engine, if so."""
    if obstacle := handed_over_kv(vllm_config):
        return obstacle
    if lmcache.is_layerwise:
        return "LMCache's use_layerwise stores and evicts layer by layer"
    if not lmcache.host_tier_bytes:
        return "LMCache has no CPU tier (local_cpu is off)"
    if lmcache.unknown_tier is not None:
        return (
            f"what the CPU tier evicts is kept by LMCache's {lmcache.unknown_tier}, which a declined store would miss"
        )
    return None


def handed_over_kv(vllm_config: VllmConfig) -> str | None:
    """The obstacle to write admission that has nothing to do with LMCache."""
    if vllm_adapter.hands_over_kv(vllm_config):
        return "with a kv_role other than kv_both, stores are another engine's input"
    return None


def options_despite(obstacle: str | None, options: ConnectorOptions) -> ConnectorOptions:
    """The options in force: without write admission where something stands in its way, which is logged."""
    if obstacle is None or options.admission == "none":
        return options
    _logger.warning("efficient.admission is none in this engine: %s", obstacle)
    return _without_admission(options)


def _without_admission(options: ConnectorOptions) -> ConnectorOptions:
    return options.model_copy(update={"admission": "none"})


def start_or_do_without(start: Callable[[], None]) -> None:
    """Start write admission. A user's mistake ends the engine; what only we stumble over does not.

    Raises:
        OptionError: as `start` does.
    """
    try:
        start()
    except OptionError:
        raise
    except Exception as error:
        FailureLog(_logger, "Starting write admission").failed(error)


def close_parts(*parts: Closeable | None) -> None:
    """Close each, whatever becomes of the others: LMCache is closed after them."""
    for part in parts:
        try:
            if part is not None:
                part.close()
        except Exception as error:
            _logger.warning("Closing %s failed: %s: %s", type(part).__name__, type(error).__name__, error)


def open_decision_log(options: ConnectorOptions, policy: AdmissionPolicy, engine_id: str) -> DecisionLog | None:
    if options.decision_log is None:
        return None
    return DecisionLog(options.decision_log, policy, time.monotonic, engine_id)


def _start_up_line(options: ConnectorOptions, lmcache: SchedulerSide, bytes_per_token: int) -> str:
    """Everything an operator checks first, in one line."""
    tier = f"host tier {lmcache.host_tier_bytes / 1024**3:.3f} GiB/rank" if lmcache.host_tier_bytes else "no host tier"
    remote = ", with a remote tier" if lmcache.has_remote_tier else ""
    return (
        f"Efficient-LMCache: in-process mode, {tier}{remote}, {bytes_per_token / 1024:g} KiB/token/rank, "
        f"chunk {lmcache.chunk_tokens} tokens, admission {options.admission}, telemetry {options.telemetry_transport}"
    )
