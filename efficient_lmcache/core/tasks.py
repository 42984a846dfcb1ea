"""Which task does a prompt belong to, when its client does not say?

An agent resends its conversation, so a prompt that extends an earlier prompt belongs to that prompt's task. Two tasks
that merely share a system prompt do not: neither prompt contains the other.

A prompt may also start from an earlier one that the task has left behind. If only one such line goes on, an agent has
rewritten its history, and the task stays one. If an abandoned line is taken up again, several agents started from the
same prompt (a warmed-up system prompt, several attempts at one problem); each line is then a task of its own.

What is compared:

    prefix key      identifies all tokens up to a block boundary (vLLM's chained block hashes)
    anchor          the last boundary at least `MAX_SUFFIX_TOKENS` before an earlier prompt's end; its key is the index
    tail            that prompt's tokens after the anchor, compared one by one
    turn suffix     the tokens that end every prompt (a chat template's generation prompt); a template may drop or
                    replace them in the next turn, so an earlier prompt may miss them when it is extended
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

MAX_SUFFIX_TOKENS = 16

_START = "start of prompt"
# Tokens are compared as packed bytes, whose hash is computed once and whose comparison is one memcmp.
_TOKEN = "I"
_TOKEN_BYTES = array(_TOKEN).itemsize


class _Task:
    __slots__ = ("latest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest: _Prompt | None = None


class _Prompt:
    __slots__ = ("extended", "task")

    def __init__(self) -> None:
        self.task: _Task | None = None
        self.extended = False


class TaskInference:
    """Assigns every prompt to the task it extends, or to a new one. Memory: the latest `max_prompts` prompts' tails.

    An assignment costs one dictionary probe per block of the prompt, and a comparison with the tails of the one anchor
    that is found; tokens before that anchor are never read.
    """

    def __init__(self, block_tokens: int, max_prompts: int = 8192) -> None:
        if block_tokens < 1 or max_prompts < 1:
            raise ValueError(f"block_tokens={block_tokens} and max_prompts={max_prompts} must be at least 1")
        self._block_tokens = block_tokens
        self._max_prompts = max_prompts
        # anchor -> tail length in tokens -> packed tail -> prompt
        self._tails: dict[Hashable, dict[int, dict[bytes, _Prompt]]] = {}
        self._oldest_first: dict[tuple[Hashable, int, bytes], None] = {}
        self._latest_end: bytes = b""
        self._tasks = 0

    def __len__(self) -> int:
        """Prompts remembered."""
        return len(self._oldest_first)

    def assign(self, prefix_keys: Sequence[Hashable], prompt_tokens: Sequence[int], salt: Hashable = None) -> str:
        """Return the task of a prompt and remember the prompt as part of it.

        Args:
            prefix_keys: key i identifies the first (i + 1) * block_tokens tokens (and the tenant, where the keys are
                salted). Where keys are missing, prompts are compared only up to the last one.
            prompt_tokens: the prompt's n token ids, each below 2**32. A prompt of at most `MAX_SUFFIX_TOKENS` says too
                little to recognise anyone by and is not remembered.
            salt: the tenant, for prompts too short to have a salted key.

        Returns:
            A task name that no prompt of another conversation has.
        """
        block_tokens, length = self._block_tokens, len(prompt_tokens)
        blocks = min(len(prefix_keys), length // block_tokens)
        extended = self._extended_prompt(prefix_keys, prompt_tokens, salt, blocks)
        task = self._task_from(extended)
        self._latest_end = _pack(prompt_tokens[-MAX_SUFFIX_TOKENS:])
        if length > MAX_SUFFIX_TOKENS:
            blocks = min(blocks, (length - MAX_SUFFIX_TOKENS) // block_tokens)
            start = blocks * block_tokens
            anchor = prefix_keys[blocks - 1] if blocks else (_START, salt)
            prompt = self._remember(anchor, length - start, _pack(prompt_tokens[start:]))
            prompt.task, task.latest = task, prompt
            if extended is not None and extended is not prompt:
                extended.extended = True
        return task.name

    def _task_from(self, extended: _Prompt | None) -> _Task:
        if extended is not None and extended.task is not None:
            abandoned = extended is not extended.task.latest and not extended.extended
            if not abandoned:
                return extended.task
        self._tasks += 1
        return _Task(f"inferred-{self._tasks}")

    def _extended_prompt(
        self, prefix_keys: Sequence[Hashable], prompt_tokens: Sequence[int], salt: Hashable, blocks: int
    ) -> _Prompt | None:
        """The longest earlier prompt that this one extends, among those at the longest known prefix."""
        tails_at = self._tails
        while blocks >= 0:
            tails = tails_at.get(prefix_keys[blocks - 1] if blocks else (_START, salt))
            if tails is not None:
                prompt = self._matching_prompt(tails, prompt_tokens, blocks * self._block_tokens)
                if prompt is not None:
                    return prompt
            blocks -= 1
        return None

    def _matching_prompt(
        self, tails: dict[int, dict[bytes, _Prompt]], prompt_tokens: Sequence[int], start: int
    ) -> _Prompt | None:
        lengths = sorted(tails, reverse=True) if len(tails) > 1 else list(tails)
        for tail_tokens in lengths:
            prompt = tails[tail_tokens].get(_pack(prompt_tokens[start : start + tail_tokens]))
            if prompt is not None:
                return prompt
        turn_suffix = _common_suffix(_pack(prompt_tokens[-MAX_SUFFIX_TOKENS:]), self._latest_end)
        suffix_tokens = len(turn_suffix) // _TOKEN_BYTES
        for tail_tokens in lengths:
            if 0 < suffix_tokens < tail_tokens:
                kept = _pack(prompt_tokens[start : start + tail_tokens - suffix_tokens])
                prompt = tails[tail_tokens].get(kept + turn_suffix)
                if prompt is not None:
                    return prompt
        return None

    def _remember(self, anchor: Hashable, tail_tokens: int, tail: bytes) -> _Prompt:
        prompt = self._tails.setdefault(anchor, {}).setdefault(tail_tokens, {}).setdefault(tail, _Prompt())
        # A dict keeps insertion order: the first key is the prompt seen longest ago.
        place = (anchor, tail_tokens, tail)
        self._oldest_first.pop(place, None)
        self._oldest_first[place] = None
        if len(self._oldest_first) > self._max_prompts:
            self._forget(next(iter(self._oldest_first)))
        return prompt

    def _forget(self, place: tuple[Hashable, int, bytes]) -> None:
        anchor, tail_tokens, tail = place
        del self._oldest_first[place]
        of_anchor = self._tails[anchor]
        of_length = of_anchor[tail_tokens]
        del of_length[tail]
        if not of_length:
            del of_anchor[tail_tokens]
        if not of_anchor:
            del self._tails[anchor]


def _pack(tokens: Sequence[int]) -> bytes:
    return array(_TOKEN, tokens).tobytes()


def _common_suffix(left: bytes, right: bytes) -> bytes:
    """The longest common suffix, in whole tokens."""
    kept = min(len(left), len(right))
    while kept and left[-kept:] != right[-kept:]:
        kept -= _TOKEN_BYTES
    return left[-kept:] if kept else b""
