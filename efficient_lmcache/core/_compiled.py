"""numba's compiler for the kernels of this package: imported only where they are, because it is an extra."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from efficient_lmcache.core.references import Ints

try:
    import numba
except ImportError as error:
    raise ImportError("stack distances need numba: pip install 'efficient-lmcache[sizing]'") from error

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The function in machine code, kept on disk between processes.

    A kernel calls compiled functions of its own file only: the copy on disk is renewed when that file changes.
    """
    kernel: Function = numba.njit(cache=True, nogil=True)(function)
    return kernel


def enlarged(array: Ints, length: int, fill: int = 0) -> Ints:
    """The array itself if it is long enough, or a copy of at least twice its length; new entries are `fill`."""
    if length <= len(array):
        return array
    copy = np.full(max(length, 2 * len(array)), fill, np.int64)
    copy[: len(array)] = array
    return copy
