"""What a history condenser would have made of a recorded trace (paper, Appendix G and Table 13).

A token trace does not say where an agent's events begin, but its calls do: the first prompt (system text and task) is
one event, every output is one, and so are the tokens between an output and the end of the next prompt: what the agent
observed. Counted like that, the three condensers here follow OpenHands 0.56: recent events, observation masking, and
summaries by the model. Outputs stay the recorded ones, so that a replay still forces the same answers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from efficient_lmcache.replay.spelling import option
from efficient_lmcache.replay.trace import (
    Call,
    Manifest,
    Tokens,
    TraceError,
    TraceReader,
    TraceWriter,
    common_prefix_tokens,
)

PLACEHOLDER_TOKENS = 24  # "<MASKED>" as a message of its own
INSTRUCTION_TOKENS = 512  # what a summarizing call asks for, before the text that it is to summarize
CUT_OUTPUTS = "outputs had been cut before they were condensed: what was cut off counts as observed, and is masked"
_MADE_UP_SEED = 13


@dataclass(slots=True)
class History:
    """What a task has said and seen before a call.

    Attributes:
        prefix: the first prompt, or the prompt with which the agent itself last rewrote its history.
        turns: (output, observation) pairs since then, oldest first.
        summary: what stands for the turns that were forgotten, once there is one.
        forgotten_turns: index of the first turn, behind the kept head, that `summary` does not stand for.
    """

    prefix: Tokens
    turns: list[tuple[Tokens, Tokens]] = field(default_factory=list)
    summary: Tokens | None = None
    forgotten_turns: int = 0


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Texts that no recording holds: random ids, the same in every trace of a vocabulary; summaries depend on the task.

    Lengths are what matters to a cache; that a summary's text is new, and stays while it is kept, is preserved.
    """

    vocab_size: int

    def placeholder(self) -> Tokens:
        return self._tokens(PLACEHOLDER_TOKENS, 0)

    def instruction(self) -> Tokens:
        return self._tokens(INSTRUCTION_TOKENS, 1)

    def summary(self, length: int, task_id: str, history: History) -> Tokens:
        at_tokens = len(history.prefix) + sum(len(output) + len(seen) for output, seen in history.turns)
        return self._tokens(length, 2, zlib.crc32(task_id.encode()), at_tokens)

    def _tokens(self, length: int, *key: int) -> Tokens:
        return np.random.default_rng([_MADE_UP_SEED, *key]).integers(self.vocab_size, size=length, dtype=np.uint32)


class Condenser(Protocol):
    """How a call's prompt is made of its task's history."""

    def check(self) -> None:
        """Raise TraceError for an option out of range."""

    def calls(self, history: History, call: Call, task_id: str, made_up: MadeUp) -> Iterator[Call]:
        """`call` with its condensed prompt, after the calls that condensing itself takes."""


@dataclass(frozen=True, slots=True)
class RecentEvents:
    """Keep the first events and the latest ones.

    Attributes:
        max_events: events in a prompt, the kept first ones included.
        keep_first: of them, from the start; the first prompt is one.
    """

    max_events: int = 100
    keep_first: int = 1

    def check(self) -> None:
        _at_least("keep_first", self.keep_first, 1)
        _at_least("max_events", self.max_events, self.keep_first + 2)

    def calls(self, history: History, call: Call, task_id: str, made_up: MadeUp) -> Iterator[Call]:
        head = _whole_turns(self.keep_first - 1)
        tail = _whole_turns(self.max_events - self.keep_first)
        start = max(head, len(history.turns) - tail)
        yield replace(call, prompt_tokens=_joined(history.prefix, history.turns[:head] + history.turns[start:]))


