"""Which task a call belongs to: what its client says, else the task whose conversation it extends."""

from __future__ import annotations

from efficient_lmcache.core.tasks import TaskInference
from efficient_lmcache.replay.trace import Tokens

BLOCK_TOKENS = 128
LABELLED = "label:"
INFERRED = "inferred:"


class InferredTasks:
    """`core.tasks.TaskInference`, the connector's own, under names that continue a journal's."""

    def __init__(self) -> None:
        self._inference = TaskInference(BLOCK_TOKENS)
        self._names: dict[str, str] = {}
        self._count = 0

    def assign(self, prompt: Tokens, salt: str | None) -> str:
        """The task of a prompt (uint32 [n]), which is remembered as part of it."""
        name = self._infer(prompt, salt)
        if name not in self._names:
            self._names[name] = f"{INFERRED}{self._count + 1}"
            self._count += 1
        return self._names[name]

    def recall(self, task: str, prompt: Tokens) -> None:
        """A journal's call belongs to `task`; prompts go on from it."""
        self._count = max(self._count, int(task.removeprefix(INFERRED)))
        self._names.setdefault(self._infer(prompt, None), task)

    def _infer(self, prompt: Tokens, salt: str | None) -> str:
        keys: list[int] = []
        key = hash(salt)
        block_bytes = BLOCK_TOKENS * prompt.itemsize
        data = prompt.tobytes()
        for start in range(0, len(data) - block_bytes + 1, block_bytes):
            key = hash((key, data[start : start + block_bytes]))
            keys.append(key)
        return self._inference.assign(keys, prompt.data, salt)


def display_name(task: str) -> str:
    """The name of a journal's task in a trace."""
    if task.startswith(LABELLED):
        return task.removeprefix(LABELLED)
    return f"inferred-{task.removeprefix(INFERRED)}"
