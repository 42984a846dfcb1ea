"""The connector on a GPU: LMCache's own transfers, nothing else differs from `tests/integration/test_connector.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (the gpu extra)")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import fresh_process  # noqa: E402

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 256


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("gpu") / "model"
    command = [sys.executable, "-m", "efficient_lmcache.cli", "model", "create", str(directory), "--vocab", "4096"]
    subprocess.run(command, check=True)
    return str(directory)


def test_every_full_chunk_is_stored_and_restored_with_the_same_greedy_tokens(small_model):
    result = fresh_process.run("connector_scenarios:restore_and_extend", model=small_model)
    assert result["restored"] == result["computed"]
    assert result["stored_tokens"] == result["restored_tokens"] == 20 * 5 * CHUNK_TOKENS
    assert result["active_pool"] == 20
    assert set(result["state"].values()) == {0}


def test_deduplication_stores_only_the_absent_runs(small_model):
    result = fresh_process.run("connector_scenarios:deduplicate", model=small_model)
    assert (result["deduplicated_chunks"], result["stored_tokens"]) == (4, 2 * CHUNK_TOKENS)
    assert result["restored_tokens"] == 6 * CHUNK_TOKENS
    assert result["outputs"][0] == result["outputs"][1] == result["outputs"][2]


def test_admission_none_is_unmodified_lmcache(small_model):
    ours, theirs = (
        fresh_process.run("connector_scenarios:sequence_of_stores_and_hits", model=small_model, connector=connector)
        for connector in ("EfficientLMCacheConnector", "LMCacheConnectorV1")
    )
    assert ours == theirs
