"""An engine's part in its deployment: it says what it saw of the pool, and estimates A and N from what all saw."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import msgpack

from efficient_lmcache.core.observation import (
    Observation,
    PoolEstimate,
    PoolTasks,
    pool_estimate,
    pool_tasks,
    smallest_hashes,
)
from efficient_lmcache.core.workingset import WorkingSetEstimator
from efficient_lmcache.telemetry import redis_keys
from efficient_lmcache.telemetry.cluster import ClusterView
from efficient_lmcache.telemetry.eviction_window import EvictionWindow
from efficient_lmcache.telemetry.failure_log import FailureLog
from efficient_lmcache.telemetry.observation import encode
from efficient_lmcache.telemetry.redis_outbox import RedisOutbox

#: Lookups that may wait for the observer's thread; more are lost, as when that thread is dead.
MAX_WAITING_LOOKUPS = 65_536
_CLOSE_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class Lookup(NamedTuple):
    """A request's first resolved lookup.

    Attributes:
        task: the task's name.
        tenant: whose name it is: a digest of the `cache_salt`.
        is_named: by the client, so that it means the same on every engine.
        prompt_tokens: n.
        now_s: when, on the observer's clock.
        pressure: of the decision.
    """

    task: str
    tenant: str | None
    is_named: bool
    prompt_tokens: int
    now_s: float
    pressure: bool


#: The first three of a lookup.
TaskInPool: TypeAlias = "tuple[str, str | None, bool]"


class TaskHasher(NamedTuple):
    """Hashes the tasks that one engine sees: those that clients named as on every other engine with the same salt."""

    salt: bytes
    engine_id: str

    def hash(self, task: str, tenant: str | None, is_named: bool) -> int:
        # An inferred name means something on the engine that made it up, and there alone.
        whose = tenant if is_named else self.engine_id
        name = msgpack.packb([is_named, whose, task], unicode_errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(name, key=self.salt, digest_size=8).digest(), "big") >> 1


class PoolSnapshot(NamedTuple):
    """A pool at one moment, as one engine knows it.

    Attributes:
        estimate: A and N.
        tasks: what A counts.
        hasher: what `tasks` were hashed with.
        seen_s: this engine's lookups up to then are part of it, on its monotonic clock.
    """

    estimate: PoolEstimate
    tasks: PoolTasks
    hasher: TaskHasher
    seen_s: float


class Observer:
    """Counts the lookups of one engine.

    `lookups.append` is all that the scheduler does: it neither waits nor fails, and costs no more when nobody reads.
    Everything else is for one other thread.
    """

    def __init__(self, engine_id: str, window_s: float, prompt_window_lookups: int) -> None:
        self.lookups: deque[Lookup] = deque(maxlen=MAX_WAITING_LOOKUPS)
        self._engine_id = engine_id
        self._window_s = window_s
        self._estimator = WorkingSetEstimator(0, window_s, prompt_window_lookups)
        self._window_lookups = EvictionWindow(window_s)
        self._pressure: bool | None = None
        self._hasher = TaskHasher(b"", engine_id)
        self._hashes: dict[TaskInPool, int] = {}

    def observation(self, sequence: int, salt: bytes, now_s: float) -> Observation:
        """What was seen in the window that ends at `now_s`, its tasks hashed with `salt`."""
        while self.lookups:
            seen = self.lookups.popleft()
            self._estimator.observe(seen[:3], seen.prompt_tokens, seen.now_s)
            self._window_lookups.add(1, seen.now_s)
            self._pressure = seen.pressure
        self._estimator.estimate(now_s)
        if salt != self._hasher.salt:
            self._hasher, self._hashes = TaskHasher(salt, self._engine_id), {}
        known = self._hashes
        tasks = cast("list[TaskInPool]", self._estimator.active_tasks())
        self._hashes = {task: known.get(task) or self._hasher.hash(*task) for task in tasks}
        hashes, threshold = smallest_hashes(set(self._hashes.values()))
        window_lookups = self._window_lookups.total(now_s)
        prompt_lookups, prompt_tokens = self._estimator.prompts
        return Observation(
            engine_id=self._engine_id,
            sequence=sequence,
            window_s=self._window_s,
            task_hashes=hashes,
            hash_threshold=threshold,
            window_lookups=window_lookups,
            prompt_lookups=prompt_lookups,
            prompt_tokens=prompt_tokens,
            pressure=self._pressure if window_lookups else None,
            received_s=now_s,
        )


class PoolTelemetry:
    """Every `interval_s`, on a thread of its own: publish this engine's observation, and estimate the pool.

    The estimate never misses this engine, so that without Redis it is what this engine knows alone. Owns the outbox and
    closes it.

    Args:
        observer: has the lookups.
        view: has the other engines' observations.
        outbox: takes ours.
        max_age_s: of the other engines' observations.
        on_estimate: called on this thread with each estimate.

    Attributes:
        snapshot: the newest; None before the first.
    """

    def __init__(
        self,
        observer: Observer,
        engine_id: str,
        deployment: str,
        view: ClusterView,
        outbox: RedisOutbox,
        *,
        interval_s: float,
        max_age_s: float,
        on_estimate: Callable[[PoolEstimate], None] = lambda _: None,
    ) -> None:
        self.snapshot: PoolSnapshot | None = None
        self._observer = observer
        self._engine_id = engine_id
        self._key = redis_keys.pool_key(deployment, engine_id)
        self._view = view
        self._outbox = outbox
        self._interval_s = interval_s
        self._max_age_s = max_age_s
        self._on_estimate = on_estimate
        self._own_salt = secrets.token_bytes(16)
        self._failures = FailureLog(_logger, "Observing the pool")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="efficient-lmcache-pool", daemon=True)
        self._thread.start()

    @property
    def estimate(self) -> PoolEstimate | None:
        """The newest; None before the first."""
        snapshot = self.snapshot
        return None if snapshot is None else snapshot.estimate

    def close(self) -> None:
        """Stops. Safe to call twice."""
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._outbox.close()

    def _run(self) -> None:
        sequence = 0
        while not self._stopping.is_set():
            try:
                self._observe(sequence)
            except Exception as error:
                self._failures.failed(error)
            else:
                self._failures.succeeded()
            sequence += 1
            self._stopping.wait(self._interval_s)

    def _observe(self, sequence: int) -> None:
        salt, now_s = self._outbox.salt, time.monotonic()
        hasher = TaskHasher(salt or self._own_salt, self._engine_id)
        own = self._observer.observation(sequence, hasher.salt, now_s)
        if salt:  # hashed with a salt of our own, our tasks would count beside the same ones on other engines
            self._outbox.put(self._key, encode(own))
        others = [seen for seen in self._view.observations(self._max_age_s) if seen.engine_id != self._engine_id]
        seen = [own, *others]
        self.snapshot = PoolSnapshot(pool_estimate(seen), pool_tasks(seen), hasher, now_s)
        self._on_estimate(self.snapshot.estimate)
