"""The PromQL of dashboard and alerts, and what it asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from helm_chart import CHART

RULES = CHART / "alerts" / "rules.yaml"
DASHBOARD = CHART / "dashboards" / "efficient-lmcache.json"
# Grafana fills them in; Prometheus adds these labels to every sample.
_GRAFANA = {"$model": ".*", "$instance": ".*", "$deployment": ".*", "$__rate_interval": "1m"}
TARGET_LABELS = {"instance", "job"}


def panels() -> list[dict[str, Any]]:
    """Of the dashboard, those that show something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries() -> dict[str, str]:
    """Every panel's queries by its title and their letter, with Grafana's variables filled in."""
    return {
        f"{panel['title']} {target['refId']}": re.sub(
            "|".join(map(re.escape, _GRAFANA)), lambda found: _GRAFANA[found[0]], target["expr"]
        )
        for panel in panels()
        for target in panel["targets"]
    }


def alerts() -> dict[str, dict[str, Any]]:
    """The alerting rules by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def is_clusters(metric: str) -> bool:
    """Whether the exporter shows it, and not an engine."""
    return metric.startswith("efficient_lmcache:cluster_")


def all_queries() -> dict[str, str]:
    """PromQL by where it stands."""
    return {**dashboard_queries(), **{name: rule["expr"] for name, rule in alerts().items()}}


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Every metric that a query selects, with the labels it is selected by."""
    import promql_parser

    def visit(node: Any) -> Iterator[tuple[str, set[str]]]:
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name, {matcher.name for matcher in node.matchers.matchers}
        for child in ("expr", "lhs", "rhs", "vector_selector", "param"):
            if (below := getattr(node, child, None)) is not None:
                yield from visit(below)
        for argument in getattr(node, "args", []):
            yield from visit(argument)

    return visit(promql_parser.parse(query))
