"""The chart's server mode: an LMCache server for the engines of a node, or beside each engine."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helm_chart import (
    arguments,
    container,
    environment,
    find,
    manifests,
    render,
    server_container,
    transfer_config,
    values_of,
)

from efficient_lmcache.connector.options import parse_options
from efficient_lmcache.connector.tenants import TENANT_KEY_VARIABLE
from efficient_lmcache.replay.lmcache_server import WATERMARK, l1_gib

pytest.importorskip("helm_python", reason="no Helm engine (pip install helm-python-sdk)")

SETS = ["server-daemonset", "cpu-server-sidecar"]
both_kinds = pytest.mark.parametrize("name", SETS)
Documents = list[dict[str, Any]]


def options_of(server: dict[str, Any]) -> dict[str, str | None]:
    """A server's options; None of those that are switches."""
    words = [word.removeprefix("--").partition("=") for word in server["args"]]
    return {name: value if separator else None for name, separator, value in words}


def engine_config(documents: Documents) -> dict[str, Any]:
    config = transfer_config(find(documents, "Deployment"))
    assert config is not None
    return config


@both_kinds
def test_the_server_holds_before_it_evicts_what_the_values_promise(name: str) -> None:
    values = values_of(name)
    options = options_of(server_container(manifests(values)))
    tier, ranks = values["hostTier"]["gibPerRank"], values.get("tensorParallel", 1)
    assert options["l1-size-gb"] is not None
    assert float(options["l1-size-gb"]) == pytest.approx(l1_gib(tier, ranks))
    assert options["eviction-trigger-watermark"] == str(WATERMARK)
    assert options["chunk-size"] == str(values["hostTier"].get("chunkTokens", 256))
    assert "no-l1-use-lazy" in options


@both_kinds
def test_the_tiers_memory_is_the_servers_and_not_the_engines(name: str) -> None:
    values = values_of(name)

    def memory_gib(values: dict[str, Any]) -> tuple[int, int]:
        documents = manifests(values)
        found = []
        for spec in (container(find(documents, "Deployment")), server_container(documents)):
            requests, limits = spec["resources"]["requests"], spec["resources"]["limits"]
            assert requests["memory"] == limits["memory"]
            found.append(int(limits["memory"].removesuffix("Gi")))
        engine, server = found
        return engine, server

    engine, server = memory_gib(values)
    larger = {**values["hostTier"], "gibPerRank": values["hostTier"]["gibPerRank"] + 8}
    ranks = values.get("tensorParallel", 1)
    assert memory_gib({**values, "hostTier": larger}) == (engine, server + 10 * ranks)
    assert server >= l1_gib(values["hostTier"]["gibPerRank"], ranks) + values["lmcacheServer"].get("processGib", 5)


@both_kinds
def test_engines_ask_the_server_where_it_answers(name: str) -> None:
    documents = manifests(values_of(name))
    config = engine_config(documents)
    extra = config["kv_connector_extra_config"]
    options = parse_options(extra)
    assert options.mode == "server"
    server = server_container(documents)
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    listens = options_of(server)
    assert (listens["port"], listens["http-port"]) == (str(ports["lmcache"]), str(ports["lmcache-http"]))
    host = re.fullmatch(r"tcp://([a-z0-9.-]+)", extra["lmcache.mp.host"])
    assert host is not None
    assert extra["lmcache.mp.port"] == ports["lmcache"]
    assert options.server_http_url == f"http://{host[1]}:{ports['lmcache-http']}"
    # A restore that the server's death cuts off is computed.
    assert config["kv_load_failure_policy"] == "recompute"
    # LMCache's file is for LMCache in the engine.
    assert "LMCACHE_CONFIG_FILE" not in environment(find(documents, "Deployment"))
    assert not [document for document in documents if "lmcache.yaml" in document.get("data", {})]


def test_a_node_asks_its_own_server_through_a_service() -> None:
    documents = manifests(values_of("server-daemonset"))
    service = find(documents, "Service", "-server")
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    assert engine_config(documents)["kv_connector_extra_config"]["lmcache.mp.host"] == (
        f"tcp://{service['metadata']['name']}"
    )
    server = find(documents, "DaemonSet", "-server")["spec"]["template"]["spec"]
    engine = find(documents, "Deployment")["spec"]["template"]["spec"]
    for placement in ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "securityContext"):
        assert server[placement] == engine[placement]
    assert options_of(server_container(documents))["host"] == "0.0.0.0"


