from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry.local import LocalSink, LocalSource
from efficient_lmcache.telemetry.publisher import ReportPublisher
from efficient_lmcache.telemetry.report import decode

REPORT = TierReport("engine", 0, 256, 262_144, 90, 100, 3, 40)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "channels"


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_s, "waited 10 s in vain"
        time.sleep(0.005)


def published(directory: Path) -> TierReport | None:
    payload = LocalSource("engine", directory).latest()
    return decode(payload) if payload is not None else None


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_reports_appear_with_rising_sequences_and_are_gone_after_close(directory: Path) -> None:
    publisher = ReportPublisher(lambda: replace(REPORT, sequence=77), LocalSink("engine", directory), interval_s=0.01)
    wait_until(lambda: (report := published(directory)) is not None and report.sequence >= 3)
    first, second = published(directory), None
    wait_until(lambda: published(directory) != first)
    second = published(directory)
    assert first is not None
    assert second is not None
    assert second.sequence > first.sequence
    assert replace(second, sequence=0) == REPORT
    publisher.close()
    publisher.close()
    assert published(directory) is None


def test_close_does_not_wait_for_the_interval(directory: Path) -> None:
    publisher = ReportPublisher(lambda: REPORT, LocalSink("engine", directory), interval_s=3600.0)
    wait_until(lambda: published(directory) is not None)
    publisher.close()
    assert published(directory) is None
    assert "efficient-lmcache-telemetry" not in [thread.name for thread in threading.enumerate()]


def test_a_failing_probe_is_logged_once_per_kind_and_once_when_it_works_again(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [KeyError("tier"), KeyError("tier"), RuntimeError("no tier"), KeyError("tier")]

    def probe() -> TierReport:
        if errors:
            raise errors.pop(0)
        return REPORT

    publisher = ReportPublisher(probe, LocalSink("engine", directory), interval_s=0.005)
    wait_until(lambda: (report := published(directory)) is not None and report.sequence >= 6)
    publisher.close()
    failure, other_failure, recovery = messages(caplog)
    assert "Probing the cache tier failed: KeyError: 'tier'" in failure
    assert "RuntimeError: no tier" in other_failure
    assert "works again, after 4 failures" in recovery


def test_a_probe_that_returns_no_report_is_a_failure_like_any_other(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = ReportPublisher(lambda: None, LocalSink("engine", directory), interval_s=0.005)  # type: ignore[arg-type,return-value]
    wait_until(lambda: bool(caplog.records))
    publisher.close()
    assert len(caplog.records) == 1


def test_a_sink_that_refuses_is_logged_once_and_published_to_when_it_lets(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probes = []
    directory.mkdir()
    directory.chmod(0o755)  # not private: the sink refuses it
    publisher = ReportPublisher(lambda: probes.append(1) or REPORT, LocalSink("engine", directory), interval_s=0.005)  # type: ignore[func-returns-value]
    wait_until(lambda: len(probes) >= 5)
    assert len(caplog.records) == 1
    directory.chmod(0o700)
    wait_until(lambda: published(directory) is not None)
    publisher.close()
    failure, recovery = messages(caplog)
    assert "PermissionError" in failure
    assert "0755" in failure
    assert "works again" in recovery


def test_publishing_outlives_the_removal_of_the_directory(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    removed = threading.Event()

    def probe() -> TierReport:  # removes the directory itself, so that the publisher is not writing meanwhile
        if published(directory) and not removed.is_set():
            shutil.rmtree(directory)
            removed.set()
        return REPORT

    publisher = ReportPublisher(probe, LocalSink("engine", directory), interval_s=0.005)
    wait_until(lambda: removed.is_set() and published(directory) is not None)
    publisher.close()
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(caplog.records) == 2


def test_a_hanging_probe_does_not_hang_close(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efficient_lmcache.telemetry.publisher._CLOSE_TIMEOUT_S", 0.05)
    let_go = threading.Event()
    publisher = ReportPublisher(lambda: let_go.wait() and REPORT, LocalSink("engine", directory))  # type: ignore[arg-type,return-value]
    publisher.close()
    assert "did not stop" in messages(caplog)[0]
    let_go.set()
    wait_until(lambda: "efficient-lmcache-telemetry" not in [thread.name for thread in threading.enumerate()])
    assert published(directory) is None


def test_an_interval_must_be_positive(directory: Path) -> None:
    with pytest.raises(ValueError, match="interval_s is 0"):
        ReportPublisher(lambda: REPORT, LocalSink("engine", directory), interval_s=0)
