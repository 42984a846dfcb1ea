"""Several engines share a tier: one of them probes it, and another one takes over when it is gone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from efficient_lmcache.core.tier import TierReport
from efficient_lmcache.telemetry import local
from efficient_lmcache.telemetry.shared_channels import HostChannel
from efficient_lmcache.telemetry.shared_probe import SharedProbe


@dataclass
class Tier:
    """Stands in for a server, which a unit test cannot start: says what it is told to, and counts who asks."""

    name: str = "tier"
    broken: bool = False
    evicted: int = 5
    asked_by: list[str] = field(default_factory=list)

    def seen_by(self, engine: str) -> SeenTier:
        return SeenTier(self, engine)


@dataclass
class SeenTier:
    tier: Tier
    engine: str
    resumed: list[TierReport | None] = field(default_factory=list)

    def identify(self) -> str:
        if self.tier.broken:
            raise OSError("broken on purpose")
        return self.tier.name

    def resume(self, report: TierReport | None) -> None:
        self.resumed.append(report)

    def probe(self) -> TierReport:
        if self.tier.broken:
            raise OSError("broken on purpose")
        self.tier.asked_by.append(self.engine)
        return TierReport("unnamed", 0, 256, 1024, 10, 20, self.tier.evicted, self.tier.evicted)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[SeenTier], SharedProbe]]:
    monkeypatch.setattr(local, "runtime_directory", lambda: tmp_path / "channels")
    started: list[SharedProbe] = []

    def start(tier: SeenTier) -> SharedProbe:
        started.append(SharedProbe(tier, HostChannel, interval_s=0.01, max_age_s=0.3))
        return started[-1]

    yield start
    for probe in started:
        probe.close()


def wait_until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.005)


def test_one_of_many_engines_probes_and_all_have_its_reports(engines):
    tier = Tier()
    probes = [engines(tier.seen_by(str(number))) for number in range(4)]
    wait_until(lambda: all(probe.report for probe in probes))
    wait_until(lambda: len(tier.asked_by) > 20)
    assert len(set(tier.asked_by)) == 1
    assert [probe.probing for probe in probes].count(True) == 1
    reports = [probe.report for probe in probes]
    assert {report.engine_id for report in reports} == {"tier"}
    assert all(report.age_s(time.monotonic()) < 20 for report in reports)


def test_another_engine_takes_over_and_continues_the_numbers_and_the_counts(engines):
    tier = Tier()
    first, second = tier.seen_by("first"), tier.seen_by("second")
    probe = engines(first)
    wait_until(lambda: probe.report and probe.report.sequence > 3)
    follower = engines(second)
    wait_until(lambda: follower.report)
    probe.close()
    sequence = probe.report.sequence
    wait_until(lambda: follower.probing)
    wait_until(lambda: follower.report.sequence > sequence)
    assert second.resumed[-1].evicted_chunks == 5


def test_a_tier_that_cannot_be_asked_is_asked_again_and_first_for_its_name(engines, caplog):
    tier = Tier(broken=True)
    probe = engines(tier.seen_by("only"))
    wait_until(lambda: "broken on purpose" in caplog.text)
    assert probe.report is None
    tier.broken = False
    wait_until(lambda: probe.report)
    tier.broken = True
    wait_until(lambda: not probe.probing)
    tier.name, tier.broken = "restarted", False
    wait_until(lambda: probe.report.engine_id == "restarted")
    assert caplog.text.count("broken on purpose") == 2


def test_an_engine_that_cannot_publish_still_knows_the_tier_itself(engines, tmp_path, caplog):
    probe = engines(Tier().seen_by("only"))
    wait_until(lambda: probe.probing)
    shutil.rmtree(tmp_path / "channels")
    wait_until(lambda: "Publishing the LMCache server's tier failed" in caplog.text)
    wait_until(lambda: "Publishing the LMCache server's tier works again" in caplog.text)
    assert probe.report.age_s(time.monotonic()) < 20


def test_closing_leaves_no_thread_and_frees_the_claim(engines):
    tier = Tier()
    probe = engines(tier.seen_by("only"))
    wait_until(lambda: probe.probing)
    probe.close()
    probe.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "efficient-lmcache-telemetry"]
    channel = HostChannel("tier")
    assert channel.claim()
    channel.close()
