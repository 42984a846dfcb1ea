"""Values that cannot work are refused before anything is installed, in words that say what to change."""

from __future__ import annotations

import json
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, VALUES, container, find, manifests, script, values_of

from efficient_lmcache.connector.options import ConnectorOptions
from efficient_lmcache.sizing.inputs import PlanOptions

helm_python = pytest.importorskip("helm_python", reason="no Helm engine (pip install helm-python-sdk)")


def with_value(path: str, value: Any, base: str = "gpu") -> dict[str, Any]:
    """A valid set of values with one changed; None removes it."""
    values = deepcopy(values_of(base))
    *sections, name = path.split(".")
    section = values
    for key in sections:
        section = section.setdefault(key, {})
    section[name] = value
    if value is None:
        del section[name]
    return values


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model", "", "/model"),
        ("model", None, "model"),
        ("weightsGib", None, "weightsGib"),
        ("hostTier.gibPerRank", None, "gibPerRank"),
        ("hostTier.gibPerRank", "22Gi", "/hostTier/gibPerRank"),
        ("hostTier.gibPerRank", -1, "/hostTier/gibPerRank"),
        ("hostTier.gib", 22, "gib"),
        ("tensorParallel", 0, "/tensorParallel"),
        ("tensorParallel", 1.5, "/tensorParallel"),
        ("flavour", "tpu", "/flavour"),
        ("telemetry.transport", False, "/telemetry/transport"),  # what YAML makes of an unquoted off
        ("efficient.admission", "some", "/efficient/admission"),
        ("efficient.occupancy_threshold", 95, "/efficient/occupancy_threshold"),
        ("efficient.kappa", 8, "kappa"),
        ("efficient.telemetry", "off", "telemetry"),
        ("image.digest", "latest", "/image/digest"),
        ("securityContext.runAsUser", 0, "/securityContext/runAsUser"),
        ("vllmArgs", ["--port=9000"], "/vllmArgs/0"),
        ("vllmArgs", ["--max-num-seqs=8", "--kv-transfer-config={}"], "/vllmArgs/1"),
        ("vllmArgs", ["--kv-transfer-config.kv_role=kv_both"], "/vllmArgs/0"),
        ("vllmArgs", ["--tensor-parallel-size", "8"], "/vllmArgs/0"),
        ("vllmArgs", [8], "/vllmArgs/0"),
        ("replicaCount", 2, "replicaCount"),
    ],
)
def test_the_schema_names_what_it_refuses(path: str, value: Any, said: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        manifests(with_value(path, value))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("mode", "server", "daemonset takes the tier's memory on every node: say in nodeSelector"),
        ("lmcache", {"mp.lazy_offload": True}, "lmcache.mp.lazy_offload is for mode: server"),
        ("redis.bundled", True, "set telemetry.transport: redis"),
        ("telemetry.transport", "redis", "needs redis.bundled: true or redis.url"),
        ("lmcache.max_local_cpu_size", 40, "use hostTier.chunkTokens and hostTier.gibPerRank"),
        ("flavour", "cpu", "tensorParallel: 1"),
        ("extraVolumeMounts", [{"name": "nvme", "mountPath": "/kv"}], "extraVolumeMounts: nvme is not in extraVolumes"),
        ("redis.url", "http://redis:6379", "redis.url must be redis://HOST:PORT/DB"),
        ("redis.url", "redis://redis:6379/0?ssl_ca_certs=/ca.crt", "redis.url must be redis://HOST:PORT/DB"),
    ],
)
def test_combinations_that_cannot_work_are_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        manifests(with_value(path, value))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("hostTier.gibPerRank", 0, "mode: server needs a tier"),
        ("lmcacheServer.httpPort", 5555, "both 5555; they must differ"),
        ("lmcacheServer.port", 8000, "must not be 8000"),
        ("telemetry", {"transport": "redis"}, "needs redis.bundled: true or redis.url"),
        ("lmcache", {"remote_url": "redis://kv.example:6379"}, r"names begin with mp\."),
        ("lmcache", {"mp.port": 6000}, r"lmcache\.mp\.port: the chart says it"),
        ("lmcache", {"mp.isolated_ipc": True}, r"lmcache\.mp\.isolated_ipc: the chart says it"),
        ("efficient", {"remote_staging_gib": 2}, r"efficient\.remote_staging_gib"),
        ("lmcacheServer.kind", "deployment", "/lmcacheServer/kind"),
        ("lmcacheServer.args", ["--l1-size-gb=4"], "/lmcacheServer/args/0"),
        ("lmcacheServer.args", ["--no-isolated-ipc"], "/lmcacheServer/args/0"),
        ("lmcacheServer.args", ["--eviction-ratio=0.1", "--disable-metrics"], "/lmcacheServer/args/1"),
        ("lmcacheServer.sizeGb", 4, "sizeGb"),
    ],
)
def test_a_server_that_cannot_work_is_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        manifests(with_value(path, value, base="cpu-server-sidecar"))


