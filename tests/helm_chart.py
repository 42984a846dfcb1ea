"""The chart, rendered by Helm's own engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "efficient-lmcache"
WORKLOADS = ("Deployment", "DaemonSet")
_POD = {"status.hostIP": "10.20.30.40"}
VALUES = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}


def values_of(name: str) -> dict[str, Any]:
    """One of ci/*-values.yaml."""
    values: dict[str, Any] = yaml.safe_load(VALUES[name].read_text())
    return values


def render(values: dict[str, Any], *, release: str = "elm", namespace: str = "agents") -> dict[str, str]:
    """The text of every template, by file name.

    Raises:
        helm_python.HelmError: what `helm template` would say.
    """
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name=release, namespace=namespace)
    return {Path(name).name: text for name, text in texts.items()}


def manifests(values: dict[str, Any], **release: str) -> list[dict[str, Any]]:
    """What would be handed to Kubernetes."""
    texts = render(values, **release)
    return [
        document
        for name, text in texts.items()
        if name.endswith(".yaml")
        for document in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if document is not None
    ]


def find(documents: list[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    """The one manifest of this kind whose name ends so, after the release's name."""
    found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == f"elm-efficient-lmcache{suffix}"]
    assert len(found) == 1, [(d["kind"], d["metadata"]["name"]) for d in documents]
    return found[0]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    """The only container of its pods, beside a server that runs with it."""
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def server_container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The LMCache server's, of a DaemonSet or in the engine's pod."""
    pods = [d["spec"]["template"]["spec"] for d in documents if d["kind"] in WORKLOADS]
    (only,) = [
        entry
        for pod in pods
        for entry in [*pod.get("initContainers", []), *pod["containers"]]
        if entry["name"] == "lmcache-server"
    ]
    return dict(only)


def variables(spec: dict[str, Any]) -> dict[str, str]:
    """A container's, with literal values or from what Kubernetes tells a pod of itself."""
    entries = spec.get("env", [])
    literal = {entry["name"]: entry["value"] for entry in entries if "value" in entry}
    fields = {e["name"]: e["valueFrom"]["fieldRef"] for e in entries if "fieldRef" in e.get("valueFrom", {})}
    return {**literal, **{name: _POD[field["fieldPath"]] for name, field in fields.items()}}


def environment(workload: dict[str, Any]) -> dict[str, str]:
    return variables(container(workload))


def arguments(spec: dict[str, Any]) -> list[str]:
    """A container's, with $(NAME) filled in as Kubernetes does."""
    words = list(spec["args"])
    for name, value in variables(spec).items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def transfer_config(engine: dict[str, Any]) -> dict[str, Any] | None:
    """What the engine's command line says to vLLM about KV transfer."""
    option = "--kv-transfer-config="
    (text,) = [word for word in arguments(container(engine)) if word.startswith(option)]
    config: dict[str, Any] | None = json.loads(text.removeprefix(option))
    return config


def script(name: str) -> ModuleType:
    """A module of scripts/, whose modules import each other by name."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
