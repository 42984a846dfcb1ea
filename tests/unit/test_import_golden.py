"""Every importer on a small recording in its format's shape, held against what it must make of it.

`golden/NAME/` has the recording, `golden/NAME.json` the `summary` of its import. Lengths and times in there have been
worked out by hand; hashes of tokens are what was written when those were right.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from imported_traces import summary
from typer.testing import CliRunner

from efficient_lmcache.replay.cli_trace import app

GOLDEN = Path(__file__).parent / "golden"
TEXT = ("mini-swe-agent", "swe-agent", "swe-agent-0.7", "openhands-completions", "openhands-history")
BLOCKS = ("weka", "mooncake", "mooncake-sessions", "qwen-bailian")
FILES = {
    "mini-swe-agent": "runs.jsonl",
    "swe-agent": "repo__bug-1.traj",
    "openhands-history": "output.jsonl",
    "weka": "sessions.jsonl",
    "mooncake": "requests.jsonl",
    "mooncake-sessions": "sessions.jsonl",
    "qwen-bailian": "qwen_traceA_blksz_16.jsonl",
}


@pytest.mark.parametrize("name", [*TEXT, *BLOCKS])
def test_an_import_is_what_it_was(name: str, tmp_path: Path) -> None:
    arguments = ["import", str(GOLDEN / name / FILES.get(name, "")), "--out", str(tmp_path / "t")]
    if name in TEXT:
        pytest.importorskip("mistral_common", reason="needs mistral_common, which the extras cpu and gpu bring")
        arguments += ["--tokenizer", "tekken"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    assert json.loads(json.dumps(summary(tmp_path / "t"))) == expected
