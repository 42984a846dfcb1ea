"""Releases as operators make them: long names, one beside another, inside another chart, with values taken away."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, container, find, manifests, render, transfer_config, values_of

helm_python = pytest.importorskip("helm_python", reason="no Helm engine (pip install helm-python-sdk)")

LONGEST = "a-release-whose-name-is-as-long-as-helm-lets-it-be-53"


def identities(documents: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(document["kind"], document["metadata"]["name"]) for document in documents}


def deployment_name(documents: list[dict[str, Any]]) -> str:
    (exporter,) = [d for d in documents if d["metadata"]["name"].endswith("-exporter") and d["kind"] == "Deployment"]
    (word,) = [word for word in container(exporter)["args"] if word.startswith("--deployment=")]
    return str(word.removeprefix("--deployment="))


def test_releases_whose_long_names_begin_alike_share_nothing() -> None:
    first, second = (
        manifests(values_of("multi-engine"), release=LONGEST[:-1] + end, namespace="n" * 40) for end in "34"
    )
    assert not identities(first) & identities(second)
    names = {deployment_name(first), deployment_name(second)}
    assert len(names) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) for name in names)
    for document in [*first, *second]:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", document["metadata"]["name"])


def test_no_selector_of_one_release_selects_what_another_has() -> None:
    first, second = (manifests(values_of("multi-engine"), release=name) for name in ("agents", "agents-2"))
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in second if d["kind"] == "Deployment"]
    labels += [d["metadata"]["labels"] for d in second if d["kind"] == "Service"]

    def selectors(value: Any) -> Iterator[dict[str, str]]:
        if isinstance(value, dict):
            for key, entry in value.items():
                if key == "matchLabels" or (key == "selector" and "matchLabels" not in entry):
                    yield entry
                yield from selectors(entry)
        elif isinstance(value, list):
            for entry in value:
                yield from selectors(entry)

    ours = [selector for selector in selectors(first) if any(name.startswith("app.kubernetes.io") for name in selector)]
    assert len(ours) > 10
    assert not [selector for selector in ours for candidate in labels if selector.items() <= candidate.items()]


def test_a_release_may_have_dots_and_not_begin_with_a_digit() -> None:
    assert ("Service", "my-release-efficient-lmcache") in identities(manifests(values_of("gpu"), release="my.release"))
    with pytest.raises(helm_python.HelmError, match=r"release 1st: .* a Service's name begins with a letter"):
        manifests(values_of("gpu"), release="1st")


def test_another_chart_can_depend_on_it_and_switch_it_off(tmp_path: Path) -> None:
    parent = {
        "apiVersion": "v2",
        "name": "parent",
        "version": "1.0.0",
        "dependencies": [
            {
                "name": "efficient-lmcache",
                "version": "0.1.0",
                "repository": "",
                "condition": "efficient-lmcache.enabled",
            }
        ],
    }
    shutil.copytree(CHART, tmp_path / "charts" / "efficient-lmcache")
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent))
    for enabled in (True, False):
        values = {"global": {"site": "x"}, "efficient-lmcache": {**values_of("gpu"), "enabled": enabled}}
        with helm_python.Chart.load(tmp_path) as chart:
            texts = chart.render(values, name="elm", namespace="agents")
        assert any("kind: Deployment" in text for text in texts.values()) == enabled


def test_engines_are_selected_by_labels_that_no_value_can_change() -> None:
    for name in ("name", "instance", "component"):
        values = {**values_of("gpu"), "podLabels": {f"app.kubernetes.io/{name}": "mine"}}
        with pytest.raises(helm_python.HelmError, match="/podLabels/app"):
            manifests(values)


@pytest.mark.parametrize("name", ["HOME", "USER", "PYTHONHASHSEED", "LMCACHE_CONFIG_FILE"])
def test_no_variable_is_set_twice(name: str) -> None:
    """Kubernetes' server-side apply, Helm 4's default, refuses a list with the same name twice."""
    with pytest.raises(helm_python.HelmError, match="/extraEnv/0/name"):
        manifests({**values_of("gpu"), "extraEnv": [{"name": name, "value": "x"}]})


def test_an_engine_does_not_ask_for_more_gpus_than_its_pod_has() -> None:
    for word in ("-tp=2", "--tensor_parallel_size=2", "--pipeline-parallel-size=2", "-dp", "--data-parallel-size"):
        with pytest.raises(helm_python.HelmError, match="/vllmArgs/0"):
            manifests({**values_of("gpu"), "vllmArgs": [word]})


def test_pods_that_have_ipv6_alone_are_reached() -> None:
    values = {**values_of("external-redis-tls"), "ipv6": True}
    values["redis"] = {**values["redis"], "url": "rediss://telemetry@[fd00::1]:6380/3"}
    documents = manifests(values)
    engine = find(documents, "Deployment")
    assert "--host=::" in container(engine)["args"]
    assert "--address=::" in container(find(documents, "Deployment", "-exporter"))["args"]
    assert "rediss://telemetry@[fd00::1]:6380/3?" in json.dumps(transfer_config(engine))
    with pytest.raises(helm_python.HelmError, match="LMCache's server listens on IPv4 alone"):
        manifests({**values_of("cpu-server-sidecar"), "ipv6": True})


def without(base: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    *sections, name = path
    values = json.loads(json.dumps(base))
    section = values
    for key in sections:
        section = section.setdefault(key, {})
    section[name] = None
    return dict(values)


@pytest.mark.parametrize("name", ["cpu-trial-bundled-redis", "server-daemonset"])
def test_a_value_taken_away_is_empty_or_named_as_missing(name: str) -> None:
    """`value: null` removes a default."""
    base = values_of(name)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    paths = [(key,) for key in defaults] + [
        (key, inner) for key, section in defaults.items() if isinstance(section, dict) for inner in section
    ]
    empty, refused = [], {}
    for path in paths:
        try:
            texts = render(without(base, path))
        except helm_python.HelmError as error:
            refused[path] = str(error)
        else:
            empty.append(path)
            for file, text in texts.items():
                if file.endswith(".yaml"):
                    assert all(document is None or "kind" in document for document in yaml.safe_load_all(text)), path
    # With a telemetry over Redis there must be one, and a DaemonSet must be told its nodes.
    combinations = "needs redis.bundled|say in nodeSelector"
    for path, said in refused.items():
        assert re.search(f"missing propert.*'{path[-1]}'|{combinations}", said), (path, said)
    # What is none by default, and the user of OpenShift, which chooses one itself.
    assert {("tolerations",), ("extraEnv",), ("podLabels",), ("securityContext", "runAsUser")} <= set(empty)


def test_a_cluster_may_choose_the_pods_user() -> None:
    values = {**values_of("gpu"), "securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    security = find(manifests(values), "Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert security["runAsNonRoot"] is True
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(security)
