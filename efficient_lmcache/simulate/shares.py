"""A total shared out in proportion to weights, within bounds: how a synthetic workload meets published sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from efficient_lmcache.core.references import Floats, Ints


def whole(values: Floats) -> Ints:
    """Rounded."""
    return np.rint(values).astype(np.int64)


def scaled(weights: Floats, total: int, least: Ints | int, most: Ints | int) -> Ints:
    """Whole numbers in proportion to weights, within their bounds; their sum is the total."""

    def at(scale: float) -> Ints:
        return whole((scale * weights).clip(least, most))

    highest = float(np.max(np.asarray(most) / weights))
    return at(rising_to(total, lambda scale: float(at(scale).sum()), 0.0, highest))


def filled(weights: Floats, segment: Ints, totals: Ints, least: Floats, most: Floats) -> Floats:
    """The same for the totals of many segments at once, not rounded; segment is int64 [weights]."""
    low: Floats = np.zeros(len(totals))
    high: Floats = 64 * totals / np.bincount(segment, weights, minlength=len(totals))
    for _ in range(40):
        middle = (low + high) / 2
        above = np.bincount(segment, (middle[segment] * weights).clip(least, most), minlength=len(totals)) > totals
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return (low[segment] * weights).clip(least, most)


def rising_to(target: float, rising: Callable[[float], float], low: float, high: float) -> float:
    """The least argument, to within rounding, at which a rising function reaches the target."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return high
