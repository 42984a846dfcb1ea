"""What a person sees while a replay runs: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from efficient_lmcache.replay.driver import Tally

_LINE_INTERVAL_S = 10.0


class ReplayProgress:
    """Shows a tally: calls done, tokens, exact outputs, errors and the time left."""

    def __init__(self, tally: Tally, total_calls: int, console: Console) -> None:
        self._tally = tally
        self._total_calls = total_calls
        self._console = console
        self._start_s = self._line_s = time.monotonic()
        columns = (
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar_task = self._bar.add_task("replay", total=total_calls, counts="")

    def __enter__(self) -> ReplayProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()
        self._print_line()

    def update(self) -> None:
        """Call after every change of the tally."""
        self._bar.update(self._bar_task, completed=self._done_calls, counts=self._counts())
        unfinished = self._done_calls < self._total_calls
        if unfinished and not self._console.is_terminal and time.monotonic() - self._line_s >= _LINE_INTERVAL_S:
            self._print_line()

    @property
    def _done_calls(self) -> int:
        return self._tally.answered + self._tally.failed + self._tally.skipped

    def _counts(self) -> str:
        tally = self._tally
        skipped = f", {tally.skipped} skipped" if tally.skipped else ""
        return f"{tally.prompt_tokens / 1e6:.2f} M prompt tokens, {tally.exact} exact, {tally.failed} errors{skipped}"

    def _print_line(self) -> None:
        self._line_s = time.monotonic()
        elapsed_s = self._line_s - self._start_s
        line = f"replay: {self._done_calls}/{self._total_calls} calls, {self._counts()}, {elapsed_s:.0f} s"
        left_calls = self._total_calls - self._done_calls
        if self._done_calls and left_calls:
            line += f", about {elapsed_s / self._done_calls * left_calls:.0f} s left"
        self._console.print(line, highlight=False, soft_wrap=True)
