"""What the commands share: how errors end, and where they may write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

RUN_FAILED_STATUS = 1
USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130


def failure(message: object, status: int) -> typer.Exit:
    """To raise: the message is one line on stderr, the status the process's."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(status)


@contextmanager
def user_errors() -> Iterator[None]:
    """What a user can do wrong (a missing package, too much for the memory) ends as one line on stderr and exit code 2.

    A reader of stdout that has gone (`… | head`) is no error to tell anybody of.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, MemoryError) as error:
        raise failure(error, USER_ERROR_STATUS) from None


def check_output(out: Path, force: bool) -> None:
    """ValueError, before anything is computed, where no file can be written or one would be lost."""
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no directory {out.parent}; make it first")
    if out.is_dir():
        raise ValueError(f"--out {out}: is a directory; name a file")
    if out.exists() and not force:
        raise ValueError(f"{out}: exists already; name another file or pass --force")