@dataclass(frozen=True, slots=True)
class ObservationMasking:
    """Replace observations by a short placeholder once they are not among the latest events.

    Attributes:
        attention_window: latest events whose observations stay.
    """

    attention_window: int = 100

    def check(self) -> None:
        _at_least("attention_window", self.attention_window, 1)

    def calls(self, history: History, call: Call, task_id: str, made_up: MadeUp) -> Iterator[Call]:
        # The latest event is an observation, and every other one.
        masked = max(0, len(history.turns) - (self.attention_window + 1) // 2)
        placeholder = made_up.placeholder()
        turns = [(output, placeholder) for output, _ in history.turns[:masked]] + history.turns[masked:]
        yield replace(call, prompt_tokens=_joined(history.prefix, turns))


@dataclass(frozen=True, slots=True)
class Summary:
    """Once there are too many events, let the model summarize all but the first and the latest of them.

    The summarizing call is a call of the task: its prompt is an instruction, the previous summary and the events to be
    forgotten; its output is the new summary. It comes after the recorded interval, and the agent's call at once after
    it.

    Attributes:
        max_size: events in a prompt, the summary included, beyond which half of them are kept.
        keep_first: events at the start that stay; the first prompt is one.
        summary_tokens: length of every summary.
    """

    max_size: int = 100
    keep_first: int = 1
    summary_tokens: int = 512

    def check(self) -> None:
        _at_least("keep_first", self.keep_first, 1)
        _at_least("max_size", self.max_size, 2 * (self.keep_first + 3))
        _at_least("summary_tokens", self.summary_tokens, 1)

    def calls(self, history: History, call: Call, task_id: str, made_up: MadeUp) -> Iterator[Call]:
        head = _whole_turns(self.keep_first - 1)
        start = max(head, history.forgotten_turns)
        head_events = 1 + 2 * min(head, len(history.turns))
        events = head_events + (history.summary is not None) + 2 * max(0, len(history.turns) - start)
        if events > self.max_size:
            kept = len(history.turns) - _whole_turns(self.max_size // 2 - head_events - 1)
            yield self._summarize(history, start, kept, replace(call, start_s=None), task_id, made_up)
            call, start = replace(call, interval_s=0.0), kept
        middle = () if history.summary is None else (history.summary,)
        prefix = _joined(history.prefix, history.turns[:head], *middle)
        yield replace(call, prompt_tokens=_joined(prefix, history.turns[start:]))

    def _summarize(self, history: History, start: int, kept: int, call: Call, task_id: str, made_up: MadeUp) -> Call:
        previous = () if history.summary is None else (history.summary,)
        prompt = _joined(np.concatenate((made_up.instruction(), *previous)), history.turns[start:kept])
        history.summary = made_up.summary(self.summary_tokens, task_id, history)
        history.forgotten_turns = kept
        return replace(call, prompt_tokens=prompt, output_tokens=history.summary)


CONDENSERS: dict[str, type[RecentEvents] | type[ObservationMasking] | type[Summary]] = {
    "recent": RecentEvents,
    "masking": ObservationMasking,
    "summary": Summary,
}


@dataclass(slots=True)
class Counts:
    """What condensing met and made.

    Attributes:
        rewritten: prompts that do not extend the task's previous prompt. The agent rewrote its history itself; where
            the events of such a prompt begin is unknown, so all of it counts as a first prompt.
        altered_outputs: prompts that extend the previous prompt but not its whole output; what differs from the output
            counts as observed.
        summarizing_calls: calls inserted.
    """

    rewritten: int = 0
    altered_outputs: int = 0
    summarizing_calls: int = 0


def condense(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    condenser: Condenser,
    progress: Callable[[int, int], None] | None = None,
) -> Counts:
    """Write the trace that `condenser` would have left, and add the step to its manifest's history.

    `progress` is called with (tasks written, tasks in all). Raises TraceError for an option out of range, and for a
    trace without tasks.
    """
    condenser.check()
    counts = Counts()
    with TraceReader(source) as reader:
        if not reader.tasks:
            raise TraceError(f"{source}: has no tasks; there is nothing to condense")
        made_up = MadeUp(reader.manifest.vocab_size)
        step = {"step": "condense", "condenser": _name(condenser), **asdict(condenser)}  # type: ignore[call-overload]
        manifest = replace(
            reader.manifest,
            history=(*reader.manifest.history, step),
            assumptions=(*reader.manifest.assumptions, *_assumptions(condenser, _outputs_are_cut(reader.manifest))),
        )
        with TraceWriter(out, manifest) as writer:
            for number, task in enumerate(reader.tasks):
                calls = condensed(reader.calls(number), condenser, task.task_id, made_up, counts)
                writer.write_task(task.task_id, calls)
                if progress is not None:
                    progress(number + 1, len(reader.tasks))
    return counts


def condensed(
    calls: Iterable[Call], condenser: Condenser, task_id: str, made_up: MadeUp, counts: Counts
) -> Iterator[Call]:
    """One task's calls as `condenser` would have sent them."""
    history: History | None = None
    previous: Call | None = None
    for call in calls:
        history = _history_of(call, previous, history, counts)
        previous = call
        *own, agents = condenser.calls(history, call, task_id, made_up)
        counts.summarizing_calls += len(own)
        yield from own
        yield agents


def _history_of(call: Call, previous: Call | None, history: History | None, counts: Counts) -> History:
    if previous is None or history is None:
        return History(call.prompt_tokens)
    known = len(previous.prompt_tokens)
    if common_prefix_tokens(previous.prompt_tokens, call.prompt_tokens) < known:
        counts.rewritten += 1
        return History(call.prompt_tokens)
    added = call.prompt_tokens[known:]
    of_output = common_prefix_tokens(previous.output_tokens, added)
    counts.altered_outputs += of_output < len(previous.output_tokens)
    history.turns.append((added[:of_output], added[of_output:]))
    return history


@dataclass(frozen=True, slots=True)
class PerCall:
    """Means over all calls of a trace, in tokens.

    Attributes:
        calls: how many there are, those of condensers included.
        prompt_tokens: submitted.
        cache_stable_tokens: the prompt's longest common prefix with the task's previous prompt and output, or with
            those before them if that is longer: a summarizing call in between does not make the agent's own history
            unknown to a cache. The rest, `fresh_tokens`, must be computed however large the cache is.
    """

    calls: int
    prompt_tokens: float
    cache_stable_tokens: float

    @property
    def fresh_tokens(self) -> float:
        return self.prompt_tokens - self.cache_stable_tokens

    @property
    def cache_stable_share(self) -> float:
        return self.cache_stable_tokens / self.prompt_tokens


def per_call(reader: TraceReader, progress: Callable[[int, int], None] | None = None) -> PerCall:
    """Measure a trace; `progress` is called with (tasks read, tasks in all)."""
    stable = 0
    for number in range(len(reader.tasks)):
        processed: list[Tokens] = []
        for call in reader.calls(number):
            stable += max((common_prefix_tokens(tokens, call.prompt_tokens) for tokens in processed), default=0)
            processed = [*processed[-1:], np.concatenate((call.prompt_tokens, call.output_tokens))]
        if progress is not None:
            progress(number + 1, len(reader.tasks))
    totals = reader.totals
    calls = max(1, totals.calls)
    return PerCall(totals.calls, totals.prompt_tokens / calls, stable / calls)


def _whole_turns(events: int) -> int:
    """An output without its observation, or the reverse, is not sent: tools' answers belong to their calls."""
    return max(0, events) // 2


def _joined(prefix: Tokens, turns: Iterable[tuple[Tokens, Tokens]], *more: Tokens) -> Tokens:
    return np.concatenate((prefix, *(tokens for turn in turns for tokens in turn), *more))


def _at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise TraceError(f"{option(name)} is {value}; it must be at least {lowest}")


def _name(condenser: Condenser) -> str:
    return next(name for name, kind in CONDENSERS.items() if isinstance(condenser, kind))


def _outputs_are_cut(manifest: Manifest) -> bool:
    """Whether an earlier step cut outputs whose whole text is in the prompts behind them."""
    return any(step.get("max_output") is not None for step in manifest.history)


def _assumptions(condenser: Condenser, outputs_cut: bool) -> tuple[str, ...]:
    made_up: dict[Any, str] = {
        ObservationMasking: f"a masked observation is {PLACEHOLDER_TOKENS} made-up tokens, the same everywhere",
        Summary: f"summaries are made-up tokens of one length, asked for by an instruction of {INSTRUCTION_TOKENS}",
    }
    return (
        "condensed: the agent answers a condensed prompt as it answered the whole one, after the same pauses",
        *(text for kind, text in made_up.items() if isinstance(condenser, kind)),
        *((CUT_OUTPUTS,) if outputs_cut and isinstance(condenser, ObservationMasking) else ()),
    )