def test_agents_of_all_engines_are_not_counted_against_one_engines_server() -> None:
    values = with_value("lmcacheServer.kind", "sidecar", base="server-daemonset")
    with pytest.raises(helm_python.HelmError, match=r"set telemetry\.transport: local"):
        manifests(values)


@pytest.mark.parametrize("login", [":secret@", "user:secret@"])
@pytest.mark.parametrize("scheme", ["redis", "rediss", "http"])
def test_a_password_in_the_url_is_refused_and_not_repeated(scheme: str, login: str) -> None:
    with pytest.raises(helm_python.HelmError, match=r"redis\.existingSecret") as refused:
        manifests(with_value("redis.url", f"{scheme}://{login}redis:6379/0"))
    assert "secret@" not in str(refused.value)


def test_a_remote_tier_without_a_host_tier_is_refused_as_nothing_would_use_it() -> None:
    values = with_value("lmcache", {"remote_url": "resp://kv.example:6379"}, base="no-tier")
    with pytest.raises(helm_python.HelmError, match=r"hostTier\.gibPerRank is 0, which serves plain vLLM"):
        manifests(values)


def test_of_two_redis_one_must_be_chosen() -> None:
    with pytest.raises(helm_python.HelmError, match="choose one"):
        manifests(with_value("redis.bundled", True, base="external-redis-tls"))


def test_the_schema_knows_the_connectors_options_with_their_bounds() -> None:
    known = json.loads((CHART / "values.schema.json").read_text())["properties"]["efficient"]["properties"]
    fields = ConnectorOptions.model_json_schema()["properties"]
    # Telemetry and the mode have values of their own, and a log of decisions no place in a pod.
    elsewhere = ("telemetry", "mode", "server", "decision_log")
    options = {name: field for name, field in fields.items() if not name.startswith(elsewhere)}
    left_out = {"title", "default", "anyOf"}
    expected = {
        # An optional one is left out rather than null.
        name: {key: value for key, value in (field | field.get("anyOf", [{}])[0]).items() if key not in left_out}
        for name, field in options.items()
    }
    assert known == expected


def test_every_value_is_described_and_unknown_ones_are_refused() -> None:
    def check(schema: dict[str, Any], path: str) -> None:
        assert schema.get("description", "").endswith("."), path
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
            for name, value in schema["properties"].items():
                check(value, f"{path}.{name}")

    check(json.loads((CHART / "values.schema.json").read_text()), "values")


def test_every_default_is_in_the_schema() -> None:
    def check(schema: dict[str, Any], defaults: dict[str, Any], path: str) -> None:
        assert set(defaults) <= set(schema["properties"]), path
        for name, value in defaults.items():
            if "properties" in schema["properties"][name]:
                check(schema["properties"][name], value, f"{path}.{name}")

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    check(json.loads((CHART / "values.schema.json").read_text()), defaults, "values")


def test_the_readme_lists_every_value_with_its_default() -> None:
    reference = script("write_chart_reference")
    assert (CHART / "README.md").read_text() == reference.readme(), "run scripts/write_chart_reference.py"


def test_there_are_values_for_every_kind_of_deployment_that_the_readme_promises() -> None:
    assert len(VALUES) >= 6
    assert {"gpu", "cpu-trial-bundled-redis", "external-redis-tls", "production-stack", "llm-d"} <= set(VALUES)
    assert {"server-daemonset", "cpu-server-sidecar"} <= set(VALUES)


def test_a_plan_becomes_values_by_the_readmes_line() -> None:
    if shutil.which("jq") is None:
        pytest.skip("no jq (apt-get install jq)")
    readme = (CHART / "README.md").read_text()
    (expression,) = [line.split("'")[1] for line in readme.splitlines() if line.startswith("jq ")]
    options = PlanOptions(model=Path("config.json"), ranks=8, gpu="H20")
    plan = {"recommended_gib_per_rank": 22.0, "options": options.to_json()}
    result = subprocess.run(["jq", expression], input=json.dumps(plan), capture_output=True, text=True, check=True)
    values = {**values_of("gpu"), **json.loads(result.stdout)}
    assert values["hostTier"] == {"gibPerRank": 22, "chunkTokens": 1024}
    engine = container(find(manifests(values), "Deployment"))
    assert "--tensor-parallel-size=8" in engine["args"]
