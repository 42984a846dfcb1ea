"""Writes the Grafana dashboard into the Helm chart; deploy/grafana/ links to it.

python scripts/write_dashboard.py
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from dashboard_rows import OURS, ROWS, Panel

DASHBOARD = Path(__file__).parents[1] / "deploy/helm/efficient-lmcache/dashboards/efficient-lmcache.json"

_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    ids, top = count(1), 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": next(ids),
                "type": "row",
                "title": title,
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
                "panels": [],
            }
        )
        for index, panel in enumerate(row):
            line, column = divmod(index, _COLUMNS)
            position = {"x": column * _WIDTH, "y": top + 1 + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": next(ids), "gridPos": position, **_time_series(panel)})
        top += 1 + _HEIGHT * -(-len(row) // _COLUMNS)
    return {
        "uid": "efficient-lmcache",
        "title": "Efficient-LMCache",
        "tags": ["llm", "kv-cache"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_DATASOURCE, *_VARIABLES]},
        "panels": panels,
    }


_DATASOURCE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _variable(name: str, label: str, metric: str) -> dict[str, Any]:
    query = f"label_values({OURS}{metric}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


_VARIABLES = [
    _variable("model", "model_name", "tier_capacity_bytes"),
    _variable("instance", "instance", "tier_capacity_bytes"),
    _variable("deployment", "deployment", "cluster_redis_up"),
]


def _time_series(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    custom: dict[str, Any] = {"fillOpacity": 0, "showPoints": "never"}
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
        custom["thresholdsStyle"] = {"mode": "line"}
    defaults = {
        "unit": panel.unit,
        "min": 0,
        "custom": custom,
        "color": {"mode": "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """The dashboard's file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text())
