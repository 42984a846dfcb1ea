"""What loading our modules must not load."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "efficient_lmcache.cli",
        "efficient_lmcache.core.admission, efficient_lmcache.core.tasks, efficient_lmcache.core.footprint",
        "efficient_lmcache.telemetry.poller, efficient_lmcache.telemetry.local, efficient_lmcache.telemetry.publisher",
        "efficient_lmcache.connector.options, efficient_lmcache.connector.telemetry",
        "efficient_lmcache.replay.driver, efficient_lmcache.replay.run, efficient_lmcache.replay.trace",
        "efficient_lmcache.report.analyses",
    ],
)
def test_what_vllm_and_the_command_line_load_is_light(modules):
    # numba's llvmlite objects in the process break the start of vLLM's CPU worker; the others slow `--help` down.
    heavy = {"numba", "llvmlite", "matplotlib", "plotly", "torch", "vllm", "lmcache", "redis"}
    code = f"import sys, {modules}; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
