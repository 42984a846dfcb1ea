"""What vLLM gets in server mode: LMCache's multiprocess connector, with working-set-aware write admission."""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from efficient_lmcache.connector import plugin, vllm_adapter
from efficient_lmcache.connector.aborted_restores import AbortedRestores
from efficient_lmcache.connector.client_params import ClientParams, drop_question
from efficient_lmcache.connector.connector import (
    EfficientLMCacheConnector,
    close_parts,
    handed_over_kv,
    open_decision_log,
    options_despite,
    start_or_do_without,
)
from efficient_lmcache.connector.isolation import own_tags
from efficient_lmcache.connector.lmcache_server_adapter import ServerSide, default_http_url, prom_metrics
from efficient_lmcache.connector.metrics import ConnectorPromMetrics, ConnectorStats, StatsCollector
from efficient_lmcache.connector.options import ConnectorOptions, OptionError, parse_options
from efficient_lmcache.connector.prerequisites import require_what_options_name
from efficient_lmcache.connector.server_admission import ServerAdmission
from efficient_lmcache.connector.server_tier import ServerTier
from efficient_lmcache.connector.telemetry import SchedulerTelemetry
from efficient_lmcache.connector.tenants import tenant_digest
from efficient_lmcache.core.admission import ADMISSIONS
from efficient_lmcache.core.tasks import TaskInference
from efficient_lmcache.telemetry.failure_log import FailureLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_logger = logging.getLogger(__name__)


