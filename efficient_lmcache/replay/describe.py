"""What a trace contains, in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from efficient_lmcache.replay.trace import Call, TraceReader, common_prefix_tokens

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def describe(reader: TraceReader, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Manifest, totals, distributions and shared-prefix sums of a trace, JSON-able. Streams the whole trace.

    `shared_prefix` sums over all calls, in tokens and as a share of the prompt tokens (paper, Appendix B; a task's
    first call counts as unshared): the longest common prefix with the task's previous prompt, and the cache-stable
    prompt length, which is that with the previous prompt followed by its output.
    """
    prompts: list[int] = []
    outputs: list[int] = []
    intervals_s: list[float] = []
    previous_prompt_tokens = cache_stable_tokens = 0
    for number in range(len(reader.tasks)):
        previous: Call | None = None
        for call in reader.calls(number):
            prompts.append(len(call.prompt_tokens))
            outputs.append(len(call.output_tokens))
            if previous is not None:
                intervals_s.append(call.interval_s)
                shared, stable = shared_tokens(previous, call)
                previous_prompt_tokens += shared
                cache_stable_tokens += stable
            previous = call
        if progress is not None:
            progress(number + 1, len(reader.tasks))
    return {
        "sha256": reader.sha256,
        "file_bytes": reader.path.stat().st_size,
        "manifest": reader.manifest.to_json(),
        "tasks": reader.totals.tasks,
        "calls": reader.totals.calls,
        "prompt_tokens": reader.totals.prompt_tokens,
        "output_tokens": reader.totals.output_tokens,
        "distributions": {
            "calls_per_task": distribution([task.calls for task in reader.tasks]),
            "prompt_tokens_per_call": distribution(prompts),
            "output_tokens_per_call": distribution(outputs),
            "interval_s": distribution(intervals_s),
        },
        "shared_prefix": shared_prefix(previous_prompt_tokens, cache_stable_tokens, reader.totals.prompt_tokens),
    }


def shared_prefix(previous_prompt_tokens: int, cache_stable_tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """The two sums, and as shares of all prompt tokens."""
    total = max(1, prompt_tokens)
    return {
        "previous_prompt_tokens": previous_prompt_tokens,
        "previous_prompt_share": previous_prompt_tokens / total,
        "cache_stable_tokens": cache_stable_tokens,
        "cache_stable_share": cache_stable_tokens / total,
    }


def shared_tokens(previous: Call, call: Call) -> tuple[int, int]:
    """Tokens that `call`'s prompt shares with the previous prompt, and with that followed by its output."""
    shared = common_prefix_tokens(previous.prompt_tokens, call.prompt_tokens)
    if shared < len(previous.prompt_tokens):
        return shared, shared
    return shared, shared + common_prefix_tokens(previous.output_tokens, call.prompt_tokens[shared:])


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, range and quantiles (p50, p90, p99); empty for no values."""
    if not values:
        return {}
    quantiles = {name: float(np.quantile(values, share)) for name, share in _QUANTILES.items()}
    return {"mean": float(np.mean(values)), "min": float(min(values)), **quantiles, "max": float(max(values))}
