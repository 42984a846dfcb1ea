"""Which habit of an agent most likely made a break, from what was removed, what came instead, and what continues.

opening     the first prompt of a lane: system prompt, tools, task; an edit before its end is near the top
edit        the first one behind the break: `removed` old tokens made way for `inserted` ones, then old text goes on
reply       a previous output of the lane, where the history holds it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from efficient_lmcache.core.tasks import MAX_SUFFIX_TOKENS
from efficient_lmcache.sizing.lint_align import MIN_RUN_TOKENS, Run
from efficient_lmcache.sizing.lint_break import Break

_SMALL_EDIT_TOKENS = 128  # a clock, a request id and a few lines about the environment fit
_SMALL_NOTICE_TOKENS = 64  # "earlier messages were removed", not a summary
_PERMUTED_SHARE = 0.8
_SEAM_TOKENS = 2  # text cut out may leave its ends tokenised otherwise
_SHORTER = 0.9
_TAIL_SHARE = 1 / 4


class Habit(str, Enum):
    VOLATILE_HEAD = "volatile_head"
    TOOLS_REORDERED = "tools_reordered"
    REPLY_DROPPED = "reply_dropped"
    REPLY_REWRITTEN = "reply_rewritten"
    CONDENSED = "condensed"
    TAIL_REPLACED = "tail_replaced"
    EDITED = "edited"
    RESTARTED = "restarted"


_ADVICE = {
    Habit.VOLATILE_HEAD: "Move what changes on every call (time, date, ids) from the top to the end, or leave it out.",
    Habit.TOOLS_REORDERED: "Send tools in a fixed order, for example sorted by name.",
    Habit.REPLY_DROPPED: "Keep every reply in the history as the model wrote it, reasoning included.",
    Habit.REPLY_REWRITTEN: "Send a reply back exactly as the model wrote it: no re-serialised JSON, no stripped text.",
    Habit.CONDENSED: "Condense rarely and much at once, so that many calls extend the shortened history.",
    Habit.TAIL_REPLACED: "Append reminders and state as messages that stay, or send them only when they changed.",
    Habit.EDITED: "Leave sent messages as they are and append a correction instead.",
    Habit.RESTARTED: "Nothing to mend if a new conversation began; give it a task of its own in the recording.",
}
_NEAR_TOP_ADVICE = "Move what changes (state, listings, memory, clocks) below the history, or append the change."


class Variant(str, Enum):
    """How a history was condensed (paper, Appendix G), or where a prompt was edited."""

    TRUNCATION = "truncation"
    MASKING = "observation masking"
    SUMMARY = "summary"
    NEAR_TOP = "near the top"


Span = tuple[int, int]  # from, to


@dataclass(frozen=True, slots=True)
class Edit:
    """The first edit behind a break. In tokens; `end` is where old text goes on, in previous prompt + output.

    Where nothing goes on, everything behind the break is removed and inserted.
    """

    removed_tokens: int
    inserted_tokens: int
    end: int
    continues: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`moved_tokens`: of reordered tools, those lost besides `Break.lost_tokens`."""

    habit: Habit
    edit: Edit
    variant: Variant | None = None
    moved_tokens: int = 0

    @property
    def label(self) -> str:
        """The habit, and its variant where that is known."""
        return self.habit.value if self.variant is None else f"{self.habit.value}: {self.variant.value}"

    @property
    def advice(self) -> str:
        """What to do about it, in one sentence."""
        return _NEAR_TOP_ADVICE if self.variant is Variant.NEAR_TOP else _ADVICE[self.habit]


def diagnose(found: Break, opening_tokens: int, replies: Sequence[Span]) -> Diagnosis:
    """The likely habit behind a break.

    Args:
        opening_tokens: length of the lane's first prompt (since its last restart).
        replies: where previous outputs lie in previous prompt + output, by position; those that are known.
    """
    if found.runs is None:
        return _by_length(found, opening_tokens)
    edit = _first_edit(found)
    if found.stable_tokens >= found.previous_prompt_tokens - MAX_SUFFIX_TOKENS:
        return Diagnosis(Habit.REPLY_REWRITTEN if edit.continues else Habit.REPLY_DROPPED, edit)
    if swapped := _swapped(found, opening_tokens):
        return Diagnosis(Habit.TOOLS_REORDERED, edit, moved_tokens=sum(run.tokens for run in swapped))
    if not edit.continues:
        return _without_continuation(found, edit, opening_tokens)
    return _by_edit(found, edit, opening_tokens, replies)


