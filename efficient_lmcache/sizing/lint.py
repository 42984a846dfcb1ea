"""Find where prompts stop extending what their lane processed before, the likely habit, and the tokens that costs.

lane      a chain of calls, each sent after the previous one's response; its name is its task's
break     a prompt that is no continuation of the lane's previous prompt + output (`lint_break`)
fork      a prompt that continues an earlier call of its lane, not the latest: no loss
repeat    a prompt that is the beginning of the previous one, such as a retry: no loss
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from efficient_lmcache.replay.trace import common_prefix_tokens
from efficient_lmcache.sizing.lint_align import Ids, Run
from efficient_lmcache.sizing.lint_break import Break, Call, find_break
from efficient_lmcache.sizing.lint_habits import Diagnosis, Habit, Span, diagnose, moved

_REMEMBERED_CALLS = 16
_LITTLE = 0.1
_EXCERPT_TOKENS = 24
_CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """A break and its likely habit.

    Attributes:
        task: the lane's name.
        call: its number within the lane; 0 is the first.
        old, new: token ids around the edit, from a few before it: of previous prompt + output, and of the prompt;
            empty where ids are no tokens.
    """

    task: str
    call: int
    found: Break
    diagnosis: Diagnosis
    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def cost_tokens(self) -> int:
        """The tokens lost, or where that is unknown the most that can be."""
        lost = self.found.lost_tokens
        return self.found.at_most_lost_tokens if lost is None else lost + self.diagnosis.moved_tokens


@dataclass(slots=True)
class LaneReport:
    """One lane; lists have one entry a call.

    Attributes:
        prompt_tokens: n.
        stable_tokens: of it, the longest common prefix with what an earlier call left behind (0 for the first).
        cost_tokens: `Finding.cost_tokens`; 0 where there is no break.
        forks, repeats: calls.
    """

    task: str
    prompt_tokens: list[int] = field(default_factory=list)
    stable_tokens: list[int] = field(default_factory=list)
    cost_tokens: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    forks: int = 0
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class HabitTotal:
    """A habit, and where known its variant, over all lanes; `cost_tokens` as in `Finding`."""

    label: str
    advice: str
    breaks: int
    tasks: int
    cost_tokens: int
    at_most_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """All lanes of a recording, in order of appearance.

    Attributes:
        unit_tokens: how exactly breaks are placed; 1 where token ids are known.
        notes: what the recording cannot tell.
        lanes_are_guessed: a call that extends no earlier one counts as another lane's first, so no break is ever seen.
    """

    source: str
    unit_tokens: int
    lanes: tuple[LaneReport, ...]
    notes: tuple[str, ...] = ()
    lanes_are_guessed: bool = False

    @property
    def knows_text(self) -> bool:
        """Whether costs are what is lost; otherwise they are the most that can be lost."""
        return self.unit_tokens == 1

    @property
    def calls(self) -> int:
        return sum(len(lane.prompt_tokens) for lane in self.lanes)

    @property
    def prompt_tokens(self) -> int:
        return sum(sum(lane.prompt_tokens) for lane in self.lanes)

    @property
    def stable_tokens(self) -> int:
        return sum(sum(lane.stable_tokens) for lane in self.lanes)

    @property
    def cost_tokens(self) -> int:
        return sum(sum(lane.cost_tokens) for lane in self.lanes)

    def worst_calls(self) -> list[Finding]:
        """Every finding, by cost."""
        findings = (each for lane in self.lanes for each in lane.findings)
        return sorted(findings, key=lambda each: (-each.cost_tokens, -each.found.at_most_lost_tokens))

    def worst_lanes(self) -> list[LaneReport]:
        """Lanes with findings, by cost."""
        lanes = (lane for lane in self.lanes if lane.findings)
        return sorted(lanes, key=lambda lane: (-sum(lane.cost_tokens), -len(lane.findings)))

    def habits(self) -> list[HabitTotal]:
        """Totals by habit, by cost."""
        by_label: dict[str, list[Finding]] = {}
        for each in self.worst_calls():
            by_label.setdefault(each.diagnosis.label, []).append(each)
        totals = [
            HabitTotal(
                label=label,
                advice=findings[0].diagnosis.advice,
                breaks=len(findings),
                tasks=len({each.task for each in findings}),
                cost_tokens=sum(each.cost_tokens for each in findings),
                at_most_lost_tokens=sum(each.found.at_most_lost_tokens for each in findings),
            )
            for label, findings in by_label.items()
        ]
        return sorted(totals, key=lambda total: (-total.cost_tokens, -total.breaks))


def lint_calls(
    source: str,
    calls: Iterable[tuple[str, Call]],
    unit_tokens: int = 1,
    notes: Callable[[], tuple[str, ...]] = tuple,
) -> Report:
    """Lint calls that come with their lane's name: a lane's in order, lanes in any interleaving.

    `notes` is called after the last call. Memory: the latest few prompts of every lane.
    """
    lanes: dict[str, LaneLint] = {}
    for name, call in calls:
        lane = lanes.get(name)
        if lane is None:
            lane = lanes[name] = LaneLint(name)
        lane.add(call)
    return Report(source, unit_tokens, tuple(lane.report for lane in lanes.values()), notes())


@dataclass(frozen=True, slots=True)
class _Past:
    call: Call
    left_behind: Ids
    replies: list[Span]


class LaneLint:
    """Compares every call of one lane with the ones before it."""

    def __init__(self, task: str) -> None:
        self.report = LaneReport(task)
        self._past: deque[_Past] = deque(maxlen=_REMEMBERED_CALLS)
        self._opening_tokens = 0

    def add(self, call: Call) -> None:
        """Take the lane's next call."""
        number = len(self.report.prompt_tokens)
        stable = cost = 0
        replies: list[Span] = []
        if not self._past:
            self._opening_tokens = call.prompt_tokens
        else:
            past, found = self._compare(call)
            units = common_prefix_tokens(past.left_behind, call.ids)
            stable = units * call.unit_tokens
            runs: tuple[Run, ...] = ()
            if found is not None:
                finding = self._finding(number, past, call, found)
                cost, runs = finding.cost_tokens, found.stayed
                self.report.findings.append(finding)
                if finding.diagnosis.habit is Habit.RESTARTED:
                    self._opening_tokens = call.prompt_tokens
            replies = moved(past.replies, stable, runs)
        self.report.prompt_tokens.append(call.prompt_tokens)
        self.report.stable_tokens.append(stable)
        self.report.cost_tokens.append(cost)
        if call.output_ids is not None:
            replies.append((len(call.ids), len(call.ids) + len(call.output_ids)))
        self._past.append(_Past(call, call.left_behind, replies))

    def _compare(self, call: Call) -> tuple[_Past, Break | None]:
        """The call that this one goes on from, and the break between them.

        It is the latest, unless this prompt continues an earlier one (a fork), or has next to nothing of the latest and
        more of an earlier one (prompts of a side task came in between).
        """
        latest = self._past[-1]
        found = find_break(latest.call, call)
        if found is None:
            self.report.repeats += call.prompt_tokens <= latest.call.prompt_tokens
            return latest, None
        has_little = (found.lost_tokens or 0) <= _LITTLE * found.at_most_lost_tokens
        earlier = list(self._past)[-2::-1]
        for past in earlier:
            if _continues(past, call) and (has_little or len(past.left_behind) * call.unit_tokens >= _in_common(found)):
                self.report.forks += 1
                return past, None
        best = latest, found
        is_other_text = has_little and 2 * found.stable_tokens < call.prompt_tokens
        for past in earlier if is_other_text else ():
            other = find_break(past.call, call)
            if other is not None and _in_common(other) > _in_common(best[1]) + max(call.unit_tokens, _EXCERPT_TOKENS):
                best = past, other
        return best

    def _finding(self, number: int, past: _Past, call: Call, found: Break) -> Finding:
        diagnosis = diagnose(found, self._opening_tokens, past.replies)
        old: tuple[int, ...] = ()
        new: tuple[int, ...] = ()
        if found.runs is not None:
            start, edit = found.stable_tokens, diagnosis.edit
            old = _excerpt(past.left_behind, start, edit.removed_tokens)
            new = _excerpt(call.ids, start, edit.inserted_tokens)
        return Finding(self.report.task, number, found, diagnosis, old, new)


def _continues(past: _Past, call: Call) -> bool:
    """Whether a prompt is at least half of what an earlier call left behind, and goes on from it."""
    length = len(past.left_behind)
    return length <= len(call.ids) <= 2 * length and bool((call.ids[:length] == past.left_behind).all())


def _in_common(found: Break) -> int:
    return found.stable_tokens + (found.lost_tokens or 0)


def _excerpt(ids: Ids, start: int, tokens: int) -> tuple[int, ...]:
    """The edit's ids with a little context: what surrounds a short edit, the beginning of a long one."""
    context = _CONTEXT_TOKENS if tokens <= _EXCERPT_TOKENS - _CONTEXT_TOKENS else 0
    end = start + min(tokens, _EXCERPT_TOKENS) + context
    return tuple(ids[max(0, start - _CONTEXT_TOKENS) : end].tolist())
