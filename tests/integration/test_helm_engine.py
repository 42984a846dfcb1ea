"""What the chart's manifests start, started here without a cluster: Redis, the exporter, an engine on the CPU stack."""

from __future__ import annotations

import argparse
import base64
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPLAY_VOCAB_SIZE
from helm_chart import (
    VALUES,
    arguments,
    container,
    find,
    manifests,
    server_container,
    transfer_config,
    values_of,
    variables,
)
from metric_queries import RULES, all_queries, dashboard_queries, selectors
from prometheus_client.parser import text_string_to_metric_families
from serve_arguments import serve_parser

from efficient_lmcache.connector.serve import with_connector
from efficient_lmcache.replay.lmcache_server import lmcache_is_ready
from efficient_lmcache.replay.localhost import open_url
from efficient_lmcache.replay.server import Server, free_port

pytestmark = pytest.mark.integration
pytest.importorskip("helm_python", reason="no Helm engine (pip install helm-python-sdk)")

_READY_S = 600.0
_PROMPT = [number % REPLAY_VOCAB_SIZE for number in range(1500)]
_SCRAPE_S = 1
_PROGRAMS = {"efficient-lmcache": "efficient_lmcache.cli", "lmcache": "lmcache.cli.main"}


def test_vllm_accepts_the_command_line_of_every_set_of_values() -> None:
    parse = serve_parser()
    for name in VALUES:
        values = values_of(name)
        engine = find(manifests(values), "Deployment")
        words = arguments(container(engine))
        # Of several transfer configurations the last would win.
        assert with_connector(words).count("--kv-transfer-config") == 0
        args = parse([word for word in words if word != "--kv-transfer-config=null"])
        assert args.model == values["model"]
        assert args.tensor_parallel_size == values.get("tensorParallel", 1)
        assert (args.host, args.port) == ("0.0.0.0", 8000)
        assert (args.kv_transfer_config is None) == (transfer_config(engine) is None)
        if args.kv_transfer_config is not None:
            assert args.kv_transfer_config.kv_connector == "EfficientLMCacheConnector"
            remote_tier = values.get("lmcache", {}).keys() & {"remote_url", "local_disk"}
            outside = values.get("mode") == "server" or bool(remote_tier)
            assert (args.kv_transfer_config.kv_load_failure_policy == "recompute") == outside


def test_lmcache_reads_the_configuration_of_every_set_of_values(tmp_path: Path) -> None:
    pytest.importorskip("lmcache")
    from lmcache.v1.config import LMCacheEngineConfig

    for name in VALUES:
        values = values_of(name)
        if values["hostTier"]["gibPerRank"] == 0 or values.get("mode") == "server":
            continue
        file = tmp_path / f"{name}.yaml"
        file.write_text(find(manifests(values), "ConfigMap", "-lmcache")["data"]["lmcache.yaml"])
        config = LMCacheEngineConfig.from_file(str(file))
        assert config.max_local_cpu_size == values["hostTier"]["gibPerRank"]
        assert config.chunk_size == values["hostTier"].get("chunkTokens", 256)
        assert config.local_cpu
        assert config.remote_url == values.get("lmcache", {}).get("remote_url")


@pytest.mark.parametrize("name", ["server-daemonset", "cpu-server-sidecar"])
def test_lmcache_accepts_the_command_line_of_every_server_and_what_engines_are_told_of_it(name: str) -> None:
    pytest.importorskip("lmcache")
    from lmcache.cli.commands.server import ServerCommand
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.vllm_multi_process_adapter import ExtraConfigDefault
    from lmcache.v1.distributed.config import parse_args_to_config
    from lmcache.v1.multiprocess.config import parse_args_to_http_frontend_config, parse_args_to_mp_server_config

    values = values_of(name)
    documents = manifests(values)
    spec = server_container(documents)
    assert spec["command"] == ["lmcache", ServerCommand().name()]
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    args = parser.parse_args(arguments(spec))

    storage = parse_args_to_config(args)
    memory = storage.l1_manager_config.memory_config
    usable_gib = storage.eviction_config.trigger_watermark * memory.size_in_bytes / (1 << 30)
    assert usable_gib == pytest.approx(values["hostTier"]["gibPerRank"] * values.get("tensorParallel", 1))
    assert storage.eviction_config.eviction_policy == "LRU"
    assert not memory.use_lazy
    config = transfer_config(find(documents, "Deployment"))
    assert config is not None
    options = config["kv_connector_extra_config"]
    server = parse_args_to_mp_server_config(args)
    assert server.chunk_size == values["hostTier"].get("chunkTokens", 256)
    assert server.port == options["lmcache.mp.port"]
    assert server.isolated_ipc == options.get("lmcache.mp.isolated_ipc", False)
    assert options["efficient.server.http_url"].endswith(f":{parse_args_to_http_frontend_config(args).http_port}")
    source = inspect.getsource(LMCacheMPConnector)
    for option in (option for option in options if option.startswith("lmcache.")):
        assert option.removeprefix("lmcache.mp.") in ExtraConfigDefault.__members__ or f'"{option}"' in source, option


