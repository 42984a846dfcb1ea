"""Made-up tokens for blocks that have ids but no text.

A block becomes the same b tokens wherever its id occurs in its scope. Its first token is its place among the blocks
that follow the same block, the next ones are its number: so two prompts that differ in a block differ from its first
token on, as long as no block is followed by more different ones than there are token ids, and within its first few
tokens in any case. The rest repeats a hash of the number, so that a trace takes little more room than the ids.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from efficient_lmcache.core.references import Ints
from efficient_lmcache.replay.importers.records import RecordingError
from efficient_lmcache.replay.importers.tasks import BlockCall, BlockTask
from efficient_lmcache.replay.trace import Call, Tokens, common_prefix_tokens

_NUMBER_BITS = 40
_MAX_RUN_TOKENS = 1 << 24  # more in one block or output is a damaged record's, and would take all memory

_UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A task's latest path, and the tokens of its whole blocks."""

    path: Ints
    tokens: Tokens


class BlockTokens:
    """The tokens of a recording's tasks, which are asked for scope by scope.

    Raises RecordingError for a vocabulary of less than 2 ids.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise RecordingError(f"--vocab is {vocab_size}; made-up tokens need at least 2")
        self._vocab_size = vocab_size
        self._first_tokens = array("I")  # of a block, by its number
        self._heads = 0
        self._scope: Hashable = None
        self._forget_scope()

    def _forget_scope(self) -> None:
        self._numbers: dict[int, int] = {}
        self._followers: defaultdict[int, int] = defaultdict(int)
        self._tails: dict[int, int] = {}

    def calls(self, task: BlockTask, began_s: float = 0.0) -> Iterator[Call]:
        """A task's calls, start_s counted from `began_s`.

        A prompt's partial last block is taken for the beginning of the block that the task's next prompt has in its
        place, and the output for what follows there, if that prompt has all blocks before it and is long enough. Else
        an output is made up. Raises RecordingError where blocks are too small to tell all of them
        apart, and for sizes that no engine serves.
        """
        _check_sizes(task)
        if task.scope != self._scope:
            self._scope = task.scope
            self._forget_scope()
        paths = self._paths(task)
        known = _Known(np.empty(0, np.int64), np.empty(0, np.uint32))
        previous: tuple[BlockCall, Tokens] | None = None
        for call, path in zip(task.calls, paths, strict=True):
            known = self._extended(known, path, task)
            prompt = known.tokens[: call.prompt_tokens]
            if previous is not None:
                yield self._call(*previous, prompt, task, began_s)
            previous = call, prompt
        if previous is not None:
            yield self._call(*previous, np.empty(0, np.uint32), task, began_s)

    def _paths(self, task: BlockTask) -> Sequence[Ints]:
        """Each call's ids, that of a partial last block replaced by the block's that it is taken to begin."""
        paths: list[Ints] = []
        following: Ints = np.empty(0, np.int64)
        following_tokens = 0
        for call in reversed(task.calls):
            path, full = call.block_ids, call.prompt_tokens // task.block_tokens
            if len(path) > full:
                tail = int(path[full])
                longer = following_tokens >= call.prompt_tokens
                continued = longer and common_prefix_tokens(path[:full], following) == full
                taken = self._tails.setdefault(tail, int(following[full]) if continued else tail)
                path = np.append(path[:full], taken)
            paths.append(path)
            following, following_tokens = path, call.prompt_tokens
        return paths[::-1]

    def _extended(self, known: _Known, path: Ints, task: BlockTask) -> _Known:
        """The whole blocks of `path`, of which those shared with the call before are not made again."""
        shared = common_prefix_tokens(known.path, path)
        before = int(path[shared - 1]) if shared else None
        numbers: list[int] = []
        for block in path[shared:].tolist():
            numbers.append(self._number(block, before))
            before = block
        new = self._runs(np.array(numbers, np.uint64), task)
        return _Known(path, np.concatenate((known.tokens[: shared * task.block_tokens], new)))

    def _number(self, block: int, before: int | None) -> int:
        """A block's number; where it is new, `before` is the block that it follows, None at the head of prompts."""
        if block not in self._numbers:
            if before is None:  # scopes share no blocks, so they differ from their first ones on
                place, self._heads = self._heads, self._heads + 1
            else:
                place = self._followers[before]
                self._followers[before] += 1
            self._numbers[block] = self._new_number(place)
        return self._numbers[block]

    def _new_number(self, place: int) -> int:
        self._first_tokens.append(place % self._vocab_size)
        return len(self._first_tokens) - 1

    def _runs(self, numbers: _UInt64s, task: BlockTask) -> Tokens:
        """The tokens of these blocks, one after another."""
        size, vocab = task.block_tokens, self._vocab_size
        digits = min(size - 1, math.ceil(_NUMBER_BITS / math.log2(vocab)))
        if len(self._first_tokens) > vocab**digits:
            raise RecordingError(
                f"{task.where}: blocks of {size} tokens below {vocab} cannot tell {len(self._first_tokens)} blocks "
                "apart; take a larger --vocab"
            )
        runs = np.repeat((_hash(numbers) % np.uint64(vocab))[:, None], size, axis=1)
        runs[:, 0] = np.asarray(self._first_tokens)[numbers.astype(np.int64)]
        for digit in range(digits):
            runs[:, 1 + digit] = numbers // np.uint64(vocab**digit) % np.uint64(vocab)
        return runs.astype(np.uint32).reshape(-1)

    def _call(self, call: BlockCall, prompt: Tokens, following: Tokens, task: BlockTask, began_s: float) -> Call:
        length = max(1, call.output_tokens)
        start, end = len(prompt), len(prompt) + length
        continued = common_prefix_tokens(prompt, following) == start
        if continued and len(following) >= end:
            output = following[start:end]
        else:
            output = self._made_up(length, task)
            if continued and len(following) > start and output[0] == following[start]:
                output[0] = (output[0] + 1) % self._vocab_size
        start_s = None if call.start_s is None else call.start_s - began_s
        return Call(prompt, output, call.interval_s, start_s)

    def _made_up(self, length: int, task: BlockTask) -> Tokens:
        """Tokens that no other call has."""
        count = -(-length // task.block_tokens)
        numbers = [self._new_number(len(self._first_tokens)) for _ in range(count)]
        return self._runs(np.array(numbers, np.uint64), task)[:length].copy()


def _check_sizes(task: BlockTask) -> None:
    output_tokens = max((call.output_tokens for call in task.calls), default=0)
    for what, tokens in (("a block", task.block_tokens), ("an output", output_tokens)):
        if tokens > _MAX_RUN_TOKENS:
            raise RecordingError(f"{task.where}: {what} has {tokens} tokens; at most {_MAX_RUN_TOKENS} can be made up")


def _hash(values: _UInt64s) -> _UInt64s:
    """SplitMix64: equal values give equal, unequal ones unrelated results (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
