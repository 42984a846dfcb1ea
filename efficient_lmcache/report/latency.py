"""How long calls wait, and for what: the server's own sums, and the driver's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from efficient_lmcache.report.runs import Run, Unavailable

_SUMS = {
    "queue_s": "vllm:request_queue_time_seconds",
    "first_token_s": "vllm:time_to_first_token_seconds",
    "prefill_s": "vllm:request_prefill_time_seconds",
    "decode_s": "vllm:request_decode_time_seconds",
    "request_s": "vllm:e2e_request_latency_seconds",
}


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Means over a run's requests, in seconds: the increase of a vLLM sum over that of its count.

    Attributes:
        requests: that finished.
        queue_s: from arrival to the first scheduling (the paper's mean queue delay).
        first_token_s: from arrival to the first token.
        prefill_s, decode_s: from the first scheduling to the first token, from there to the last.
        request_s: from arrival to the end.
    """

    requests: int
    queue_s: float
    first_token_s: float
    prefill_s: float
    decode_s: float
    request_s: float


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of `count` values."""

    count: int
    mean: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p99: float


def server_times(run: Run) -> ServerTimes:
    """Raises Unavailable without the metrics."""
    return ServerTimes(
        requests=round(metric_increase(run, f"{_SUMS['request_s']}_count")),
        **{name: _mean(run, metric) for name, metric in _SUMS.items()},
    )


def call_times(run: Run) -> Quantiles:
    """From dispatch to response of the answered calls, in seconds, as the client sees it. Raises Unavailable."""
    times_s = [row["finished_s"] - row["dispatched_s"] for row in run.calls if row["status"] == "answered"]
    if not times_s:
        raise Unavailable("no call was answered")
    return quantiles(times_s)


def quantiles(values: Sequence[float] | npt.NDArray[Any]) -> Quantiles:
    """Of at least one value."""
    points = np.quantile(values, (0.1, 0.25, 0.5, 0.75, 0.9, 0.99))
    return Quantiles(len(values), float(np.mean(values)), *map(float, points))


def _mean(run: Run, metric: str) -> float:
    count = metric_increase(run, f"{metric}_count")
    if not count:
        raise Unavailable(f"{metric} counted no request")
    return metric_increase(run, f"{metric}_sum") / count


def metric_increase(run: Run, name: str) -> float:
    """How much a sum grew during the run. Not `replay.metrics.increase`, which is for counts: these are seconds."""
    before, after = run.metrics
    grown = after.named(name)
    if not grown:
        raise Unavailable(f"the server's /metrics lacks {name}")
    return sum(sample.value for sample in grown) - sum(sample.value for sample in before.named(name))
