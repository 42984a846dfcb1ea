"""How far a command is, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(what: str, unit: str | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the block runs; none where stderr is not a terminal. Yields what takes (done, total).

    Args:
        unit: of what is counted; None where the numbers mean nothing to a person (bytes of a file).
    """
    console = Console(stderr=True)
    count = (MofNCompleteColumn(), TextColumn(unit)) if unit is not None else ()
    columns = (TextColumn(what), BarColumn(), *count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
