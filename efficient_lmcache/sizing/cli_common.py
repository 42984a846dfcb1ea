"""What the sizing commands share: what a figure's path must be."""

from __future__ import annotations

from pathlib import Path

_FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


def check_figure(path: Path | None) -> None:
    """Raise, before anything is computed, for a figure that cannot be drawn.

    Raises:
        ValueError: the path has another suffix than a picture's, or no directory.
        ImportError: matplotlib is not installed; says how to install it.
    """
    if path is None:
        return
    if path.suffix not in _FIGURE_SUFFIXES:
        raise ValueError(f"--figure {path}: must end in {', '.join(_FIGURE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--figure {path}: there is no directory {path.parent}; make it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("--figure needs matplotlib: pip install 'efficient-lmcache[sizing]'") from error
