"""What an import wrote, in numbers that do not depend on how a trace is compressed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from efficient_lmcache.replay.describe import describe
from efficient_lmcache.replay.trace import Call, Tokens, TraceReader, common_prefix_tokens


def calls_of(trace: Path) -> dict[str, list[Call]]:
    """Every task's calls; the whole trace is verified as well."""
    with TraceReader(trace) as reader:
        reader.verify()
        return {each.task_id: list(reader.calls(number)) for number, each in enumerate(reader.tasks)}


def summary(trace: Path) -> dict[str, Any]:
    """Totals, shares and manifest as `trace info --json` has them, every call's lengths and times, all tokens' hash.

    A call is [prompt tokens, of which kept from the previous prompt and output, output tokens, interval_s, start_s].
    """
    with TraceReader(trace) as reader:
        facts = describe(reader)
    digest = hashlib.sha256()
    tasks: dict[str, list[list[float | None]]] = {}
    for task_id, calls in calls_of(trace).items():
        known: Tokens = np.empty(0, np.uint32)
        tasks[task_id] = rows = []
        for call in calls:
            keep = common_prefix_tokens(known, call.prompt_tokens)
            rows.append([len(call.prompt_tokens), keep, len(call.output_tokens), call.interval_s, call.start_s])
            known = np.concatenate((call.prompt_tokens, call.output_tokens))
            digest.update(known.astype("<u4").tobytes())
    names = ("tasks", "calls", "prompt_tokens", "output_tokens", "shared_prefix", "manifest")
    return {"info": {name: facts[name] for name in names}, "tasks": tasks, "tokens_sha256": digest.hexdigest()}
