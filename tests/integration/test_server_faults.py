"""With an LMCache server: tenants stay apart, and its death under load costs computation and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import fresh_process
import pytest
from fault_scenarios import ENOUGH
from lmcache_server_process import CHUNK_TOKENS
from server_fault_scenarios import SALTS

pytestmark = pytest.mark.integration
pytest.importorskip("lmcache", reason="LMCache is not installed (the cpu or gpu extra)")


@pytest.fixture(scope="module")
def result(small_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("server-faults")
    return fresh_process.run(
        "server_fault_scenarios:tenants_and_a_lost_server", timeout_s=1200, model=small_model, directory=str(directory)
    )


def test_tenants_of_a_server_stay_apart_whatever_their_salts_look_like(result):
    first, again = result["tenants"][:3], result["tenants"][3:]
    assert [seen["cached_tokens"] for seen in first] == [seen["restored_tokens"] for seen in first] == [0] * 3
    assert [seen["new_objects"] for seen in first] == [4] * 3
    assert [seen["restored_tokens"] for seen in again] == [4 * CHUNK_TOKENS] * 3
    assert len({tuple(seen["tokens"]) for seen in result["tenants"]}) == 1
    assert not [salt for salt in SALTS if salt in result["status"]]


@pytest.mark.parametrize("stage", ["healthy", "server killed", "server restarted", "server back"])
def test_under_load_no_request_fails_and_no_token_is_wrong(result, stage):
    assert result["served"][stage] > 0
    assert stage == "server restarted" or result["served"][stage] >= ENOUGH
    assert result["wrong"].get(stage, 0) == 0


def test_a_server_that_is_back_is_used_again_and_nothing_is_left_behind(result):
    assert result["restored"]["server back"] > result["restored"]["server killed"] + 6 * CHUNK_TOKENS
    assert set(result["state"].values()) == {0}


def test_upstream_takes_a_requests_salt_from_its_tracker():
    """LMCache 0.5.6; says nothing of our code. `ServerConnector` sets the tracker's salt."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker

    assert "self.cache_salt: str" in inspect.getsource(LMCacheMPRequestTracker.__init__)
    source = inspect.getsource(LMCacheMPConnector)
    assert source.count("LMCacheMPRequestTracker(request)") == 1
    assert "LMCacheMPRequestTracker(request)" in inspect.getsource(LMCacheMPConnector._get_or_create_request_tracker)
    assert "request.cache_salt" not in source
