"""The generated pages agree with the code they are generated from."""

from __future__ import annotations

import pytest
from helm_chart import script

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")


def test_the_configuration_reference_is_up_to_date():
    writer = script("write_reference")
    assert writer.PAGE.read_text() == writer.configuration(), "run scripts/write_reference.py"


def test_the_metrics_reference_is_up_to_date():
    writer = script("write_metrics_reference")
    assert writer.PAGE.read_text() == writer.page(), "run scripts/write_metrics_reference.py"


def test_every_metric_names_its_unit_and_says_what_it_means():
    writer = script("write_metrics_reference")
    rows = [*writer.engine_rows(), *writer.cluster_rows()]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.unit != "–", row.name
        assert row.meaning.endswith("."), row.name
        assert row.kind in {"counter", "gauge"}, row.name
