"""Runs a scenario with its own vLLM engine in a fresh process, because one process can start only one LMCache engine.

A scenario is a function of a module beside this file. It gets keyword arguments and returns a result, both JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

_RESULT = "SCENARIO-RESULT "


def run(scenario: str, environment: dict[str, str] | None = None, timeout_s: float = 540, **arguments: Any) -> Any:
    """Run `module:function` in a fresh process and return its result; what it printed explains a failure."""
    process = subprocess.run(
        [sys.executable, __file__, scenario, json.dumps(arguments)],
        # LMCache's keys agree across processes only if their hashes are seeded alike.
        env={**os.environ, "PYTHONHASHSEED": "0", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout_s,
    )
    for line in process.stdout.splitlines():
        if line.startswith(_RESULT):
            return json.loads(line[len(_RESULT) :])
    raise AssertionError(f"{scenario} ended with {process.returncode}:\n{process.stdout[-6000:]}")


def _main() -> None:
    module, function = sys.argv[1].split(":")
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        result = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    print(f"\n{_RESULT}{json.dumps(result)}", flush=True)
    # LMCache's threads would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    _main()
