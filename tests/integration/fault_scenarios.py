"""A real engine that serves without a pause while what surrounds it fails; `test_faults_under_load.py` judges it.

Beside it runs the victim, a second engine of the same deployment: with a tier that is smaller than one request, in a
process whose clocks are an hour ahead, and at last killed.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fresh_process
from engine import CHUNK_TOKENS, Engine, random_prompts
from full_disk import FullDisk
from network_namespace import Namespace
from redis_process import RedisProcess

SECRET = "geheim-4711"
HOUR_S = 3600.0
#: A scenario that runs into its time limit is killed; what it started ends with it.
WITH_US = ["setpriv", "--pdeathsig", "KILL"]
#: Pauses that keep the scenario short; what they are by default is in docs/configuration.md.
OPTIONS = {
    "report_interval_s": 0.1,
    "report_read_interval_s": 0.05,
    "report_max_age_s": 0.8,
    # All agents of both engines are active throughout, however slow the machine.
    "activity_window_s": 3600.0,
}
#: A, twice the agents as all candidates have asked, and the engines: both, and the survivor alone.
EVERYBODY, SURVIVOR = [2 * (16 + 6), 2], [2 * 16, 1]
#: Requests that end under each fault, at least.
ENOUGH = 8


class Load:
    """Agents that ask four at a time, each always the same; each answer is held against that of a computed prompt.

    Only agents take part whose answers do not depend on who is asked with them: in bfloat16, the two likeliest tokens
    may be equal up to the order in which a batch's sums are taken.

    Attributes:
        stage: what is going on.
        served, wrong: requests by stage.
    """

    def __init__(self, engine: Engine, agents: int, name: str) -> None:
        self.stage = "healthy"
        self.served, self.wrong = Counter[str](), Counter[str]()
        self._engine = engine
        self._name = name
        self._prompts = random_prompts(2 * agents, 3 * CHUNK_TOKENS + 40, seed=agents)
        everyone = range(2 * agents)
        alone = [self._ask([agent])[0] for agent in everyone]
        together = [answer for first in everyone[::4] for answer in self._ask(everyone[first : first + 4])]
        self._answers = alone
        self._agents = [agent for agent in everyone if alone[agent] == together[agent]][:agents]
        assert len(self._agents) == agents
        self._order = random.Random(0)

    def serve(self) -> None:
        agents, stage = self._order.sample(self._agents, 4), self.stage
        for agent, answer in zip(agents, self._ask(agents), strict=True):
            self.served[stage] += 1
            self.wrong[stage] += answer != self._answers[agent]

    def _ask(self, agents: Sequence[int]) -> list[Any]:
        tasks = [f"{self._name}-{agent}" for agent in agents]
        return self._engine.generate([self._prompts[agent] for agent in agents], task_ids=tasks)


def victim(model: str, redis_url: str, password_file: str, progress: str) -> None:
    """Serves until it is killed; `progress` has what it served, as the latest line of JSON."""
    for name in ("time", "monotonic", "perf_counter"):
        setattr(time, name, _ahead(getattr(time, name)))
    engine = Engine(model, host_mib=0.6, gpu_blocks=40, options=_options(redis_url, password_file))
    load = Load(engine, agents=6, name="victim")
    with Path(progress).open("w", buffering=1) as file:
        while True:
            load.serve()
            metrics = engine.metrics()
            row = {"served": load.served["healthy"], "wrong": load.wrong["healthy"], "metrics": metrics}
            file.write(json.dumps(row) + "\n")
            time.sleep(0.2)  # the cores are the survivor's, too


def tier_smaller_than_a_chunk(model: str) -> dict[str, Any]:
    engine = Engine(model, host_mib=0.1, gpu_blocks=40, options=OPTIONS)
    load = Load(engine, agents=6, name="agent")
    while load.served["healthy"] < ENOUGH:
        load.serve()
        engine.forget_gpu()
    return {"wrong": load.wrong["healthy"], "metrics": engine.metrics(), "state": engine.state_left()}


def _ahead(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: clock() + HOUR_S


def _options(redis_url: str, password_file: str) -> dict[str, Any]:
    return {
        **OPTIONS,
        "telemetry.transport": "redis",
        "telemetry.redis_url": redis_url,
        "telemetry.redis_password_file": password_file,
    }


def survivor(model: str, directory: str, elsewhere: dict[str, str] | None) -> dict[str, Any]:
    """`elsewhere`: the network namespace that Redis runs in."""
    place, namespace = Path(directory), Namespace(**elsewhere) if elsewhere else None
    password = place / "password"
    password.write_text(SECRET)
    host, prefix = (namespace.address, namespace.prefix) if namespace else ("127.0.0.1", [])
    server = RedisProcess(place, "--requirepass", SECRET, host=host, prefix=[*WITH_US, *prefix])
    progress = place / "victim.jsonl"
    arguments = {"model": model, "redis_url": server.url, "password_file": str(password), "progress": str(progress)}
    other = subprocess.Popen(
        [*WITH_US, sys.executable, fresh_process.__file__, "fault_scenarios:victim", json.dumps(arguments)],
        stdout=(place / "victim.log").open("wb"),
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    try:
        disk = FullDisk.prepared()
        options = _options(server.url, str(password)) | {"admission": "conditioned"}
        engine = Engine(model, host_mib=8, gpu_blocks=40, options=options)
        result = _Scenario(engine, server, namespace, disk, other, password).run()
        return result | {"victim": json.loads(progress.read_text().splitlines()[-1])}
    finally:
        for process in (other, server.process):
            process.kill()
            process.wait()


class _Scenario:
    def __init__(
        self,
        engine: Engine,
        server: RedisProcess,
        namespace: Namespace | None,
        disk: FullDisk,
        other: subprocess.Popen[bytes],
        password: Path,
    ) -> None:
        self._engine = engine
        self._server = server
        self._namespace = namespace
        self._disk = disk
        self._other = other
        self._password = password
        self._messages: list[str] = []
        self._pools: dict[str, list[float]] = {}
        self._load = Load(engine, agents=16, name="survivor")
        self._error: BaseException | None = None
        self._over = threading.Event()
        handler = logging.Handler()
        handler.emit = lambda record: self._messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("efficient_lmcache").addHandler(handler)

    def run(self) -> dict[str, Any]:
        script = threading.Thread(target=self._befall)
        script.start()
        while not self._over.is_set():
            self._load.serve()
        script.join()
        if self._error is not None:
            raise self._error
        self._engine.generate(random_prompts(1, 20), max_tokens=1)
        return {
            "served": self._load.served,
            "wrong": self._load.wrong,
            "pools": self._pools,
            "messages": self._messages,
            "full_disk": self._disk.kind,
            "metrics": self._engine.metrics(),
            "state": self._engine.state_left(),
        }

    def _befall(self) -> None:
        try:
            self._until(lambda: self._pool[::2] == EVERYBODY, "both engines in one pool")
            self._stay("clocks an hour apart")
            for fault in (
                self._redis_killed,
                self._redis_hanging,
                self._redis_flushed,
                self._garbage_and_oversized_messages,
                self._the_network_cut,
                self._the_password_changed,
                self._a_full_disk,
            ):
                name = fault.__name__.strip("_").replace("_", " ")
                with fault():
                    self._stay(name)
                self._load.stage = f"after {name}"
                self._until(lambda: self._up and self._pool[::2] == EVERYBODY, f"recovery from {name}")
            self._other.kill()
            self._until(lambda: self._pool[::2] == SURVIVOR, "the dead engine to be forgotten")
            self._stay("another engine killed")
            self._engine.worker_connector._offload._publisher.close()
            stale = self._metric("decisions_stale_report_total")
            self._until(lambda: self._metric("decisions_stale_report_total") > stale, "a stale report")
            self._stay("publisher dead")
            self._engine.scheduler_connector._telemetry._pool.close()
            self._stay("observer dead")
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _stay(self, stage: str) -> None:
        self._load.stage = stage
        self._until(lambda: self._load.served[stage] >= ENOUGH, f"requests under: {stage}")
        self._pools[stage] = self._pool

    def _until(self, holds: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline_s, f"waited in vain for {what}; {self._pool=} {self._messages[-3:]=}"
            time.sleep(0.1)

    @property
    def _pool(self) -> list[float]:
        """A, N and the engines that they come from."""
        return [self._metric(f"pool_{name}") for name in ("active_tasks", "mean_prompt_tokens", "engines")]

    @property
    def _up(self) -> bool:
        return self._metric("telemetry_redis_up") == 1

    def _metric(self, name: str) -> float:
        """As /metrics shows it: as of the engine's latest step."""
        return self._engine.metrics().get(f"efficient_lmcache:{name}", 0)

    @contextmanager
    def _redis_killed(self) -> Iterator[None]:
        self._server.kill()
        self._until(lambda: not self._up, "the feed to notice")
        yield
        self._server.restart()

    @contextmanager
    def _redis_hanging(self) -> Iterator[None]:
        self._server.hang()
        self._until(lambda: not self._up, "the feed to notice")
        yield
        self._server.go_on()

    @contextmanager
    def _redis_flushed(self) -> Iterator[None]:
        self._cli("flushall")
        yield

    @contextmanager
    def _garbage_and_oversized_messages(self) -> Iterator[None]:
        from efficient_lmcache.telemetry import redis_keys

        forged = redis_keys.pool_key("default", "forged")
        for _ in range(5):
            self._cli("publish", forged, "garbage")
            self._cli("eval", "return redis.call('publish', KEYS[1], string.rep('x', 3000000))", "1", forged)
        self._until(lambda: self._metric("telemetry_bad_messages_total") >= 10, "the garbage to be heard")
        yield

    @contextmanager
    def _the_network_cut(self) -> Iterator[None]:
        if self._namespace is None:
            yield
            return
        self._namespace.cut_the_cable()
        self._until(lambda: not self._up, "the feed to notice")
        yield
        self._namespace.mend_the_cable()

    @contextmanager
    def _the_password_changed(self) -> Iterator[None]:
        self._cli("config", "set", "requirepass", SECRET + "-2")
        for kind in ("normal", "pubsub"):
            self._cli("client", "kill", "type", kind, secret=SECRET + "-2")
        self._until(lambda: not self._up, "the feed to notice")
        yield
        self._password.write_text(SECRET + "-2")

    @contextmanager
    def _a_full_disk(self) -> Iterator[None]:
        def refused() -> bool:
            self._disk.fill()
            return any("No space left" in message for message in self._messages)

        self._until(refused, "the disk to be full")
        yield
        self._disk.empty()
        self._until(lambda: "report works again" in self._messages[-1], "reports to be written")

    def _cli(self, *command: str, secret: str = SECRET) -> str:
        return self._server.cli(*command, login=("--no-auth-warning", "-a", secret))
