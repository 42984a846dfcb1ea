"""Import of SWE-agent's trajectories: an attempt is a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from efficient_lmcache.replay.importers.records import RecordError
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


def tasks(source: Path, skip: Callable[[RecordError], None] | None = None) -> Iterator[TextTask]:
    """Every attempt of every file.

    RecordError names file and field of what is malformed; with `skip`, a malformed file is left out instead, and `skip`
    called with its error.
    """
    for file in trajectory_files(source):
        try:
            attempts = list(read_attempts(file))
        except RecordError as error:
            if skip is None:
                raise
            skip(error)
        else:
            yield from attempts
