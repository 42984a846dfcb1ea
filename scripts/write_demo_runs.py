"""Keep what the demonstration measured, for the test that pins the simulator's residuals.

    python scripts/write_demo_runs.py runs/demo      # writes tests/unit/golden/demo-runs.json

The trace is not kept: the test synthesizes it again, and its hash must be the runs'.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_OUT = Path(__file__).parent.parent / "tests/unit/golden/demo-runs.json"
_PATHS = ("trace", "model", "out")


def main() -> None:
    runs = {run.parent.name: _kept(run.parent) for run in sorted(Path(sys.argv[1]).glob("*/run.json"))}
    _OUT.write_text(json.dumps(runs, separators=(",", ":")) + "\n")
    print(f"{_OUT}: {len(runs)} runs, {_OUT.stat().st_size // 1024} KiB")


def _kept(run: Path) -> dict[str, Any]:
    record = json.loads((run / "run.json").read_text())
    record |= {"command": [], "server_command": []}
    record["options"] = {name: value for name, value in record["options"].items() if name not in _PATHS}
    calls = _rows(run / "calls.jsonl")
    decisions = _rows(run / "decisions.jsonl")
    return {
        "record": record,
        "calls": [
            [row["task"], row["call"], round(row["dispatched_s"], 4), round(row["finished_s"], 4), row["cached_tokens"]]
            for row in calls
        ],
        "decisions": [[row["task"], row["host_match_tokens"], round(row["now_s"], 4)] for row in decisions],
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
