"""How long a sweep takes and how much disk it fills: said before the first run, corrected after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from efficient_lmcache.sweep.expand import PlannedRun
from efficient_lmcache.sweep.state import SweepRun, SweepState

_START_S = 60.0  # of a server with a small model on a CPU; a large one on GPUs takes minutes
_BYTES_PER_CALL = 1_600  # a row in calls.jsonl and one in decisions.jsonl
_BYTES_PER_RUN = 2 << 20  # two scrapes of /metrics and the server's log


@dataclass(slots=True)
class Estimate:
    """Of what is left.

    Attributes:
        expected_s: of each run by name, server start included; empty where nothing predicted it.
        measured_s, measured_expected_s: of the runs so far; their ratio corrects what is left.
    """

    disk_bytes: int
    expected_s: dict[str, float]
    measured_s: float = 0.0
    measured_expected_s: float = 0.0

    @classmethod
    def of(cls, runs: Sequence[PlannedRun], calls: int, state: SweepState | None = None) -> Estimate:
        disk_bytes = len(runs) * (calls * _BYTES_PER_CALL + _BYTES_PER_RUN)
        return cls(disk_bytes, {} if state is None else _expected_s(state))

    def learn(self, run: SweepRun, state: SweepState) -> None:
        """A run has ended: what it took corrects what the others will."""
        if run.status != "complete" or run.name not in self.expected_s or not (run.started_at and run.finished_at):
            return
        took = datetime.fromisoformat(run.finished_at) - datetime.fromisoformat(run.started_at)
        self.measured_s += took.total_seconds()
        self.measured_expected_s += self.expected_s[run.name]

    def left_s(self, state: SweepState) -> float | None:
        """Seconds until the last run has ended; None where they are not known."""
        expected = [self.expected_s.get(run.name) for run in state.unfinished if run.status != "failed"]
        if None in expected:
            return None
        correction = self.measured_s / self.measured_expected_s if self.measured_expected_s else 1.0
        return correction * sum(seconds for seconds in expected if seconds is not None)

    def text(self, state: SweepState) -> str:
        """Time left and disk of the whole sweep, for a person."""
        left_s, mib = self.left_s(state), self.disk_bytes / (1 << 20)
        time = "unknown time" if left_s is None else f"about {duration(left_s)}"
        return f"{time}, about {mib:.0f} MiB of disk" if mib < 1000 else f"{time}, about {mib / 1024:.1f} GiB of disk"


def duration(seconds: float) -> str:
    """For a person: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _expected_s(state: SweepState) -> dict[str, float]:
    expected = {}
    for run in state.runs:
        prediction = None if run.prediction is None else state.predictions[run.prediction]
        if prediction is not None:
            expected[run.name] = prediction["makespan_s"]["expected"] + _START_S
    return expected