def test_what_keeps_engines_apart_does_not_keep_them_from_their_server() -> None:
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
    documents = manifests({**values_of("server-daemonset"), "affinity": {"podAntiAffinity": apart}})
    assert "affinity" not in find(documents, "DaemonSet", "-server")["spec"]["template"]["spec"]
    assert "podAntiAffinity" in find(documents, "Deployment")["spec"]["template"]["spec"]["affinity"]


def test_a_sidecar_is_there_before_the_engine_and_listens_to_it_alone() -> None:
    documents = manifests(values_of("cpu-server-sidecar"))
    assert not [document for document in documents if document["kind"] == "DaemonSet"]
    pod = find(documents, "Deployment")["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    # Such an init container runs beside the others, which start once its startup probe succeeds.
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"]["port"] == "lmcache-http"
    assert options_of(sidecar)["host"] == "127.0.0.1"
    exposed = {port["targetPort"] for port in find(documents, "Service")["spec"]["ports"]}
    assert exposed == {"http"}


def test_kv_travels_as_flavour_and_kind_allow() -> None:
    def transfer(name: str, **changed: Any) -> tuple[bool, bool, bool, bool]:
        documents = manifests({**values_of(name), **changed})
        server, engine = server_container(documents), container(find(documents, "Deployment"))
        shm = [{m["mountPath"]: m["name"] for m in spec["volumeMounts"]}.get("/dev/shm") for spec in (server, engine)]
        options = options_of(server)
        isolated = engine_config(documents)["kv_connector_extra_config"].get("lmcache.mp.isolated_ipc", False)
        assert ("isolated-ipc" in options) == isolated
        sees_gpus = "NVIDIA_VISIBLE_DEVICES" in {entry["name"] for entry in server["env"]}
        return "supported-transfer-mode" in options, isolated, shm[0] == shm[1], sees_gpus

    node, sidecar = {"kind": "daemonset"}, {"kind": "sidecar"}
    linux = {"kubernetes.io/os": "linux"}
    # On CPUs the workers send their KV. CUDA's handles need a common /dev/shm, which only one pod's containers have.
    assert transfer("cpu-server-sidecar") == (True, False, True, False)
    assert transfer("cpu-server-sidecar", lmcacheServer=node, nodeSelector=linux) == (True, False, False, False)
    assert transfer("gpu", mode="server", lmcacheServer=node, nodeSelector=linux) == (False, True, False, True)
    assert transfer("gpu", mode="server", lmcacheServer=sidecar) == (False, False, True, True)


def test_a_server_gets_the_environment_that_engines_get() -> None:
    entry = {"name": "LMCACHE_RESP_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "kv", "key": "password"}}}
    for name in SETS:
        assert entry in server_container(manifests({**values_of(name), "extraEnv": [entry]}))["env"]


@pytest.mark.parametrize("name", ["local-disk", *SETS])
def test_a_disk_is_where_engines_and_servers_can_write_to_it(name: str) -> None:
    volume, mount = {"name": "nvme", "emptyDir": {}}, {"name": "nvme", "mountPath": "/nvme"}
    documents = manifests({**values_of(name), "extraVolumes": [volume], "extraVolumeMounts": [mount]})
    workloads = [find(documents, "Deployment"), *(d for d in documents if d["metadata"]["name"].endswith("-server"))]
    for pod in (d["spec"]["template"]["spec"] for d in workloads if d["kind"] in ("Deployment", "DaemonSet")):
        assert volume in pod["volumes"]
        assert all(mount in spec["volumeMounts"] for spec in [*pod["containers"], *pod.get("initContainers", [])])


def test_gpus_are_the_engines_alone() -> None:
    documents = manifests(values_of("server-daemonset"))
    assert "nvidia.com/gpu" in container(find(documents, "Deployment"))["resources"]["limits"]
    assert "nvidia.com/gpu" not in server_container(documents)["resources"]["limits"]


def test_the_engines_of_a_node_are_a_pool() -> None:
    values = values_of("server-daemonset")
    documents = manifests(values)
    pool = parse_options(engine_config(documents)["kv_connector_extra_config"]).telemetry_deployment
    assert pool == "agents.elm-efficient-lmcache.10.20.30.40"
    exporter = container(find(documents, "DaemonSet", "-exporter"))
    assert f"--deployment={pool}" in arguments(exporter)
    long = manifests(values, release="a-release-whose-name-is-as-long-as-helm-lets-it-be-53")
    (engine,) = [document for document in long if document["kind"] == "Deployment"]
    config = transfer_config(engine)
    assert config is not None
    longest_address = "255.255.255.255"
    pool = parse_options(config["kv_connector_extra_config"]).telemetry_deployment
    assert len(pool.replace("10.20.30.40", longest_address)) <= 64


def test_a_server_talks_to_engines_and_its_metrics_to_those_named() -> None:
    values = values_of("server-daemonset")
    ingress = find(manifests(values), "NetworkPolicy", "-server")["spec"]["ingress"]
    engines, prometheus = ingress
    (peer,) = engines["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"
    assert set(peer) == {"podSelector"}
    assert [port["port"] for port in engines["ports"]] == [5555, 8080]
    assert prometheus == {"from": values["lmcacheServer"]["metricsFrom"], "ports": [{"port": 8080}]}
    del values["lmcacheServer"]["metricsFrom"]
    closed = manifests(values)
    assert len(find(closed, "NetworkPolicy", "-server")["spec"]["ingress"]) == 1
    assert not [document for document in closed if document["kind"] == "PodMonitor"]


def test_nobody_but_those_named_reaches_the_server_in_an_engines_pod() -> None:
    values = {**values_of("cpu-server-sidecar"), "networkPolicy": {"enabled": True}}
    ports = [rule["ports"] for rule in find(manifests(values), "NetworkPolicy", "-engine")["spec"]["ingress"]]
    assert ports == [[{"port": "http"}]]
    values["lmcacheServer"] = {**values["lmcacheServer"], "metricsFrom": [{"namespaceSelector": {}}]}
    ports = [rule["ports"] for rule in find(manifests(values), "NetworkPolicy", "-engine")["spec"]["ingress"]]
    assert ports == [[{"port": "http"}], [{"port": 8080}]]


@both_kinds
def test_prometheus_scrapes_the_server_at_a_port_that_it_has(name: str) -> None:
    documents = manifests(values_of(name))
    (endpoint,) = find(documents, "PodMonitor", "-server")["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["port"] in {port["name"] for port in server_container(documents)["ports"]}


@both_kinds
def test_notes_tell_the_servers_memory(name: str) -> None:
    values = values_of(name)
    notes = render(values)["NOTES.txt"]
    memory = server_container(manifests(values))["resources"]["limits"]["memory"].removesuffix("Gi")
    assert f"mode          server, {values['lmcacheServer']['kind']}" in notes
    assert f"{memory} GiB per server" in notes


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [("private-registry", True), ("local-disk", True), ("gpu", False), *((name, True) for name in SETS)],
)
def test_restores_from_outside_the_engine_are_computed_when_they_fail(name: str, recomputed: bool) -> None:
    assert engine_config(manifests(values_of(name))).get("kv_load_failure_policy") == (
        "recompute" if recomputed else None
    )


def test_the_tenant_key_comes_from_its_secret() -> None:
    def key(values: dict[str, Any]) -> list[dict[str, Any]]:
        entries = container(find(manifests(values), "Deployment"))["env"]
        return [entry["valueFrom"] for entry in entries if entry["name"] == TENANT_KEY_VARIABLE]

    assert key(values_of("gpu")) == []
    named = {"tenantKey": {"existingSecret": "tenants", "key": "digest"}}
    assert key({**values_of("gpu"), **named}) == [{"secretKeyRef": {"name": "tenants", "key": "digest"}}]
    assert key(values_of("server-daemonset")) == [{"secretKeyRef": {"name": "tenants", "key": "tenant-key"}}]
