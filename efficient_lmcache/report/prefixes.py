"""What the calls of a trace share with the one before, read once per trace."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from efficient_lmcache.replay.describe import shared_tokens
from efficient_lmcache.replay.trace import Call, TraceReader


class CallPrefix(NamedTuple):
    """One call, in tokens.

    Attributes:
        prompt, output: n and m.
        previous_prompt: common prefix with the task's previous prompt; 0 for its first call.
        cache_stable: the same with the previous prompt followed by its output (paper, Section 2).
    """

    prompt: int
    output: int
    previous_prompt: int
    cache_stable: int


@lru_cache(maxsize=4)
def call_prefixes(trace: Path) -> dict[str, tuple[CallPrefix, ...]]:
    """Every task's calls. Raises TraceError for a damaged trace."""
    with TraceReader(trace) as reader:
        return {info.task_id: tuple(_prefixes(reader, number)) for number, info in enumerate(reader.tasks)}


def _prefixes(reader: TraceReader, task_index: int) -> list[CallPrefix]:
    found = []
    previous: Call | None = None
    for call in reader.calls(task_index):
        shared = (0, 0) if previous is None else shared_tokens(previous, call)
        found.append(CallPrefix(len(call.prompt_tokens), len(call.output_tokens), *shared))
        previous = call
    return found