def moved(replies: Sequence[Span], stable_tokens: int, runs: Sequence[Run]) -> list[Span]:
    """Where replies in previous prompt + output lie in the new prompt: those, or what of them, that it has."""
    if not runs and all(start < end <= stable_tokens for start, end in replies):
        return list(replies)  # as of every call of an agent that only appends
    kept = (Run(0, 0, stable_tokens), *runs)
    spans = []
    for start, end in replies:
        pieces = [
            (max(start, run.old) - run.old + run.new, min(end, run.old_end) - run.old + run.new)
            for run in kept
            if max(start, run.old) < min(end, run.old_end)
        ]
        if pieces:
            spans.append((min(piece[0] for piece in pieces), max(piece[1] for piece in pieces)))
    return sorted(spans)


def _first_edit(found: Break) -> Edit:
    stable = found.stable_tokens
    if not found.stayed:
        return Edit(found.previous_tokens - stable, found.prompt_tokens - stable, found.previous_tokens, False)
    return Edit(found.stayed[0].old - stable, found.stayed[0].new - stable, found.stayed[0].old, True)


def _by_length(found: Break, opening_tokens: int) -> Diagnosis:
    """Without text, position and length are all the evidence there is."""
    edit = _first_edit(found)
    shorter = found.prompt_tokens < _SHORTER * found.previous_tokens
    near_top = found.stable_tokens + found.unit_tokens < opening_tokens
    if not shorter:
        return Diagnosis(Habit.EDITED, edit, Variant.NEAR_TOP if near_top else None)
    return Diagnosis(Habit.RESTARTED if near_top else Habit.CONDENSED, edit)


def _swapped(found: Break, opening_tokens: int) -> list[Run]:
    """The runs within the opening that changed places; none where the region they span is not all made of old runs."""
    runs = [run for run in found.runs or () if max(run.old, run.new) < opening_tokens]
    swapped = [run for run in runs if run not in found.stayed]
    if not swapped:
        return []
    end_old, end_new = max(run.old_end for run in swapped), max(run.new_end for run in swapped)
    for run in runs:  # in place of a run that moved to the back, others came to the front
        if run.old < end_old or run.new < end_new:
            end_old, end_new = max(end_old, min(run.old_end, opening_tokens)), max(end_new, run.new_end)
    length = max(end_old, end_new) - found.stable_tokens
    explained = sum(run.tokens for run in runs if run.old < end_old and run.new < end_new)
    return swapped if explained >= _PERMUTED_SHARE * length else []


def _without_continuation(found: Break, edit: Edit, opening_tokens: int) -> Diagnosis:
    if found.stable_tokens < opening_tokens - MAX_SUFFIX_TOKENS:
        return Diagnosis(Habit.RESTARTED, edit)
    if found.prompt_tokens >= _SHORTER * found.previous_tokens:
        return Diagnosis(Habit.EDITED, edit)
    return Diagnosis(Habit.CONDENSED, edit, _shortened_by(edit))


def _by_edit(found: Break, edit: Edit, opening_tokens: int, replies: Sequence[Span]) -> Diagnosis:
    start, removed, inserted = found.stable_tokens, edit.removed_tokens, edit.inserted_tokens
    previous_prompt = found.previous_prompt_tokens
    overlaps = [shared for each in replies if (shared := min(each[1], edit.end) - max(each[0], start)) > 0]
    is_masked = removed > MIN_RUN_TOKENS and _SEAM_TOKENS < inserted <= removed / 2
    if edit.end >= previous_prompt - MAX_SUFFIX_TOKENS and removed <= _TAIL_SHARE * previous_prompt and not is_masked:
        return Diagnosis(Habit.TAIL_REPLACED, edit)
    if len(overlaps) == 1 and removed - overlaps[0] <= MAX_SUFFIX_TOKENS:
        dropped = inserted <= MAX_SUFFIX_TOKENS and _covers_a_reply(replies, start, edit.end)
        return Diagnosis(Habit.REPLY_DROPPED if dropped else Habit.REPLY_REWRITTEN, edit)
    if overlaps:
        return Diagnosis(Habit.CONDENSED, edit, _shortened_by(edit))
    if start < opening_tokens and max(removed, inserted) <= _SMALL_EDIT_TOKENS:
        return Diagnosis(Habit.VOLATILE_HEAD, edit)
    if is_masked and start >= opening_tokens - MAX_SUFFIX_TOKENS:
        return Diagnosis(Habit.CONDENSED, edit, Variant.MASKING if replies else None)
    return Diagnosis(Habit.EDITED, edit, Variant.NEAR_TOP if start < opening_tokens else None)


def _covers_a_reply(replies: Sequence[Span], start: int, end: int) -> bool:
    """Whether [start, end) takes all of some reply but what any two texts may share at their ends."""
    return any(start <= first + MAX_SUFFIX_TOKENS and end >= last - MAX_SUFFIX_TOKENS for first, last in replies)


def _shortened_by(edit: Edit) -> Variant:
    return Variant.TRUNCATION if edit.inserted_tokens <= _SMALL_NOTICE_TOKENS else Variant.SUMMARY
