from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.local import LocalSink, LocalSource
from efficient_lmcache.telemetry.poller import NewestOf, ReportPoller
from efficient_lmcache.telemetry.reader import ReportReader
from efficient_lmcache.telemetry.report import encode

REPORT = TierReport("engine", 0, 256, 262_144, 90, 100, 3, 40)


class CountingSource(LocalSource):
    reads = 0
    closed = False

    def latest(self) -> bytes | None:
        self.reads += 1
        return super().latest()

    def close(self) -> None:
        self.closed = True
        super().close()


def wait_until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_the_newest_report_is_at_hand_with_the_receivers_clock(tmp_path: Path) -> None:
    start_s = time.monotonic()
    poller = ReportPoller(ReportReader(LocalSource("engine", tmp_path / "channels"), "engine"), interval_s=0.01)
    try:
        assert poller.report is None
        sink = LocalSink("engine", tmp_path / "channels")
        sink.publish(encode(REPORT))
        wait_until(lambda: poller.report)
        assert poller.report is not None
        assert start_s <= poller.report.received_s <= time.monotonic()
        sink.close()
    finally:
        poller.close()


def test_the_source_is_read_at_most_once_per_interval_and_closed_at_the_end(tmp_path: Path) -> None:
    source = CountingSource("engine", tmp_path)
    start_s = time.monotonic()
    poller = ReportPoller(ReportReader(source, "engine"), interval_s=0.05)
    wait_until(lambda: source.reads >= 3)
    poller.close()
    assert source.reads <= 1 + (time.monotonic() - start_s) / 0.05
    assert source.closed


def test_closing_does_not_wait_for_the_interval_and_may_be_repeated(tmp_path: Path) -> None:
    poller = ReportPoller(ReportReader(LocalSource("engine", tmp_path), "engine"), interval_s=3600)
    poller.close()
    poller.close()
    assert not poller._thread.is_alive()


def test_of_two_channels_the_newest_report_counts_as_first_received(tmp_path: Path) -> None:
    sinks = [LocalSink("engine", tmp_path / name) for name in ("a", "b")]
    newest = NewestOf([ReportReader(LocalSource("engine", tmp_path / name), "engine") for name in ("a", "b")], 5.0)
    assert newest.latest(1.0) is None
    received: list[tuple[int, float]] = []
    for now_s, (sink, sequence) in enumerate([(0, 4), (1, 4), (1, 5), (0, 5), (0, 3), (1, 6)]):
        sinks[sink].publish(encode(replace(REPORT, sequence=sequence)))
        report = newest.latest(float(now_s))
        assert report is not None
        received.append((report.sequence, report.received_s))
    assert received == [(4, 0.0), (4, 0.0), (5, 2.0), (5, 2.0), (5, 2.0), (6, 5.0)]
    sinks[0].publish(encode(replace(REPORT, sequence=2**63 - 1)))  # a forgery
    newest.latest(6.0)
    sinks[1].publish(encode(replace(REPORT, sequence=7)))
    assert [getattr(newest.latest(now_s), "sequence", None) for now_s in (11.0, 11.5)] == [2**63 - 1, 7]
    newest.close()


def test_an_interval_that_is_not_positive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="interval_s is 0"):
        ReportPoller(ReportReader(LocalSource("engine", tmp_path), "engine"), interval_s=0)
