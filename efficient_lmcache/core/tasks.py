"""Which task does a prompt belong to, when its client does not say?

An agent resends its conversation, so a prompt that extends an earlier prompt belongs to that prompt's task. Two tasks
that merely share a system prompt do not: neither prompt contains the other.

A prompt may also start from an earlier one that the task has left behind. If only one such line goes on, an agent has
rewritten its history, and the task stays one. If an abandoned line is taken up again, several agents started from the
same prompt (a warmed-up system prompt, several attempts at one problem); each line is then a task of its own.

What is compared:

    prefix key      identifies all tokens up to a block boundary (vLLM's chained block hashes)
    anchor          one in several block boundaries: the last at least `MAX_SUFFIX_TOKENS` before an earlier prompt's
                    end; its key is the index
    tail            that prompt's tokens after the anchor, remembered and compared by their 64-bit hash
    turn suffix     the tokens that end every prompt (a chat template's generation prompt); a template may drop or
                    replace them in the next turn, so an earlier prompt may miss them when it is extended
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

MAX_SUFFIX_TOKENS = 16
#: Anchors lie at least so far apart: closer ones mean more probes, farther ones longer tails.
ANCHOR_TOKENS = 128

_START = "start of prompt"


class _Task:
    __slots__ = ("latest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest: _Prompt | None = None


class _Prompt:
    """An earlier prompt, by the tail that tells it from others at its anchor."""

    __slots__ = ("anchor", "extended", "place", "tail_hash", "tail_tokens", "task")

    def __init__(self, anchor: Hashable, tail_tokens: int, tail_hash: int, task: _Task) -> None:
        self.anchor = anchor
        self.tail_tokens = tail_tokens
        self.tail_hash = tail_hash
        self.task = task
        self.place = -1
        self.extended = False

    def find(self, tail_hash: int) -> _Prompt | None:
        return self if tail_hash == self.tail_hash else None

    def tail_lengths(self) -> list[int]:
        return [self.tail_tokens]


class _Prompts:
    """Several earlier prompts at one anchor.

    Attributes:
        tail_tokens: of the longest tail.
    """

    __slots__ = ("_by_tail", "_counts", "tail_tokens")

    def __init__(self, first: _Prompt, second: _Prompt) -> None:
        self._by_tail: dict[int, _Prompt] = {}
        # Tail length in tokens -> how many prompts have such a tail.
        self._counts: dict[int, int] = {}
        self.tail_tokens = 0
        self.add(first)
        self.add(second)

    def __len__(self) -> int:
        return len(self._by_tail)

    def find(self, tail_hash: int) -> _Prompt | None:
        return self._by_tail.get(tail_hash)

    def tail_lengths(self) -> list[int]:
        """Longest first."""
        return sorted(self._counts, reverse=True)

    def add(self, prompt: _Prompt) -> None:
        length = prompt.tail_tokens
        self._by_tail[prompt.tail_hash] = prompt
        self._counts[length] = self._counts.get(length, 0) + 1
        self.tail_tokens = max(self.tail_tokens, length)

    def remove(self, prompt: _Prompt) -> None:
        length = prompt.tail_tokens
        del self._by_tail[prompt.tail_hash]
        self._counts[length] -= 1
        if not self._counts[length]:
            del self._counts[length]
            self.tail_tokens = max(self._counts, default=0)


#: Keys, tokens, how many of these, salt, the task that was found, and the prompt that was found to be extended.
_Assigned: TypeAlias = "tuple[Sequence[Hashable], Sequence[int], int, Hashable, _Task, _Prompt | None]"


class TaskInference:
    """Assigns every prompt to the task it extends, or to a new one.

    Memory: of each prompt that the latest `max_prompts` assignments brought, its anchor's key and its tail's hash. An
    assignment costs one dictionary probe per anchor that the prompt adds, and a comparison with the tails at the one
    that is found; tokens before that anchor are never read.
    """

    __slots__ = (
        "_anchor_blocks",
        "_anchor_tokens",
        "_assigned",
        "_at",
        "_latest_tail",
        "_next_place",
        "_places",
        "_tasks",
    )

    def __init__(self, block_tokens: int, max_prompts: int = 8192, anchor_tokens: int = ANCHOR_TOKENS) -> None:
        if block_tokens < 1 or max_prompts < 1:
            raise ValueError(f"block_tokens={block_tokens} and max_prompts={max_prompts} must be at least 1")
        self._anchor_blocks = -(-anchor_tokens // block_tokens)
        self._anchor_tokens = self._anchor_blocks * block_tokens
        # By anchor; most have one prompt.
        self._at: dict[Hashable, _Prompt | _Prompts] = {}
        # A ring: the next prompt takes the place of the oldest one.
        self._places: list[_Prompt | None] = [None] * max_prompts
        self._next_place = 0
        self._assigned: _Assigned | None = None
        self._latest_tail: tuple[int, ...] = ()
        self._tasks = 0

    def __len__(self) -> int:
        """Prompts remembered."""
        return len(self._places) - self._places.count(None)

    def assign(self, prefix_keys: Sequence[Hashable], prompt_tokens: Sequence[int], salt: Hashable = None) -> str:
        """Return the task of a prompt, which `remember` makes part of it.

        Args:
            prefix_keys: key i identifies the first (i + 1) * block_tokens tokens (and the tenant, where the keys are
                salted). Where keys are missing, prompts are compared only up to the last one.
            prompt_tokens: the prompt's n token ids. A prompt of at most `MAX_SUFFIX_TOKENS` says too little to
                recognise anyone by and is not remembered.
            salt: the tenant, for prompts too short to have a salted key.

        Returns:
            A task name that no prompt of another conversation has.
        """
        # As in `admission`: between a lookup and its answer, whatever the interpreter does rarely is slow.
        if self._assigned is not None:
            self.remember()
        at, anchor_blocks, anchor_tokens = self._at, self._anchor_blocks, self._anchor_tokens
        known = len(prompt_tokens) // anchor_tokens
        if known * anchor_blocks > len(prefix_keys):
            known = len(prefix_keys) // anchor_blocks
        extended = None
        while known >= 0 and extended is None:
            anchor = prefix_keys[known * anchor_blocks - 1] if known else (_START, salt)
            if anchor in at:
                here, start = at[anchor], known * anchor_tokens
                candidate = tuple(prompt_tokens[start : start + here.tail_tokens])
                extended = here.find(hash(candidate))
                if extended is None:
                    extended = self._extended_otherwise(here, candidate, prompt_tokens)
            known -= 1
        # An earlier prompt that its task has left behind, and that nothing has extended: a line taken up again.
        if extended is None or (not extended.extended and extended is not extended.task.latest):
            self._tasks += 1
            task = _Task(f"inferred-{self._tasks}")
        else:
            task = extended.task
        self._assigned = (prefix_keys, prompt_tokens, len(prompt_tokens), salt, task, extended)
        return task.name

    def remember(self) -> None:
        """Remember the prompt that was assigned last; the next assignment does it otherwise, and takes longer then.

        Until then its keys and tokens must stay as they are, but for further ones after them.
        """
        if self._assigned is None:
            return
        prefix_keys, prompt_tokens, length, salt, task, extended = self._assigned
        self._assigned = None
        if length <= MAX_SUFFIX_TOKENS:
            return
        anchors = (length - MAX_SUFFIX_TOKENS) // self._anchor_tokens
        if anchors * self._anchor_blocks > len(prefix_keys):
            anchors = len(prefix_keys) // self._anchor_blocks
        anchor = prefix_keys[anchors * self._anchor_blocks - 1] if anchors else (_START, salt)
        tail = tuple(prompt_tokens[anchors * self._anchor_tokens : length])
        self._latest_tail = tail
        task.latest = prompt = self._place(anchor, tail, task)
        if extended is not None and extended is not prompt:
            extended.extended = True

    def _extended_otherwise(
        self, here: _Prompt | _Prompts, candidate: tuple[int, ...], prompt_tokens: Sequence[int]
    ) -> _Prompt | None:
        """The longest prompt with a shorter tail than the longest one, or else with another end.

        Args:
            candidate: the prompt's tokens after the anchor, as many as in the longest tail.
        """
        lengths = here.tail_lengths()
        for length in lengths[1:]:
            prompt = here.find(hash(candidate[:length]))
            if prompt is not None:
                return prompt
        turn_suffix = _common_suffix(tuple(prompt_tokens[-MAX_SUFFIX_TOKENS:]), self._latest_tail)
        for length in lengths:
            kept = length - len(turn_suffix)
            if turn_suffix and 0 < kept <= len(candidate):
                prompt = here.find(hash(candidate[:kept] + turn_suffix))
                if prompt is not None:
                    return prompt
        return None

    def _place(self, anchor: Hashable, tail: tuple[int, ...], task: _Task) -> _Prompt:
        at, places, place = self._at, self._places, self._next_place
        tail_hash = hash(tail)
        here = at.get(anchor)
        prompt = here.find(tail_hash) if here is not None else None
        if prompt is not None:
            places[prompt.place] = None
            prompt.task = task
        else:
            prompt = _Prompt(anchor, len(tail), tail_hash, task)
            if here is None:
                at[anchor] = prompt
            elif isinstance(here, _Prompts):
                here.add(prompt)
            else:
                at[anchor] = _Prompts(here, prompt)
        oldest = places[place]
        if oldest is not None:
            self._forget(oldest)
        places[place] = prompt
        prompt.place = place
        place += 1
        self._next_place = place if place < len(places) else 0
        return prompt

    def _forget(self, prompt: _Prompt) -> None:
        here = self._at[prompt.anchor]
        if isinstance(here, _Prompts):
            here.remove(prompt)
            if here:
                return
        del self._at[prompt.anchor]


def _common_suffix(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    kept = min(len(left), len(right))
    while kept and left[-kept:] != right[-kept:]:
        kept -= 1
    return left[-kept:] if kept else ()
