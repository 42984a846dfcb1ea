"""Dashboard and alerts: every query parses and asks for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helm_chart import ROOT, script
from metric_queries import (
    DASHBOARD,
    TARGET_LABELS,
    alerts,
    all_queries,
    dashboard_queries,
    is_clusters,
    panels,
    selectors,
)

pytest.importorskip("promql_parser", reason="no PromQL parser (pip install promql-parser)")


def metrics() -> dict[str, set[str]]:
    """Labels of every metric: ours from the reference, vLLM's as a real engine showed them (vLLM 0.32)."""
    reference = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(efficient_lmcache:\w+)` \|.*?\|.*?\| ([^|]*) \|", reference, re.M)
    ours = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    scraped = json.loads((Path(__file__).parent / "golden" / "vllm-metrics.json").read_text())
    return {**ours, **{name: set(labels) for name, labels in scraped.items()}}


@pytest.mark.parametrize("where", all_queries())
def test_every_metric_and_label_of_a_query_exists(where: str) -> None:
    known = metrics()
    selected = list(selectors(all_queries()[where]))
    assert selected
    for name, labels in selected:
        assert name in known
        assert labels <= known[name] | TARGET_LABELS


def test_the_parser_sees_selectors_inside_everything_that_queries_use() -> None:
    query = "histogram_quantile(0.5, sum by (le) (rate(a{x='1'}[5m]))) / -b and (c > 0) unless max_over_time(d[1h:1m])"
    assert list(selectors(query)) == [("a", {"x"}), ("b", set()), ("c", set()), ("d", set())]


def test_the_dashboard_shows_what_an_operator_must_see() -> None:
    shown = {name for query in dashboard_queries().values() for name, _ in selectors(query)}
    ours = {
        "working_set_bytes",
        "tier_capacity_bytes",
        "decisions_pressure_total",
        "tier_occupancy_ratio",
        "evicted_chunks_total",
        "stored_tokens_total",
        "restored_tokens_total",
        "declined_chunks_total",
        "active_pool_tasks",
        "mean_prompt_tokens",
        "report_age_s",
    }
    vllm = {"num_requests_waiting", "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket"}
    assert {f"efficient_lmcache:{name}" for name in ours} | {f"vllm:{name}" for name in vllm} <= shown


def test_the_dashboard_shows_everything_that_the_exporter_says_of_a_pool() -> None:
    shown = {name for query in dashboard_queries().values() for name, _ in selectors(query)}
    said = {name for name in metrics() if is_clusters(name)}
    # Counts behind ratios and rates that are shown, and faults that the log explains.
    parts = {"tier_registered_chunks", "tier_capacity_chunks", "tier_capacity_bytes", "tier_evicted_chunks_window"}
    parts |= {"pressure", "bad_messages_total"}
    assert said - shown == {f"efficient_lmcache:cluster_{name}" for name in parts}


def test_panels_do_not_overlap_and_say_what_they_mean() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        covered = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not covered & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= covered
    assert len({panel["title"] for panel in panels()}) == len(panels())
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert DASHBOARD.read_text() == script("write_dashboard").text(), "run scripts/write_dashboard.py"


def test_the_alert_on_thrashing_names_both_ways_out_and_the_memory() -> None:
    rule = alerts()["EfficientLMCacheTierThrashing"]
    text = rule["annotations"]["description"]
    assert "Two ways out" in text
    assert "hostTier.gibPerRank" in text
    assert "efficient.admission conditioned" in text
    # The number that the text prints is the working set in GiB.
    assert '{{ printf "%.1f" $value }} GiB per rank' in text
    assert rule["expr"].startswith("efficient_lmcache:working_set_bytes / 2^30")


def test_alerts_say_where_and_how_urgent() -> None:
    for name, rule in alerts().items():
        assert name.startswith("EfficientLMCache")
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["for"]


def test_every_alert_names_the_section_of_the_runbook_that_is_about_it() -> None:
    sections: dict[str, str] = {}
    for section in re.split(r"^#+ ", (ROOT / "docs" / "operations.md").read_text(), flags=re.M)[1:]:
        heading, _, text = section.partition("\n")
        # As GitHub makes anchors.
        sections[re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")] = text
    for name, rule in alerts().items():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operations.md"
        assert f"`{name}`" in sections[anchor], name
    table = sections["alerts"]
    for name, rule in alerts().items():
        assert f"| `{name}` | {rule['labels']['severity']} |" in table
