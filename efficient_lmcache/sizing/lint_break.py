"""Where a prompt stops extending what its lane processed before, and what of that it brings back behind the break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efficient_lmcache.core.tasks import MAX_SUFFIX_TOKENS
from efficient_lmcache.replay.trace import common_prefix_tokens
from efficient_lmcache.sizing.lint_align import Ids, Run, in_order, reappearing_runs


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One model call as a sequence of ids.

    Attributes:
        ids: [units] the prompt: token ids, or chunk numbers as in `References`.
        prompt_tokens: n; more than len(ids) * unit_tokens where a last, partial chunk has no number.
        output_ids: [m] the output's token ids; None where they are not known.
        unit_tokens: 1 for token ids. A longer unit's id identifies all tokens up to its end, hence no id behind a
            break is ever equal to an old one, whatever the text is.
    """

    ids: Ids
    prompt_tokens: int
    output_ids: Ids | None = None
    unit_tokens: int = 1

    @property
    def left_behind(self) -> Ids:
        """What the next prompt can reuse: prompt, then output."""
        return self.ids if self.output_ids is None else np.concatenate((self.ids, self.output_ids))


@dataclass(frozen=True, slots=True)
class Break:
    """A prompt against its lane's previous call. Positions and lengths are tokens.

    Attributes:
        stable_tokens: cache-stable length: longest common prefix with the previous prompt + output; where the break is.
        previous_prompt_tokens, previous_tokens: of the previous prompt, and of it with its output where that is known.
        prompt_tokens: of this prompt.
        runs: old text that reappears behind the break, as positions in previous prompt + output and in this prompt;
            None where ids cannot tell.
        stayed: the most of it that reappears in its old order.
        unit_tokens: how exactly positions are known.
    """

    stable_tokens: int
    previous_prompt_tokens: int
    previous_tokens: int
    prompt_tokens: int
    runs: tuple[Run, ...] | None
    stayed: tuple[Run, ...] = ()
    unit_tokens: int = 1

    @property
    def at_most_lost_tokens(self) -> int:
        """What a prompt of this length would have reused, had it extended the previous one: min(p, n) - stable."""
        return min(self.previous_tokens, self.prompt_tokens) - self.stable_tokens

    @property
    def lost_tokens(self) -> int | None:
        """Prompt tokens behind the break that the previous call processed as well, in the same order.

        They are computed again for the edit alone. Counted as runs of at least `MIN_RUN_TOKENS` equal tokens. What
        reappears out of order is most often a text read twice, which costs as much in a prompt that only grows. None
        where ids cannot tell; then only `at_most_lost_tokens` is known.
        """
        return None if self.runs is None else sum(run.tokens for run in self.stayed)


def find_break(previous: Call, call: Call) -> Break | None:
    """The break between two calls of a lane; None where `call` extends, or repeats the beginning of, `previous`.

    A difference in the last `MAX_SUFFIX_TOKENS` tokens (the last unit, where that is longer) is none: templates end a
    prompt, and models a turn, with tokens that the next prompt may render otherwise.
    """
    old, new, unit = previous.left_behind, call.ids, call.unit_tokens
    stable = common_prefix_tokens(old, new)
    tolerance = MAX_SUFFIX_TOKENS if unit == 1 else 1
    if min(len(old), len(new)) - stable <= tolerance:
        return None
    runs = None
    if unit == 1:
        found = reappearing_runs(old[stable:], new[stable:])
        runs = tuple(Run(run.old + stable, run.new + stable, run.tokens) for run in _up_to_the_end(found, old[stable:]))
    return Break(
        stable_tokens=stable * unit,
        previous_prompt_tokens=len(previous.ids) * unit,
        previous_tokens=len(old) * unit,
        prompt_tokens=len(new) * unit,
        runs=runs,
        stayed=in_order(runs or ()),
        unit_tokens=unit,
    )


def _up_to_the_end(runs: Sequence[Run], old: Ids) -> Sequence[Run]:
    """Without what reappears behind the last old tokens: where those are, the prompt's own new part begins.

    An agent that reads a file again has old text there that no prompt could have reused.
    """
    for number, run in enumerate(runs):
        if run.old_end >= len(old) - MAX_SUFFIX_TOKENS:
            return runs[: number + 1]
    return runs