@dataclass(frozen=True)
class Deployed:
    """What runs, and where it answers."""

    engine: Server
    engine_url: str
    exporter_url: str


class Node:
    """Runs containers of manifests as processes of this machine: volumes become folders, Services ports of loopback."""

    def __init__(self, documents: list[dict[str, Any]], directory: Path) -> None:
        self.documents = documents
        self.directory = directory
        self.ports = {"8000": free_port(), "9400": free_port(), "6379": free_port()}
        self._replacements = {
            "elm-efficient-lmcache-redis:6379": f"127.0.0.1:{self.ports['6379']}",
            "--port=8000": f"--port={self.ports['8000']}",
            "--port=9400": f"--port={self.ports['9400']}",
            "0.0.0.0": "127.0.0.1",
        }

    def command(self, deployment: dict[str, Any], spec: dict[str, Any] | None = None) -> list[str]:
        """Command and arguments, with this node's paths and ports; $(NAME) filled in as Kubernetes does.

        Args:
            spec: of one of its containers; None: the only one.
        """
        spec = spec or container(deployment)
        self._mount(deployment, spec)
        words = [self._here(word) for word in [*spec["command"], *spec.get("args", [])]]
        for name, value in self.environment(deployment, spec).items():
            words = [word.replace(f"$({name})", value) for word in words]
        if words[0] in _PROGRAMS:
            words[:1] = [sys.executable, "-m", _PROGRAMS[words[0]]]
        return words

    def environment(self, deployment: dict[str, Any], spec: dict[str, Any] | None = None) -> dict[str, str]:
        """The manifest's variables, and of this machine's those alone that find its programs."""
        spec = spec or container(deployment)
        found = {name: self._here(value) for name, value in variables(spec).items()}
        for entry in spec.get("env", []):
            if "secretKeyRef" in entry.get("valueFrom", {}):
                reference = entry["valueFrom"]["secretKeyRef"]
                found[entry["name"]] = self._secret(reference["name"])[reference["key"]]
        return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **found}

    def _mount(self, deployment: dict[str, Any], spec: dict[str, Any]) -> None:
        volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        for mount in spec["volumeMounts"]:
            if mount["mountPath"] in {"/tmp", "/dev/shm", "/models"}:
                continue
            folder = self.directory / deployment["metadata"]["name"] / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            self._replacements[mount["mountPath"]] = str(folder)
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                data = find(self.documents, "ConfigMap", "-lmcache")["data"]
            elif "secret" in volume:
                secret = self._secret(volume["secret"]["secretName"])
                data = {item["path"]: secret[item["key"]] for item in volume["secret"]["items"]}
            else:
                data = {}
            for name, text in data.items():
                (folder / name).write_text(text)

    def _secret(self, name: str) -> dict[str, str]:
        (secret,) = [d for d in self.documents if d["kind"] == "Secret" and d["metadata"]["name"] == name]
        return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}

    def _here(self, text: str) -> str:
        for there, here in self._replacements.items():
            text = text.replace(there, here)
        return text


