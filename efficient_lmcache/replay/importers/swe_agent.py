"""Import of SWE-agent's trajectories: an attempt is a task."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from efficient_lmcache.replay.importers.records import Skip, kept, stop
from efficient_lmcache.replay.importers.rendering import RENDERED
from efficient_lmcache.replay.importers.swe_agent_files import read_attempts, trajectory_files
from efficient_lmcache.replay.importers.tasks import TextTask

ASSUMPTIONS = (
    RENDERED,
    "hidden reasoning, tool schemas and a reviewer's calls are not recorded, nor are calls that failed: all are absent",
    "a call's prompt is its step's `query`; where no step has one (before SWE-agent 1.1) it is all of the main agent's "
    "messages before the response: what history processors cut from prompts, and rejected responses, are not told",
    "interval_s is the execution_time of the steps since the response before; the time that the model took is not "
    "recorded, nor are dispatches",
    "of several attempts at an instance each is a task",
)


def tasks(source: Path, skip: Skip = stop) -> Iterator[TextTask]:
    """Every attempt of every file; RecordError names file and field of what is malformed, and spoils the whole file."""
    for attempts in kept((partial(_attempts, file) for file in trajectory_files(source)), skip):
        yield from attempts


def _attempts(file: Path) -> list[TextTask]:
    return list(read_attempts(file))
