"""Which task does a prompt belong to, when its client does not say?

An agent resends its conversation, so a prompt that extends an earlier prompt belongs to that prompt's task. Two tasks
that merely share a system prompt do not: neither prompt contains the other.

A prompt may also start from an earlier one that the task has left behind. If only one such line goes on, an agent has
rewritten its history, and the task stays one. If an abandoned line is taken up again, several agents started from the
same prompt (a warmed-up system prompt, several attempts at one problem); each line is then a task of its own.

What is compared:

    prefix key      identifies all tokens up to a block boundary (vLLM's chained block hashes)
    anchor          the last boundary at least `MAX_SUFFIX_TOKENS` before an earlier prompt's end; its key is the index
    tail            that prompt's tokens after the anchor, remembered and compared by their 64-bit hash
    turn suffix     the tokens that end every prompt (a chat template's generation prompt); a template may drop or
                    replace them in the next turn, so an earlier prompt may miss them when it is extended
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MAX_SUFFIX_TOKENS = 16

_START = "start of prompt"


class _Task:
    __slots__ = ("latest", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest: _Prompt | None = None


class _Prompt:
    __slots__ = ("extended", "task")

    def __init__(self, task: _Task) -> None:
        self.task = task
        self.extended = False


class TaskInference:
    """Assigns every prompt to the task it extends, or to a new one. Memory: the latest `max_prompts` prompts' tails.

    An assignment costs one dictionary probe per block that the prompt adds, and a comparison with the tails of the one
    anchor that is found; tokens before that anchor are never read.
    """

    def __init__(self, block_tokens: int, max_prompts: int = 8192) -> None:
        if block_tokens < 1 or max_prompts < 1:
            raise ValueError(f"block_tokens={block_tokens} and max_prompts={max_prompts} must be at least 1")
        self._block_tokens = block_tokens
        self._max_prompts = max_prompts
        # By (anchor, tail length, tail hash), oldest first: a dict keeps insertion order.
        self._prompts: dict[tuple[Hashable, int, int], _Prompt] = {}
        # Of each anchor: tail length in tokens -> how many of its prompts have such a tail.
        self._tail_tokens: dict[Hashable, dict[int, int]] = {}
        self._latest_tail: tuple[int, ...] = ()
        self._tasks = 0

    def __len__(self) -> int:
        """Prompts remembered."""
        return len(self._prompts)

    def assign(self, prefix_keys: Sequence[Hashable], prompt_tokens: Sequence[int], salt: Hashable = None) -> str:
        """Return the task of a prompt and remember the prompt as part of it.

        Args:
            prefix_keys: key i identifies the first (i + 1) * block_tokens tokens (and the tenant, where the keys are
                salted). Where keys are missing, prompts are compared only up to the last one.
            prompt_tokens: the prompt's n token ids. A prompt of at most `MAX_SUFFIX_TOKENS` says too little to
                recognise anyone by and is not remembered.
            salt: the tenant, for prompts too short to have a salted key.

        Returns:
            A task name that no prompt of another conversation has.
        """
        block_tokens, length = self._block_tokens, len(prompt_tokens)
        blocks = min(len(prefix_keys), length // block_tokens)
        extended = None
        anchors = self._tail_tokens
        for known in range(blocks, -1, -1):
            anchor = prefix_keys[known - 1] if known else (_START, salt)
            if anchor in anchors:
                extended = self._extended_prompt(anchor, prompt_tokens, known * block_tokens)
                if extended is not None:
                    break
        # An earlier prompt that its task has left behind, and that nothing has extended: a line taken up again.
        if extended is None or (not extended.extended and extended is not extended.task.latest):
            self._tasks += 1
            task = _Task(f"inferred-{self._tasks}")
        else:
            task = extended.task
        if length > MAX_SUFFIX_TOKENS:
            if blocks * block_tokens > length - MAX_SUFFIX_TOKENS:
                blocks = (length - MAX_SUFFIX_TOKENS) // block_tokens
            tail = tuple(prompt_tokens[blocks * block_tokens :])
            prompt = self._remember(prefix_keys[blocks - 1] if blocks else (_START, salt), tail, task)
            self._latest_tail = tail
            task.latest = prompt
            if extended is not None and extended is not prompt:
                extended.extended = True
        return task.name

    def _extended_prompt(self, anchor: Hashable, prompt_tokens: Sequence[int], start: int) -> _Prompt | None:
        """The longest earlier prompt at this anchor, at token `start`, that the prompt extends."""
        prompts, tail_tokens = self._prompts, self._tail_tokens[anchor]
        longest = max(tail_tokens)
        candidate = tuple(prompt_tokens[start : start + longest])
        prompt = prompts.get((anchor, longest, hash(candidate)))
        if prompt is not None:
            return prompt
        lengths = sorted(tail_tokens, reverse=True)
        for length in lengths:
            prompt = prompts.get((anchor, length, hash(candidate[:length])))
            if prompt is not None:
                return prompt
        turn_suffix = _common_suffix(tuple(prompt_tokens[-MAX_SUFFIX_TOKENS:]), self._latest_tail)
        for length in lengths:
            kept = length - len(turn_suffix)
            if turn_suffix and 0 < kept <= len(candidate):
                prompt = prompts.get((anchor, length, hash(candidate[:kept] + turn_suffix)))
                if prompt is not None:
                    return prompt
        return None

    def _remember(self, anchor: Hashable, tail: tuple[int, ...], task: _Task) -> _Prompt:
        length = len(tail)
        place = (anchor, length, hash(tail))
        prompt = self._prompts.pop(place, None)
        if prompt is None:
            prompt = _Prompt(task)
            tail_tokens = self._tail_tokens.setdefault(anchor, {})
            tail_tokens[length] = tail_tokens.get(length, 0) + 1
        prompt.task = task
        self._prompts[place] = prompt
        if len(self._prompts) > self._max_prompts:
            self._forget(next(iter(self._prompts)))
        return prompt

    def _forget(self, place: tuple[Hashable, int, int]) -> None:
        anchor, length, _ = place
        del self._prompts[place]
        tail_tokens = self._tail_tokens[anchor]
        tail_tokens[length] -= 1
        if not tail_tokens[length]:
            del tail_tokens[length]
        if not tail_tokens:
            del self._tail_tokens[anchor]


def _common_suffix(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    kept = min(len(left), len(right))
    while kept and left[-kept:] != right[-kept:]:
        kept -= 1
    return left[-kept:] if kept else ()