@pytest.fixture(scope="module")
def deployed(replay_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """The CPU trial with its bundled Redis, after two requests of the same prompt."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH: apt-get install redis-server")
    directory = tmp_path_factory.mktemp("node")
    values = values_of("cpu-trial-bundled-redis")
    values["model"] = str(replay_model)
    node = Node(manifests(values), directory)
    engine, exporter, redis = (find(node.documents, "Deployment", part) for part in ("", "-exporter", "-redis"))
    with ExitStack() as running:
        command = [*node.command(redis), "--port", str(node.ports["6379"]), "--bind", "127.0.0.1"]
        process = subprocess.Popen(command, env=node.environment(redis), stdout=subprocess.DEVNULL)
        running.callback(process.wait)
        running.callback(process.kill)
        exporter_url = f"http://127.0.0.1:{node.ports['9400']}/metrics"
        process = subprocess.Popen(node.command(exporter), env=node.environment(exporter))
        running.callback(process.wait)
        running.callback(process.terminate)
        command = node.command(engine)
        server = running.enter_context(
            Server(command, node.environment(engine), node.ports["8000"], directory / "engine.log")
        )
        server.wait_until_ready(_READY_S)
        for _ in range(2):
            complete(server.base_url, values["model"])
        wait_for_metrics(f"{server.base_url}/metrics", exporter_url)
        yield Deployed(server, server.base_url, exporter_url)


def wait_for_metrics(*urls: str) -> None:
    """Pools tell of themselves every few seconds; what is missing after a minute, the tests name."""
    asked = {name for query in all_queries().values() for name, _ in selectors(query)}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not asked <= {name for url in urls for name in samples(url)}:
        time.sleep(0.5)


def complete(base_url: str, model: str) -> None:
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 2, "temperature": 0, "detokenize": False}
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with open_url(request, timeout=120) as response:
        assert response.status == 200


def samples(url: str) -> dict[str, set[str]]:
    """Labels of every metric that an endpoint shows."""
    with open_url(url, timeout=30) as response:
        text = response.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_engine_says_what_the_values_say(deployed: Deployed) -> None:
    log = deployed.engine.log.read_text(errors="replace")
    said = "Efficient-LMCache: in-process mode, host tier 0.500 GiB/rank, 1 KiB/token/rank, chunk 256 tokens"
    assert f"{said}, admission conditioned, telemetry redis" in log


def test_every_query_of_dashboard_and_alerts_asks_for_what_engine_and_exporter_show(deployed: Deployed) -> None:
    shown = {**samples(f"{deployed.engine_url}/metrics"), **samples(deployed.exporter_url)}
    for where, query in all_queries().items():
        for name, labels in selectors(query):
            assert name in shown, where
            assert labels - {"instance", "job"} <= shown[name], where


def test_the_reference_of_vllms_metrics_is_what_this_vllm_shows(deployed: Deployed) -> None:
    golden = json.loads((Path(__file__).parents[1] / "unit" / "golden" / "vllm-metrics.json").read_text())
    shown = samples(f"{deployed.engine_url}/metrics")
    assert {name: set(labels) for name, labels in golden.items()}.items() <= shown.items()


def test_prometheus_answers_every_query_of_the_dashboard(deployed: Deployed, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus on PATH: apt-get install prometheus")
    targets = [
        url.removeprefix("http://").removesuffix("/metrics") for url in (deployed.engine_url, deployed.exporter_url)
    ]
    scrape = {"job_name": "engines", "static_configs": [{"targets": targets}]}
    config = {
        "global": {"scrape_interval": f"{_SCRAPE_S}s", "evaluation_interval": f"{_SCRAPE_S}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scrape],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with subprocess.Popen([*command, f"--web.listen-address={url}", "--log.level=error"]) as process:
        try:
            unanswered = dict(dashboard_queries())
            deadline = time.monotonic() + 60
            while unanswered and time.monotonic() < deadline and process.poll() is None:
                time.sleep(_SCRAPE_S)
                unanswered = {where: query for where, query in unanswered.items() if not answers(url, query)}
            assert not unanswered
            with open_url(f"http://{url}/api/v1/rules", timeout=10) as response:
                groups = json.load(response)["data"]["groups"]
            assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        finally:
            process.terminate()


def answers(prometheus: str, query: str) -> bool:
    try:
        with open_url(
            f"http://{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10
        ) as got:
            return bool(json.load(got)["data"]["result"])
    except OSError:  # it has not started yet
        return False


def test_a_sidecar_keeps_what_its_engine_forgets(replay_model: Path, tmp_path: Path) -> None:
    values = values_of("cpu-server-sidecar")
    values["model"] = str(replay_model)
    values["lmcacheServer"] |= {"port": free_port(), "httpPort": free_port()}
    # So that vLLM can be told to forget what is in its own cache.
    values["extraEnv"] = [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]
    node = Node(manifests(values), tmp_path)
    pod, sidecar = find(node.documents, "Deployment"), server_container(node.documents)
    with ExitStack() as running:
        command, environment = node.command(pod, sidecar), node.environment(pod, sidecar)
        port, log = values["lmcacheServer"]["httpPort"], tmp_path / "lmcache-server.log"
        server = Server(command, environment, port, log, "the LMCache server", lmcache_is_ready)
        running.enter_context(server).wait_until_ready(_READY_S)
        engine = Server(node.command(pod), node.environment(pod), node.ports["8000"], tmp_path / "engine.log")
        running.enter_context(engine).wait_until_ready(_READY_S)
        said = f"server mode, LMCache server tcp://127.0.0.1:{values['lmcacheServer']['port']}, its tier probed at"
        assert said in engine.log.read_text(errors="replace")
        complete(engine.base_url, values["model"])
        restored_tokens, deadline = 0.0, time.monotonic() + 60
        while restored_tokens == 0 and time.monotonic() < deadline:
            open_url(urllib.request.Request(f"{engine.base_url}/reset_prefix_cache", b""), timeout=30).close()
            complete(engine.base_url, values["model"])
            restored_tokens = value(f"{engine.base_url}/metrics", "efficient_lmcache:restored_tokens_total")
    assert restored_tokens > 0
    assert restored_tokens % (len(_PROMPT) // 256 * 256) == 0


def value(url: str, metric: str) -> float:
    """Its sum over all labels; 0 while it does not show."""
    with open_url(url, timeout=30) as response:
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    return float(sum(sample.value for family in families for sample in family.samples if sample.name == metric))
