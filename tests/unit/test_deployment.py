"""The processes of a run: what is started, with which words, and what several engines leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import fake_command
from rich.console import Console
from test_driver_run import model, options, trace, write_config  # noqa: F401 - two are fixtures

from efficient_lmcache.replay.deployment import Deployment, Ports, plan_deployment
from efficient_lmcache.replay.driver import ReplayOptionError
from efficient_lmcache.replay.lmcache_server import WATERMARK
from efficient_lmcache.replay.metrics import MetricsError, ServerCounts, Snapshot
from efficient_lmcache.replay.options import RunOptions
from efficient_lmcache.replay.preflight import ModelFacts
from efficient_lmcache.replay.run import run_replay
from efficient_lmcache.replay.rundir import RunDirectory

FACTS = ModelFacts(vocab_size=100, bytes_per_token=1024, context_tokens=None)


def tiered(**changed: Any) -> RunOptions:
    return options(Path("model"), Path("some/trace"), **{"admission": "none", "host_gib": 0.5, **changed})


def planned(run_options: RunOptions) -> Deployment:
    ports = Ports.of(run_options, [1001, 1002, 1003, 1004, 1005, 1006])
    return plan_deployment(run_options, FACTS, 1024, RunDirectory(Path("out")), Path("metrics"), ports, {})


def transfer_config(command: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return config


def value_of(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_one_engine_is_started_alone_and_keeps_the_names_of_its_files() -> None:
    deployment = planned(tiered())
    (engine,) = deployment.engines
    assert (deployment.shared, deployment.lmcache) == ((), None)
    assert engine.log == Path("out/server.log")
    assert engine.environment["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "0.5"


def test_engines_share_an_lmcache_server_whose_usable_part_is_the_tier_asked_for() -> None:
    deployment = planned(tiered(mode="server", engines=2, tensor_parallel=2, connector="lmcache"))
    (server,) = deployment.shared
    assert server is deployment.lmcache
    assert float(value_of(server.command, "--l1-size-gb")) * WATERMARK == pytest.approx(2 * 0.5)
    assert value_of(server.command, "--eviction-trigger-watermark") == str(WATERMARK)
    assert value_of(server.command, "--chunk-size") == "256"
    for engine in deployment.engines:
        assert transfer_config(engine.command) == {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": int(value_of(server.command, "--port")),
            },
        }
        assert "LMCACHE_MAX_LOCAL_CPU_SIZE" not in engine.environment
    assert [engine.log.name for engine in deployment.engines] == ["server-0.log", "server-1.log"]


def test_our_connector_is_told_of_server_lazy_offload_and_redis() -> None:
    deployment = planned(tiered(mode="server", lazy_offload=True, engines=3, admission="conditioned"))
    assert [part.name for part in deployment.shared] == ["the LMCache server", "redis-server"]
    redis = deployment.shared[1]
    for number, engine in enumerate(deployment.engines):
        config = transfer_config(engine.command)
        extra = config["kv_connector_extra_config"]
        assert config["kv_connector"] == "EfficientLMCacheConnector"
        assert extra["efficient.mode"] == "server"
        http_port = value_of(deployment.shared[0].command, "--http-port")
        assert extra["efficient.server.http_url"] == f"http://127.0.0.1:{http_port}"
        assert extra["lmcache.mp.lazy_offload"] is True
        assert extra["efficient.telemetry.transport"] == "redis"
        assert extra["efficient.telemetry.redis_url"] == f"redis://127.0.0.1:{redis.port}"
        assert extra["efficient.decision_log"].endswith(f"out/decisions-{number}.jsonl")


def test_recomputing_starts_no_tier_whatever_the_mode() -> None:
    deployment = planned(tiered(admission="recompute", mode="server", lazy_offload=True, engines=2))
    assert deployment.shared == ()
    assert [transfer_or_null(engine.command) for engine in deployment.engines] == ["null", "null"]


def transfer_or_null(command: list[str]) -> str:
    return value_of(command, "--kv-transfer-config")


def test_engines_share_the_cpus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def cpus(engines: int) -> list[str]:
        parts = planned(tiered(engines=engines, telemetry="local")).engines
        return [part.environment["VLLM_CPU_OMP_THREADS_BIND"] for part in parts]

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert cpus(1) == ["0,1,2,5"]
    assert cpus(2) == ["0,2", "1,5"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert cpus(3) == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "remote"}, "--mode is 'remote'; allowed: in_process, server"),
        ({"route": "random"}, "--route is 'random'; allowed: load, session"),
        ({"telemetry": "off"}, "--telemetry is 'off'; allowed: local, redis"),
        ({"engines": 0}, "--engines is 0; it must be at least 1"),
        ({"lazy_offload": True}, "--lazy-offload is for --mode server, not in_process"),
        ({"lazy_offload": True, "mode": "server", "prefix_caching": False}, "--lazy-offload needs --prefix-caching"),
        ({"telemetry": "redis", "connector": "lmcache"}, "--connector lmcache has no telemetry"),
        ({"telemetry": "redis", "admission": "recompute"}, "recompute has no telemetry"),
    ],
)
def test_options_that_do_not_go_together_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayOptionError, match=message):
        tiered(**changed)


def test_a_missing_redis_server_is_said_before_anything_is_created(
    model: Path,  # noqa: F811
    trace: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run_options = options(model, trace, admission="none", host_gib=1.0, engines=2)
    with pytest.raises(ReplayOptionError, match="--telemetry redis starts a redis-server, and there is none on PATH"):
        run_replay(run_options, Console(quiet=True), fake_command())
    assert not run_options.out.exists()


def test_several_engines_leave_sums_and_what_each_did(model: Path, trace: Path) -> None:  # noqa: F811
    run_options = options(model, trace, engines=2, active_pool=2, route="session")
    record = run_replay(run_options, Console(quiet=True), fake_command())
    assert (record.status, record.error, record.outputs_exact) == ("complete", None, 9)
    assert len(record.engines) == 2
    assert sum(engine.answered for engine in record.engines) == 9
    assert all(engine.answered for engine in record.engines)
    assert record.computed_prefill_tokens == sum(engine.computed_prefill_tokens or 0 for engine in record.engines) == 27
    assert record.gpu_kv_tokens == 2 * 8 * 128
    assert record.working_set.gamma_g == pytest.approx(2 * 3.0 / 2048)
    rows = [json.loads(line) for line in (run_options.out / "calls.jsonl").read_text().splitlines()]
    for number, engine in enumerate(record.engines):
        assert sum(row["engine"] == number for row in rows) == engine.answered
        for name in (f"server-{number}.log", f"metrics-before-{number}.txt", f"metrics-after-{number}.txt"):
            assert (run_options.out / name).stat().st_size
    tasks = {row["task"] for row in rows}
    assert len({(row["task"], row["engine"]) for row in rows}) == len(tasks), "a session stays with its engine"


def test_a_lost_engine_is_named(model: Path, trace: Path) -> None:  # noqa: F811
    run_options = options(model, trace, engines=2, active_pool=1)
    healthy, dying = fake_command(), fake_command("die@2")
    ports: list[int] = []

    def command_of(server: Any, port: int) -> list[str]:
        ports.append(port)
        return (dying if len(ports) == 2 else healthy)(server, port)

    record = run_replay(run_options, Console(quiet=True), command_of)
    assert record.status == "failed"
    assert "engine 1 stopped answering" in str(record.error)
    assert "server-1.log" in str(record.error)
    assert "server-0.log" not in str(record.error)


def test_decisions_of_all_engines_become_one_log_in_the_order_of_time(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for engine, times in enumerate(([1.0, 4.0], [2.0, 3.0])):
        rows = "".join(json.dumps({"now_s": now_s, "task": "t"}) + "\n" for now_s in times)
        directory.of_engine(engine, 2).decisions.write_text(rows + '{"cut short')
    directory.merge_decisions(2)
    assert [(row["now_s"], row["engine"]) for row in directory.decision_rows()] == [(1, 0), (2, 1), (3, 1), (4, 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decisions.jsonl"]


def lmcache_metrics(**counts: float) -> Snapshot:
    lines = [f"# TYPE lmcache_mp_{name} counter\nlmcache_mp_{name} {value}" for name, value in counts.items()]
    return Snapshot.parse("\n".join(lines) + "\n")


def test_an_lmcache_servers_counters_may_come_late_and_are_per_rank() -> None:
    before = lmcache_metrics(l1_eviction_loop_ticks_total=1)
    after = lmcache_metrics(
        l1_eviction_loop_ticks_total=9, l1_write_chunks_total=8, l1_allocation_failure_chunks_total=4
    )
    assert ServerCounts.between(before, after, chunk_tokens=256, ranks=2) == ServerCounts(4 * 256, 0, 2)


def test_what_is_no_lmcache_servers_metrics_is_an_error() -> None:
    nothing = Snapshot.parse("")
    with pytest.raises(MetricsError, match="lmcache_mp_l1_eviction_loop_ticks_total"):
        ServerCounts.between(nothing, nothing, chunk_tokens=256, ranks=1)
