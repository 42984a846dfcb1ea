"""Figure 6: when the chunks that admission declined are referenced again, against what the tier holds."""

from __future__ import annotations

from dataclasses import dataclass

from efficient_lmcache.report.latency import Quantiles
from efficient_lmcache.report.runs import Run


@dataclass(frozen=True, slots=True)
class DeclinedReuse:
    """One run's declined chunks by D, the distinct other chunks referenced before the next reference.

    Attributes:
        capacity_chunks: K_H.
        declined: requests declined.
        chunks: their new full chunks, once per decline.
        beyond: with D >= K_H.
        never: not referenced again.
        within: with D < K_H.
        condition_share: (beyond + never) / chunks, the condition of Proposition 1; None without declined chunks.
        ratio: quantiles of D / K_H over the chunks referenced again; None without any.
    """

    capacity_chunks: int
    declined: int
    chunks: int
    beyond: int
    never: int
    within: int
    condition_share: float | None
    ratio: Quantiles | None


def declined_reuse(run: Run) -> DeclinedReuse:
    """Raises Unavailable without decisions, or without the trace (ImportError without numba)."""
    raise NotImplementedError
