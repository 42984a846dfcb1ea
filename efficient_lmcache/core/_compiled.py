"""numba's compiler for the kernels of this package: imported only where they are, because it is an extra."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from efficient_lmcache.core.references import Ints

try:
    import numba
except ImportError as error:
    raise ImportError("stack distances and simulations need numba: pip install 'efficient-lmcache[sizing]'") from error

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The function in machine code, kept on disk between processes.

    A kernel calls compiled functions of its own file only: the copy on disk is renewed when that file changes.
    """
    kernel: Function = numba.njit(cache=True, nogil=True)(function)
    return kernel


def compiled_in_place(function: Function) -> Function:
    """As `compiled`, for a kernel that allocates nothing: no references to its arrays are counted.

    Counting them, atomically, takes longer than the work of a function that is called often with many arrays.
    """
    kernel: Function = numba.njit(cache=True, nogil=True, **_IN_PLACE)(function)
    return kernel


def compiled_part(function: Function) -> Function:
    """What kernels in place call and Python does not: compiled and kept on disk with them only."""
    part: Function = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_IN_PLACE)(function)
    return part


_IN_PLACE = {"_nrt": False, "error_model": "numpy"}


def enlarged(table: Ints, rows: int) -> Ints:
    """The table itself if it has so many rows, or a copy with at least twice its rows, of which the new ones are 0."""
    if rows <= len(table):
        return table
    copy = np.zeros((max(rows, 2 * len(table)), *table.shape[1:]), np.int64)
    copy[: len(table)] = table
    return copy
