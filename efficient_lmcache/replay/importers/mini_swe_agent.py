"""Import of mini-swe-agent trajectories: one call for every assistant message.

The prompt of a call is the rendering of all messages before it, its output that of the assistant message.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from efficient_lmcache.replay.importers.rendering import Renderer
from efficient_lmcache.replay.importers.trajectory_files import Message, Trajectory, read_trajectories
from efficient_lmcache.replay.tokenizers import Tokenizer, load_tokenizer
from efficient_lmcache.replay.trace import Call, Manifest, Tokens, TraceError, TraceWriter

# Seen in 16,330 recorded calls: the time between two calls grows by 1 s for every 90 completion tokens of the first.
DECODE_TOKENS_PER_S = 90.0
ASSUMPTIONS = (
    "messages are rendered as ChatML; an output is the assistant's text, its tool calls and the end-of-turn marker",
    "hidden reasoning, tool schemas and calls that left no assistant message are not recorded, hence absent",
    "interval_s where messages have timestamps: from an assistant message to the last one before the next call",
    "interval_s elsewhere: `created` is taken as the dispatch, in whole seconds (its differences grow with the "
    f"preceding call's completion tokens), a call to last completion_tokens / {DECODE_TOKENS_PER_S:.0f} s, and what "
    "remains until the next `created`, at least 0, to be the agent's own time",
    "interval_s of a task's first call is 0",
)


def import_mini_swe_agent(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: str,
    tasks: int | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the trajectories of `source` as a trace; those without an assistant message are skipped and counted.

    Args:
        tokenizer: what `load_tokenizer` takes; a BPE learns from the chosen trajectories.
        tasks: how many trajectories, sampled by `seed` and kept in recorded order; all by default.
        vocab_size: fold token ids into this many (id modulo vocab_size) when the tokenizer has more. Equal text stays
            equal tokens, so that shared prefixes stay what they were.
        progress: called with (tasks written, tasks in all).

    Raises TraceError naming file, line and field of what is malformed, or the number there is when `tasks` exceeds it.
    """
    source = Path(source)
    if vocab_size is not None and vocab_size < 1:
        raise TraceError(f"--vocab is {vocab_size}; it must be at least 1")
    chosen, skipped, began_s = _choose(source, tasks, seed)

    def trajectories() -> Iterator[Trajectory]:
        with_calls = (each for each in read_trajectories(source) if each.calls)
        return (each for number, each in enumerate(with_calls) if number in chosen)

    encoder = load_tokenizer(tokenizer, lambda: (text for each in trajectories() for text in _texts(each)))
    folded = vocab_size is not None and vocab_size < encoder.vocab_size
    size = vocab_size if folded and vocab_size is not None else encoder.vocab_size
    step = {"step": "import", "tasks": len(chosen), "seed": seed, "skipped_without_calls": skipped}
    manifest = Manifest(
        vocab_size=size,
        tokenizer=encoder.name,
        source=f"mini-swe-agent: {source.resolve().name}",
        assumptions=ASSUMPTIONS + ((f"token ids are folded: id modulo {size}",) if folded else ()),
        history=(step,),
    )
    with TraceWriter(out, manifest) as writer:
        for done, trajectory in enumerate(trajectories(), start=1):
            writer.write_task(trajectory.task_id, trajectory_calls(trajectory, encoder, size, began_s))
            if progress is not None:
                progress(done, len(chosen))


def _choose(source: Path, tasks: int | None, seed: int) -> tuple[set[int], int, float]:
    """Which of the trajectories with calls, how many have none, and when the first call was made (s since 1970)."""
    ids: set[str] = set()
    skipped, began_s = 0, float("inf")
    for trajectory in read_trajectories(source):
        if not trajectory.calls:
            skipped += 1
            continue
        if trajectory.task_id in ids:
            raise TraceError(f"{trajectory.where}: instance_id {trajectory.task_id!r} occurs twice; it must be unique")
        ids.add(trajectory.task_id)
        began_s = min([began_s, *(m.created_s for m in trajectory.messages if m.created_s is not None)])
    if not ids:
        raise TraceError(f"{source}: no trajectory has an assistant message, hence there is no call to import")
    count = len(ids) if tasks is None else tasks
    if not 1 <= count <= len(ids):
        raise TraceError(f"{source}: cannot take {tasks} tasks; it has {len(ids)} trajectories with calls")
    return set(random.Random(seed).sample(range(len(ids)), count)), skipped, began_s


def _texts(trajectory: Trajectory) -> Iterator[str]:
    for message in trajectory.messages:
        yield message.text


def trajectory_calls(
    trajectory: Trajectory, tokenizer: Tokenizer, vocab_size: int, began_s: float, *, needs_intervals: bool = True
) -> Iterator[Call]:
    """The calls of a trajectory, token ids folded into `vocab_size`, start_s counted from `began_s`.

    Raises TraceError where the messages do not tell the time between two calls; without `needs_intervals`, that time
    is nan.
    """
    renderer = Renderer(tokenizer, vocab_size)
    renderer.learn((message.role, message.text) for message in trajectory.messages)
    history: list[Tokens] = []
    previous: int | None = None
    for number, message in enumerate(trajectory.messages):
        history.append(renderer.before(message.role))
        output = renderer.said(message.text)
        if message.role == "assistant":
            if number == 0:
                raise TraceError(f"{trajectory.where}: messages[0] is the assistant's; a call needs a prompt before it")
            interval_s = 0.0 if previous is None else _interval_s(trajectory, previous, number)
            if interval_s is None and needs_intervals:
                raise TraceError(
                    f"{trajectory.where}: messages[{previous}] and messages[{number}] need timestamps, or "
                    "extra.response with created and usage.completion_tokens, to tell the time between the two calls"
                )
            start_s = None if message.created_s is None else message.created_s - began_s
            yield Call(np.concatenate(history), output, math.nan if interval_s is None else interval_s, start_s)
            previous = number
        history += [output, renderer.after()]


def _interval_s(trajectory: Trajectory, previous: int, number: int) -> float | None:
    """The agent's own time before call `number`, by the rules that the manifest states; None if none applies."""
    before, now = trajectory.messages[previous], trajectory.messages[number]
    observed: Message = trajectory.messages[number - 1]
    if before.timestamp_s is not None and observed.timestamp_s is not None:
        return max(0.0, observed.timestamp_s - before.timestamp_s)
    if before.created_s is None or now.created_s is None or before.completion_tokens is None:
        return None
    return max(0.0, now.created_s - before.created_s - before.completion_tokens / DECODE_TOKENS_PER_S)
