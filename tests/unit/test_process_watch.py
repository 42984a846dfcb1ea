"""What the soak calls growth, and what it does not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="no psutil (it comes with vLLM)")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from process_watch import Sample, come_and_gone, sample, trends

MIB = 1 << 20


def moments(rss_mib: list[float], descriptors: list[int] | None = None) -> list[list[Sample]]:
    counts = descriptors or [40] * len(rss_mib)
    return [
        [Sample("engine", int(mib * MIB), int(mib * MIB / 2), count, 12)]
        for mib, count in zip(rss_mib, counts, strict=True)
    ]


def faults(*args: list[float] | list[int]) -> list[str]:
    (trend,) = trends(moments(*args))  # type: ignore[arg-type]
    return trend.faults(0.02)


def test_a_slow_leak_is_found_and_noise_is_not():
    assert faults([1000 + 3 * minute for minute in range(20)]) == ["memory grew by 4.8% (48.0 MiB)"]
    assert faults([1000 + 5 * (minute % 2) for minute in range(20)]) == []
    assert faults([1000 - 3 * minute for minute in range(20)]) == []


def test_a_small_process_may_round_up_its_memory():
    assert faults([10.0] * 10 + [10.9] * 10) == []
    assert faults([10.0] * 10 + [11.1] * 10) != []


def test_descriptors_may_come_and_go_but_not_stay():
    flat = [100.0] * 20
    assert faults(flat, [40, 44] + [40] * 18) == []
    assert faults(flat, [40] * 10 + [41] * 10) == ["1 more descriptors"]


def test_who_was_not_there_all_the_time_is_named():
    seen = moments([1.0] * 3)
    seen[1] = []
    assert come_and_gone(seen) == ["engine"]
    assert trends(seen) == []
    assert come_and_gone([]) == []


def test_a_real_process_is_sampled():
    (own, *_) = sample({"tests": os.getpid(), "gone": 2**22 + 1})
    assert own.process.startswith("tests")
    assert own.rss_bytes >= own.pss_bytes > MIB
    assert own.descriptors > 0 < own.threads
