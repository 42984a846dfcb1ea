"""What every importer reads its files into: tasks whose calls are messages, or blocks of tokens that have ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from efficient_lmcache.core.references import Ints

# Seen in 16,330 recorded calls: the time between two calls grows by 1 s for every 90 completion tokens of the first.
DECODE_TOKENS_PER_S = 90.0


@dataclass(frozen=True, slots=True)
class TextCall:
    """One call as text.

    Attributes:
        messages: (role, text) of all that was sent, at least one.
        response: what came back.
        interval_s: as in `trace.Call`; nan where the recording does not tell it.
        start_s: recorded dispatch on the recording's own clock, where known.
    """

    messages: Sequence[tuple[str, str]]
    response: str
    interval_s: float
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class TextTask:
    """One task as text. `where` names its file (and line) for errors, `texts` are what a BPE learns from it."""

    task_id: str
    where: str
    calls: Sequence[TextCall]
    texts: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class BlockCall:
    """One call as blocks.

    Attributes:
        prompt_tokens: n, at least 1.
        output_tokens: m, at least 0.
        block_ids: [ceil(n / b)]: head to tail; the last one is of a partial block unless b divides n.
        interval_s, start_s: as in `TextCall`.
    """

    prompt_tokens: int
    output_tokens: int
    block_ids: Ints
    interval_s: float
    start_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """One task as blocks of `block_tokens` (b). Equal ids are equal blocks within a `scope`, whose tasks follow one
    another."""

    task_id: str
    where: str
    calls: Sequence[BlockCall]
    block_tokens: int
    scope: Hashable


class UniqueNames:
    """Names for tasks that are told apart by them: recordings of several attempts at an instance repeat its name.

    Attributes:
        repeated: names that were given before.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._given: set[str] = set()
        self._times: Counter[str] = Counter()

    def of(self, name: str) -> str:
        """`name` itself the first time, then name#2, name#3, …"""
        unique = name
        while unique in self._given:
            self._times[name] += 1
            unique = f"{name}#{self._times[name] + 1}"
        self._given.add(unique)
        self.repeated += unique != name
        return unique


def pause_s(elapsed_s: float, completion_tokens: float) -> float:
    """What remains of the time between two dispatches, or two responses, when the call between them has decoded.

    At least 0; nan where either is not known.
    """
    remaining_s = elapsed_s - completion_tokens / DECODE_TOKENS_PER_S
    return 0.0 if remaining_s < 0 else remaining_s
