"""Which task does a prompt belong to, when its client does not say?

An agent resends its conversation, so a prompt that extends an earlier prompt belongs to that prompt's task. Two tasks
that merely share a system prompt do not: neither prompt contains the other. What is compared:

    prefix key      identifies all tokens up to a block boundary (vLLM's chained block hashes)
    anchor          the last boundary at least `MAX_SUFFIX_TOKENS` before an earlier prompt's end; its key is the index
    tail            that prompt's tokens after the anchor, compared one by one
    turn suffix     the tokens that end every prompt (a chat template's generation prompt); a template may drop or
                    replace them in the next turn, so an earlier prompt may miss them when it is extended
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MAX_SUFFIX_TOKENS = 16

_START = "start of prompt"
_Tokens = tuple[int, ...]


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
        # anchor -> tail length -> tail -> task
        self._tails: dict[Hashable, dict[int, dict[_Tokens, str]]] = {}
        self._oldest_first: dict[tuple[Hashable, _Tokens], None] = {}
        self._latest_end: Sequence[int] = ()
        self._tasks = 0

    def __len__(self) -> int:
        """Prompts remembered."""
        return len(self._oldest_first)

    def assign(self, prefix_keys: Sequence[Hashable], prompt_tokens: Sequence[int], salt: Hashable = None) -> str:
        """Return the task of a prompt and remember the prompt as part of it.

        Args:
            prefix_keys: key i identifies the first (i + 1) * block_tokens tokens (and the tenant, where the keys are
                salted); at least floor(n / block_tokens) of them, more are ignored.
            prompt_tokens: the prompt's n token ids.
            salt: the tenant, for prompts too short to have a salted key.

        Returns:
            A task name that no prompt of another conversation has.
        """
        task = self._extended_task(prefix_keys, prompt_tokens, salt) or self._new_task()
        self._latest_end = prompt_tokens[-MAX_SUFFIX_TOKENS:]
        blocks = max(0, len(prompt_tokens) - MAX_SUFFIX_TOKENS) // self._block_tokens
        anchor = prefix_keys[blocks - 1] if blocks else (_START, salt)
        self._remember(anchor, tuple(prompt_tokens[blocks * self._block_tokens :]), task)
        return task

    def _extended_task(
        self, prefix_keys: Sequence[Hashable], prompt_tokens: Sequence[int], salt: Hashable
    ) -> str | None:
        """The task of the longest earlier prompt that this one extends, among those at the longest known prefix."""
        tails_at, block_tokens = self._tails, self._block_tokens
        for blocks in range(len(prompt_tokens) // block_tokens, -1, -1):
            tails = tails_at.get(prefix_keys[blocks - 1] if blocks else (_START, salt))
            if tails is not None:
                start = blocks * block_tokens
                following = tuple(prompt_tokens[start : start + block_tokens + MAX_SUFFIX_TOKENS])
                task = self._matching_task(tails, following, prompt_tokens)
                if task is not None:
                    return task
        return None

    def _matching_task(
        self, tails: dict[int, dict[_Tokens, str]], following: _Tokens, prompt_tokens: Sequence[int]
    ) -> str | None:
        lengths = sorted(tails, reverse=True)
        for tail_tokens in lengths:
            task = tails[tail_tokens].get(following[:tail_tokens])
            if task is not None:
                return task
        turn_suffix = _common_suffix(tuple(prompt_tokens[-MAX_SUFFIX_TOKENS:]), tuple(self._latest_end))
        for tail_tokens in lengths:
            if 0 < len(turn_suffix) < tail_tokens:
                task = tails[tail_tokens].get(following[: tail_tokens - len(turn_suffix)] + turn_suffix)
                if task is not None:
                    return task
        return None

    def _remember(self, anchor: Hashable, tail: _Tokens, task: str) -> None:
        self._tails.setdefault(anchor, {}).setdefault(len(tail), {})[tail] = task
        # A dict keeps insertion order: the first key is the prompt seen longest ago.
        self._oldest_first.pop((anchor, tail), None)
        self._oldest_first[anchor, tail] = None
        if len(self._oldest_first) > self._max_prompts:
            oldest = next(iter(self._oldest_first))
            del self._oldest_first[oldest]
            self._forget(*oldest)

    def _forget(self, anchor: Hashable, tail: _Tokens) -> None:
        of_anchor = self._tails[anchor]
        of_length = of_anchor[len(tail)]
        del of_length[tail]
        if not of_length:
            del of_anchor[len(tail)]
        if not of_anchor:
            del self._tails[anchor]

    def _new_task(self) -> str:
        self._tasks += 1
        return f"inferred-{self._tasks}"


def _common_suffix(left: _Tokens, right: _Tokens) -> _Tokens:
    count = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        count += 1
    return left[len(left) - count :] if count else ()
