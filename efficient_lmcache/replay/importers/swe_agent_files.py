"""SWE-agent's ``.traj`` files: the calls that an attempt made, read and checked.

    {"trajectory": [{"response", "execution_time"?, "query"?: [message, ...]}, ...],
     "history": [{"role", "content", "tool_calls"?, "agent"?, "is_demo"?}, ...],
     "attempts"?: [{"trajectory", "history"}, ...]}

From version 1.1 on a step's `query` is the exact prompt, also of responses that were rejected. Older files (0.x, 1.0)
tell prompts by their history only. A step whose query is ``[{}]`` reports an error without having asked the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from efficient_lmcache.replay.importers import records
from efficient_lmcache.replay.importers.messages import role_and_text
from efficient_lmcache.replay.importers.records import RecordError, RecordingError
from efficient_lmcache.replay.importers.tasks import TextCall, TextTask

SUFFIX = ".traj"
_ASSISTANT = "assistant"

_Placed = tuple[dict[str, Any], str]


def trajectory_files(source: Path) -> list[Path]:
    """One ``.traj``, or all of a directory by path."""
    if not source.is_dir():
        return [source]
    files = records.files(source, SUFFIX, deep=True)
    if not files:
        raise RecordingError(f"{source}: holds no *{SUFFIX}")
    return files


def read_attempts(file: Path) -> Iterator[TextTask]:
    """The file's task, or one for each of its attempts where it records several.

    RecordError names the field that is malformed.
    """
    where = str(file)
    record = records.read_object(file)
    name = records.stem(file)
    if not record.get("attempts"):
        yield _task(record, name, where)
        return
    for number, (attempt, place) in enumerate(records.objects(record, "attempts", where), start=1):
        yield _task(attempt, f"{name}/attempt-{number}", place)


def _task(record: dict[str, Any], task_id: str, where: str) -> TextTask:
    is_demonstration = "history" in record and "trajectory" not in record
    steps = [] if is_demonstration else list(records.objects(record, "trajectory", where))
    history = list(records.objects(record, "history", where))
    agent = history[0][0].get("agent") if history else None
    messages = [(row, place) for row, place in history if row.get("agent", agent) == agent]
    asked = [_query(step, place) for step, place in steps]
    read = _calls_of_queries if any(asked) else _calls_of_history
    calls = list(read(steps, asked, messages))
    texts = dict.fromkeys(text for call in calls for text in (*(text for _, text in call.messages), call.response))
    return TextTask(task_id, where, calls, list(texts))


def _query(step: dict[str, Any], where: str) -> list[_Placed]:
    """A step's query, empty where the model was not asked or the version does not record it."""
    rows = list(records.objects(step, "query", where)) if step.get("query") is not None else []
    return [] if all(not row for row, _ in rows) else rows


def _calls_of_queries(
    steps: Sequence[_Placed], asked: Sequence[list[_Placed]], history: Sequence[_Placed]
) -> Iterator[TextCall]:
    # What the next query, or at the end the history, shows of a response has its tool calls, which the step lacks.
    shown_next = [history] * len(asked)
    for number in range(len(asked) - 1, 0, -1):
        shown_next[number - 1] = asked[number] or shown_next[number]
    pause_s = 0.0
    for (step, place), query, shown in zip(steps, asked, shown_next, strict=True):
        if query:
            messages = [role_and_text(row, row_place) for row, row_place in query]
            yield TextCall(messages, _response(step, place, shown), pause_s)
            pause_s = 0.0
        pause_s += _execution_s(step, place)


def _response(step: dict[str, Any], where: str, shown: Sequence[_Placed]) -> str:
    """All that the model said: the latest of the messages shown after it, if that is the step's response."""
    content = step.get("response")
    if not isinstance(content, str):
        raise RecordError(f"{where}: response must be a text, not {type(content).__name__}")
    for row, place in reversed(shown):
        if row.get("role") == _ASSISTANT:
            alone = role_and_text({**row, "tool_calls": None, "content": row.get("content") or ""}, place)[1]
            if alone == content:
                return role_and_text(row, place)[1]
            break
    return role_and_text({"role": _ASSISTANT, "content": content}, where)[1]


def _calls_of_history(
    steps: Sequence[_Placed], asked: Sequence[list[_Placed]], history: Sequence[_Placed]
) -> Iterator[TextCall]:
    messages = [role_and_text(row, place) for row, place in history]
    responses = [step.get("response") for step, _ in steps]
    latest_step = -1
    pause_s = 0.0
    for number, ((row, place), (role, text)) in enumerate(zip(history, messages, strict=True)):
        if role != _ASSISTANT or row.get("is_demo"):
            continue
        if number == 0:
            raise RecordError(f"{place}: is the assistant's; a call needs a prompt before it")
        yield TextCall(messages[:number], text, pause_s)
        pause_s = math.nan
        if row.get("content") in responses[latest_step + 1 :]:
            latest_step = responses.index(row.get("content"), latest_step + 1)
            pause_s = _execution_s(*steps[latest_step])


def _execution_s(step: dict[str, Any], where: str) -> float:
    return records.seconds(step, "execution_time", where)
