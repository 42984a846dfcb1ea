"""How long calls wait, and for what: the server's own sums, and the driver's rows."""

from __future__ import annotations

from dataclasses import dataclass

from efficient_lmcache.report.runs import Run


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
    raise NotImplementedError


def call_times(run: Run) -> Quantiles:
    """From dispatch to response of the answered calls, in seconds, as the client sees it. Raises Unavailable."""
    raise NotImplementedError
