"""The chart renders, lints and validates for every set of values in its ci/, and its parts fit together."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import typer
import yaml
from helm_chart import (
    CHART,
    ROOT,
    VALUES,
    WORKLOADS,
    container,
    environment,
    find,
    manifests,
    render,
    transfer_config,
    values_of,
)

from efficient_lmcache import __version__
from efficient_lmcache.cli import app
from efficient_lmcache.connector.options import parse_options
from efficient_lmcache.telemetry.redis_settings import check_url

helm_python = pytest.importorskip("helm_python", reason="no Helm engine (pip install helm-python-sdk)")
every_set = pytest.mark.parametrize("name", VALUES)

# Served by operators, whose schemas are not Kubernetes' own.
_CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
_WARNING = 2


@every_set
def test_lint_is_clean(name: str) -> None:
    report = helm_python.lint(CHART, values_of(name), strict=True)
    assert [message for message in report["messages"] if message["severity"] >= _WARNING] == []
    assert not report["errors"]


@every_set
def test_manifests_follow_the_schemas_of_kubernetes(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = manifests(values_of(name))
    for document in documents:
        if document["kind"] not in _CUSTOM:
            validate(document, "1.37.0", strict=True)
    identities = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(identities)) == len(identities)


@every_set
def test_every_pod_is_restricted_and_writes_to_volumes_only(name: str) -> None:
    for document in manifests(values_of(name)):
        if document["kind"] not in WORKLOADS:
            continue
        pod = document["spec"]["template"]["spec"]
        assert not {"hostIPC", "hostNetwork", "hostPID"} & set(pod)
        security = pod["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        mounted = set()
        for entry in [*pod.get("initContainers", []), container(document)]:
            assert entry["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not [port for port in entry["ports"] if "hostPort" in port]
            assert "/tmp" in {mount["mountPath"] for mount in entry["volumeMounts"]}
            mounted |= {mount["name"] for mount in entry["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


@every_set
def test_services_monitors_budgets_and_policies_select_pods_that_exist(name: str) -> None:
    documents = manifests(values_of(name))
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in documents if d["kind"] in WORKLOADS]
    services = [d["metadata"]["labels"] for d in documents if d["kind"] == "Service"]
    selections = {
        "Service": (lambda spec: spec["selector"], pods),
        "Deployment": (lambda spec: spec["selector"]["matchLabels"], pods),
        "DaemonSet": (lambda spec: spec["selector"]["matchLabels"], pods),
        "PodMonitor": (lambda spec: spec["selector"]["matchLabels"], pods),
        "PodDisruptionBudget": (lambda spec: spec["selector"]["matchLabels"], pods),
        "NetworkPolicy": (lambda spec: spec["podSelector"]["matchLabels"], pods),
        "ServiceMonitor": (lambda spec: spec["selector"]["matchLabels"], services),
    }
    for document in documents:
        if document["kind"] in selections:
            selector, candidates = selections[document["kind"]]
            matching = [labels for labels in candidates if selector(document["spec"]).items() <= labels.items()]
            assert len(matching) == 1, (document["kind"], document["metadata"]["name"])


@every_set
def test_the_connector_accepts_its_options(name: str) -> None:
    values = values_of(name)
    config = transfer_config(find(manifests(values), "Deployment"))
    if values["hostTier"]["gibPerRank"] == 0:
        assert config is None
        return
    assert config is not None
    assert config["kv_connector"] == "EfficientLMCacheConnector"
    options = parse_options(config["kv_connector_extra_config"])
    for option, value in values.get("efficient", {}).items():
        assert getattr(options, option) == value
    assert options.telemetry_transport == values.get("telemetry", {}).get("transport", "local")


@every_set
def test_the_memory_of_a_pod_holds_tier_weights_and_processes(name: str) -> None:
    values = values_of(name)
    with helm_python.Chart.load(CHART) as chart:
        merged = chart.merge_values(values)
    ranks, tier = merged["tensorParallel"], merged["hostTier"]["gibPerRank"]
    parts = merged["weightsGib"] + merged["processGibPerRank"] * (ranks + 1) + merged["sharedMemoryGib"]
    parts += tier * ranks if merged["mode"] == "in_process" else 0
    parts += merged["cpu"]["kvCacheGib"] if merged["flavour"] == "cpu" else 0
    if merged["lmcache"].keys() & {"remote_url", "local_disk"}:
        parts += ranks * merged["efficient"].get("remote_staging_gib", parse_options({}).remote_staging_gib)
    resources = container(find(manifests(values), "Deployment"))["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == f"{math.ceil(parts)}Gi"
    if merged["flavour"] == "gpu":
        assert resources["limits"][merged["gpuResource"]] == ranks


@every_set
def test_notes_print_what_is_in_force(name: str) -> None:
    values = values_of(name)
    notes = render(values)["NOTES.txt"]
    tier = values["hostTier"]["gibPerRank"]
    assert (f"{tier} GiB per rank" if tier else "plain vLLM") in notes
    memory = container(find(manifests(values), "Deployment"))["resources"]["limits"]["memory"]
    assert f"{memory.removesuffix('Gi')} GiB per {'engine' if values.get('mode') == 'server' else 'pod'}" in notes


def test_the_host_tier_reaches_lmcache_and_a_change_restarts_the_engines() -> None:
    values = values_of("private-registry")
    documents = manifests(values)
    config = yaml.safe_load(find(documents, "ConfigMap", "-lmcache")["data"]["lmcache.yaml"])
    assert config["max_local_cpu_size"] == values["hostTier"]["gibPerRank"]
    assert config["chunk_size"] == 256
    assert config["local_cpu"] is True
    assert config["remote_url"] == values["lmcache"]["remote_url"]
    engine = find(documents, "Deployment")
    mounted = {mount["mountPath"] for mount in container(engine)["volumeMounts"]}
    assert environment(engine)["LMCACHE_CONFIG_FILE"].rpartition("/")[0] in mounted

    def checksum(gib: float) -> str:
        changed = manifests({**values, "hostTier": {"gibPerRank": gib}})
        return str(find(changed, "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/lmcache"])

    assert checksum(80) == checksum(80) != checksum(81)


def test_no_password_is_in_a_manifest_other_than_a_secret() -> None:
    for name in ("multi-engine", "external-redis-tls", "cpu-trial-bundled-redis", "server-daemonset"):
        documents = manifests(values_of(name))
        secrets = [value for d in documents if d["kind"] == "Secret" for value in d["data"].values()]
        rest = json.dumps([d for d in documents if d["kind"] != "Secret"])
        assert not any(secret in rest for secret in secrets)
        secret = ("PASSWORD", "AUTH", "TOKEN", "_KEY")
        for deployment in (d for d in documents if d["kind"] == "Deployment"):
            for entry in container(deployment).get("env", []):
                assert ("secretKeyRef" in entry.get("valueFrom", {})) == entry["name"].endswith(secret)


@pytest.mark.parametrize(
    ("name", "url", "secret", "key"),
    [
        (
            "external-redis-tls",
            "rediss://telemetry@redis.example:6380/3?ssl_ca_certs=/etc/redis-ca/ca.crt",
            "redis-login",
            "telemetry",
        ),
        ("multi-engine", "redis://elm-efficient-lmcache-redis:6379/0", "elm-efficient-lmcache-redis", "password"),
    ],
)
def test_engines_and_exporter_log_in_to_one_redis_as_one_deployment(name: str, url: str, secret: str, key: str) -> None:
    documents = manifests(values_of(name))
    engine, exporter = (find(documents, "Deployment", suffix) for suffix in ("", "-exporter"))
    config = transfer_config(engine)
    assert config is not None
    options = parse_options(config["kv_connector_extra_config"])
    assert options.telemetry_redis_url == url
    assert options.telemetry_deployment == "agents.elm-efficient-lmcache"
    assert f"--redis={url}" in container(exporter)["args"]
    assert f"--deployment={options.telemetry_deployment}" in container(exporter)["args"]
    for deployment in (engine, exporter):
        volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container(deployment)["volumeMounts"]}
        assert options.telemetry_redis_password_file is not None
        directory, _, file = options.telemetry_redis_password_file.rpartition("/")
        assert volumes[mounts[directory]]["secret"] == {"secretName": secret, "items": [{"key": key, "path": file}]}
        assert ("/etc/redis-ca" in mounts) == ("ssl_ca_certs=/etc/redis-ca/" in url)


def test_the_bundled_redis_takes_its_password_from_a_secret_that_exists() -> None:
    values = values_of("cpu-trial-bundled-redis")
    documents = manifests({**values, "redis": {"bundled": True, "existingSecret": "login", "passwordKey": "key"}})
    assert not [document for document in documents if document["kind"] == "Secret"]
    password = {"secretKeyRef": {"name": "login", "key": "key"}}
    redis = container(find(documents, "Deployment", "-redis"))
    assert [entry["valueFrom"] for entry in redis["env"]] == [password, password]
    volumes = find(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    login = {"secretName": "login", "items": [{"key": "key", "path": "password"}]}
    assert {"name": "redis-login", "secret": login} in volumes


@pytest.mark.parametrize("name", ["cpu-trial-bundled-redis", "external-redis-tls", "multi-engine"])
def test_the_command_line_takes_the_exporters_arguments(name: str) -> None:
    exporter = container(find(manifests(values_of(name)), "Deployment", "-exporter"))
    program, *path = exporter["command"]
    assert program == "efficient-lmcache"
    command: Any = typer.main.get_command(app)
    for part in path:
        command = command.commands[part]
    context = command.make_context(path[-1], list(exporter["args"]))
    assert context.params["port"] == exporter["ports"][0]["containerPort"]
    check_url(context.params["redis"])


def test_an_image_is_pinned_by_digest_or_by_version_and_flavour() -> None:
    values = values_of("private-registry")
    digest = values["image"]["digest"]
    assert container(find(manifests(values), "Deployment"))["image"].endswith(f"efficient-lmcache@{digest}")
    plain = container(find(manifests(values_of("gpu")), "Deployment"))["image"]
    assert plain == f"efficient-lmcache:{__version__}-gpu"


def test_routers_find_the_engines_by_their_labels() -> None:
    for name in ("production-stack", "llm-d"):
        engine = find(manifests(values_of(name)), "Deployment")["spec"]["template"]
        assert values_of(name)["podLabels"].items() <= engine["metadata"]["labels"].items()
        assert engine["spec"]["containers"][0]["ports"] == [{"name": "http", "containerPort": 8000}]


def test_no_alert_about_reports_where_there_are_none() -> None:
    def alerts(name: str) -> set[str]:
        rule = find(manifests(values_of(name)), "PrometheusRule")
        return {entry["alert"] for group in rule["spec"]["groups"] for entry in group["rules"]}

    assert "EfficientLMCacheStaleTelemetry" in alerts("multi-engine")
    assert "EfficientLMCacheStaleTelemetry" not in alerts("no-telemetry")
    assert "EfficientLMCacheTierThrashing" in alerts("no-telemetry")
    assert "EfficientLMCacheRedisDown" in alerts("multi-engine")


def test_only_the_engine_and_the_exporter_reach_the_bundled_redis() -> None:
    policy = find(manifests(values_of("multi-engine")), "NetworkPolicy", "-redis")
    (rule,) = policy["spec"]["ingress"]
    components = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in rule["from"]
        if set(peer) == {"podSelector"}
    }
    assert components == {"engine", "exporter"}
    assert len(rule["from"]) == len(components)


def test_the_chart_has_the_version_of_the_package() -> None:
    chart: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_names_stay_within_what_kubernetes_allows() -> None:
    long = "a-release-whose-name-is-as-long-as-helm-lets-it-be-53"
    for document in manifests(values_of("multi-engine"), release=long):
        assert len(document["metadata"]["name"]) <= 63


def test_grafana_folder_and_chart_have_one_dashboard() -> None:
    linked = ROOT / "deploy" / "grafana" / "efficient-lmcache.json"
    assert linked.resolve() == (CHART / "dashboards" / "efficient-lmcache.json").resolve()
    config_map = find(manifests(values_of("gpu")), "ConfigMap", "-dashboard")
    assert json.loads(config_map["data"]["efficient-lmcache.json"]) == json.loads(linked.read_text())