class ServerConnector(LMCacheMPConnector):
    """`EfficientLMCacheConnector` makes one of these in server mode.

    Lookup, restore, eviction, keys and what is offloaded when are LMCache's; in the workers, everything is. With
    `efficient.admission: none` stores are too.

    Raises:
        OptionError: for a bad `efficient.*` option, before LMCache starts.
        Exception: whatever LMCache's connector raises, as when the server cannot be reached.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._options = parse_options(vllm_adapter.extra_config(vllm_config))
        if vllm_adapter.is_first_rank(vllm_config):
            require_what_options_name(self._options)
        super().__init__(vllm_config, role, kv_cache_config)
        self._stats = StatsCollector()
        self._telemetry: SchedulerTelemetry | None = None
        self._admission: ServerAdmission | None = None
        self._client_params = ClientParams()
        self._aborted_restores = AbortedRestores()
        # Requests of which vLLM has not said yet whether they are restored.
        self._offered: set[str] = set()
        self._counting = FailureLog(_logger, "Counting transfers")
        self._releasing = FailureLog(_logger, "Unlocking what an ended request had looked up")
        if role == KVConnectorRole.SCHEDULER:
            start_or_do_without(lambda: self._start_admission(vllm_config))

    def _start_admission(self, vllm_config: VllmConfig) -> None:
        self._server = server = ServerSide(self)
        options = options_despite(handed_over_kv(vllm_config), self._options)
        if len(server.tokens_per_block) > 1:
            bytes_per_token = vllm_adapter.grouped_bytes_per_token(self._kv_cache_config, server.tokens_per_block)
        else:
            # Of a chunk the server has one object per rank. Where they differ, their mean is as good as each.
            bytes_per_token = round(statistics.mean(vllm_adapter.stage_bytes_per_token(vllm_config)))
        policy = ADMISSIONS[options.admission](
            options.admission_parameters(
                chunk_tokens=server.chunk_tokens,
                bytes_per_token=bytes_per_token,
                # The probe tells it.
                capacity_bytes=None,
            )
        )
        http_url = options.server_http_url or default_http_url(server.url)
        tier = ServerTier(
            http_url,
            chunk_tokens=server.chunk_tokens,
            chunk_bytes=server.chunk_tokens * bytes_per_token,
            pieces=server.pieces,
            window_s=options.activity_window_s,
            on_evicted=lambda chunks: self._stats.count("evicted_chunks", chunks),
        )
        engine_id = vllm_adapter.engine_id(vllm_config)
        self._telemetry = SchedulerTelemetry(options, engine_id, self._stats, shared_tier=tier)
        self._admission = ServerAdmission(
            server.decline,
            self._telemetry.pool,
            policy,
            TaskInference(vllm_adapter.hash_block_tokens(self._kv_cache_config)),
            reports=self._telemetry.reports,
            clock=time.monotonic,
            stats=self._stats,
            decision_log=open_decision_log(options, policy, engine_id),
            pool_lookups=self._telemetry.lookups,
        )
        _logger.info("%s", _start_up_line(options, server, http_url, bytes_per_token))
        if vllm_adapter.fails_lost_restores(vllm_config):
            _logger.warning(
                "kv_load_failure_policy is fail: if the LMCache server dies during a restore, vLLM fails the request, "
                "and may end with it. Set it to recompute"
            )
        if self._telemetry.pool is None:
            _logger.info(
                "A and N are what this engine sees: engines that share the server tell each other with "
                "efficient.telemetry.transport=redis"
            )

    # Scheduler

    def on_new_request(self, request: Request) -> None:
        self._client_params.check(request)
        super().on_new_request(request)

    def _get_or_create_request_tracker(self, request: Request) -> Any:
        tracker = super()._get_or_create_request_tracker(request)
        # LMCache's keys hold what it finds in the salt's place: the salt itself, and none with a slash, which ends the
        # engine. Adapters are not in its keys, and in the place of embeddings it sees zeros.
        if vllm_adapter.sends_embeddings(request):
            tracker.cache_salt = tenant_digest(f"embeddings of {request.request_id}")
            tracker.max_offload_tokens = 0
        elif tags := own_tags(request):
            tracker.cache_salt = "".join(tags.values())
        return tracker

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if matched[0]:
            self._offered.add(request.request_id)
        if matched[0] is not None and self._admission is not None and not vllm_adapter.sends_embeddings(request):
            self._admission.on_lookup(request, self._server.host_match_tokens)
        return matched

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        request_id = request.request_id
        if num_external_tokens > 0:
            self._aborted_restores.restore_scheduled(request_id)
        elif request_id in self._offered:
            self._server.restores_nothing(request_id)
        self._offered.discard(request_id)
        if self._admission is not None:
            self._admission.on_scheduled(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        try:
            for name, tokens in self._server.transfers(metadata)._asdict().items():
                if tokens:
                    self._stats.count(name, tokens)
        except Exception as error:
            self._counting.failed(error)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        ended = connector_output
        ended.finished_sending = self._aborted_restores.expected(ended.finished_sending, ended.finished_recving)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id not in self.request_trackers:
            drop_question(request, "cached_token_stats")
        try:
            self._server.release_unscheduled(request.request_id)
        except Exception as error:
            self._releasing.failed(error)
        result = super().request_finished(request, block_ids)
        self._aborted_restores.request_ended(request.request_id, reports_store=result[0])
        self._offered.discard(request.request_id)
        if self._admission is not None:
            self._admission.forget(request.request_id)
        return result

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        ours, theirs = self._stats.take(), super().get_kv_connector_stats()
        if theirs is None:
            return ours
        stats = ours or ConnectorStats()
        stats.data["lmcache"] = theirs.data
        return stats

    def shutdown(self) -> None:
        close_parts(self._telemetry, self._admission)
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
        plugin.register()
        arguments = (vllm_config, metric_types, labelnames, per_engine_labelvalues)
        return ConnectorPromMetrics(*arguments, prom_metrics(*arguments))


# MultiConnector files a connector's statistics under its class's name, and looks them up by its registered one.
ServerConnector.__name__ = EfficientLMCacheConnector.__name__


class EfficientLMCacheMPConnector(ServerConnector):
    """Server mode under a name of its own.

    vLLM asks the class that it finds by name, before there is a connector, whether it can handle several groups of KV
    caches. LMCache's server can; what `EfficientLMCacheConnector` may turn out to be in-process cannot.

    Raises:
        OptionError: also for `efficient.mode: in_process`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        plugin.register()
        vllm_adapter.adopt_logging()
        options = parse_options(vllm_adapter.extra_config(vllm_config))
        if options.mode != "server" and "mode" in options.model_fields_set:
            raise OptionError(
                f"kv_connector_extra_config: efficient.mode={options.mode!r} is not allowed with kv_connector "
                f"{type(self).__name__}; allowed: server, or no mode"
            )
        super().__init__(vllm_config, role, kv_cache_config)


def _start_up_line(options: ConnectorOptions, server: ServerSide, http_url: str, bytes_per_token: int) -> str:
    """Everything an operator checks first, in one line."""
    lazily = ", stored when evicted (lazy offload)" if server.stores_when_evicted else ""
    return (
        f"Efficient-LMCache: server mode, LMCache server {server.url}, its tier probed at {http_url}, "
        f"{bytes_per_token / 1024:g} KiB/token/rank, {server.pieces} ranks' KV per chunk, "
        f"chunk {server.chunk_tokens} tokens{lazily}, admission {options.admission}, "
        f"telemetry {options.telemetry_transport}"
    )
