from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.local import LocalSink, LocalSource
from efficient_lmcache.telemetry.reader import ReportReader
from efficient_lmcache.telemetry.report import encode

REPORT = TierReport("engine", 0, 256, 262_144, 90, 100, 3, 40)


class CountingSource(LocalSource):
    reads = 0

    def latest(self) -> bytes | None:
        self.reads += 1
        return super().latest()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "channels"


@pytest.fixture
def sink(directory: Path) -> Iterator[LocalSink]:
    sink = LocalSink("engine", directory)
    yield sink
    sink.close()


@pytest.fixture
def source(directory: Path) -> CountingSource:
    return CountingSource("engine", directory)


@pytest.fixture
def reader(source: CountingSource) -> ReportReader:
    return ReportReader(source, "engine")


def test_before_the_first_publication_there_is_no_report(reader: ReportReader) -> None:
    assert reader.latest(0.0) is None


def test_age_counts_from_first_receipt_however_often_the_report_is_read(sink: LocalSink, reader: ReportReader) -> None:
    sink.publish(encode(replace(REPORT, sequence=4)))
    for now_s in (100.0, 101.0, 104.0, 109.0):
        report = reader.latest(now_s)
        assert report is not None
        assert (report.received_s, report.age_s(now_s)) == (100.0, now_s - 100.0)
    sink.publish(encode(replace(REPORT, sequence=5)))
    report = reader.latest(110.0)
    assert report is not None
    assert (report.sequence, report.age_s(110.0)) == (5, 0.0)


def test_the_same_sequence_with_other_content_does_not_become_fresh(sink: LocalSink, reader: ReportReader) -> None:
    sink.publish(encode(replace(REPORT, sequence=4)))
    first = reader.latest(100.0)
    sink.publish(encode(replace(REPORT, sequence=4, evicted_chunks=1)))
    assert reader.latest(104.0) == first


@pytest.mark.parametrize("sender_s", [0.0, 1e18])
def test_no_clock_of_the_sender_makes_a_report_younger_or_older(
    sender_s: float, sink: LocalSink, reader: ReportReader
) -> None:
    fields = msgpack.unpackb(encode(replace(REPORT, received_s=sender_s)))
    sink.publish(msgpack.packb({**fields, "received_s": sender_s, "sent_s": sender_s}))
    report = reader.latest(50.0)
    assert report is not None
    assert report.age_s(52.0) == 2.0


def test_a_sequence_that_goes_backwards_is_ignored(sink: LocalSink, reader: ReportReader) -> None:
    sink.publish(encode(replace(REPORT, sequence=9)))
    newest = reader.latest(1.0)
    sink.publish(encode(replace(REPORT, sequence=8)))
    assert reader.latest(2.0) is newest
    assert reader.bad_reports == 0


def test_a_report_of_another_engine_is_ignored(sink: LocalSink, reader: ReportReader) -> None:
    sink.publish(encode(replace(REPORT, engine_id="stranger", sequence=99)))
    assert reader.latest(1.0) is None
    sink.publish(encode(replace(REPORT, sequence=1)))
    report = reader.latest(2.0)
    assert report is not None
    assert report.engine_id == "engine"


def test_bad_payloads_are_counted_logged_once_and_leave_the_last_report(
    sink: LocalSink, reader: ReportReader, caplog: pytest.LogCaptureFixture
) -> None:
    sink.publish(encode(replace(REPORT, sequence=1)))
    last = reader.latest(1.0)
    for second, payload in enumerate([b"", b"garbage", b"garbage", b"x" * 5000], start=2):
        sink.publish(payload)
        assert reader.latest(second) is last
    assert reader.bad_reports == 3  # the same payload read twice is one
    assert len(caplog.records) == 1
    sink.publish(encode(replace(REPORT, sequence=2)))
    report = reader.latest(10.0)
    assert report is not None
    assert report.sequence == 2
    assert "works again" in caplog.records[-1].getMessage()


def test_a_source_that_fails_is_logged_once_and_leaves_the_last_report(
    directory: Path, sink: LocalSink, reader: ReportReader, caplog: pytest.LogCaptureFixture
) -> None:
    sink.publish(encode(replace(REPORT, sequence=1)))
    last = reader.latest(1.0)
    directory.chmod(0o755)  # not private any more: the source refuses it
    assert [reader.latest(2.0), reader.latest(3.0), reader.latest(4.0)] == [last] * 3
    assert len(caplog.records) == 1
    directory.chmod(0o700)
    sink.publish(encode(replace(REPORT, sequence=2)))
    report = reader.latest(5.0)
    assert report is not None
    assert report.sequence == 2
    assert len(caplog.records) == 2


def test_after_the_publisher_is_gone_the_last_report_only_grows_old(sink: LocalSink, reader: ReportReader) -> None:
    sink.publish(encode(REPORT))
    reader.latest(1.0)
    sink.close()
    report = reader.latest(100.0)
    assert report is not None
    assert report.age_s(100.0) == 99.0
