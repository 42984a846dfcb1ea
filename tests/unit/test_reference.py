"""The generated pages agree with the code they are generated from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (the cpu or gpu extra)")

ROOT = Path(__file__).parents[2]


def test_reference_pages_are_up_to_date():
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "scripts" / "write_reference.py")
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert (ROOT / "docs" / "configuration.md").read_text() == writer.configuration()
    assert (ROOT / "docs" / "metrics.md").read_text() == writer.metrics()
