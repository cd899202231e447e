"""How hot loops over bytes are compiled.

A compiled function does not hold the interpreter's lock, is kept on disk from one
run to the next, and checks no bounds: what it indexes, it has made sure of.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Int32s", "Int64s", "compiled"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]


def compiled(function: Callable[..., Any]) -> Any:
    """`function`, compiled when it is first called."""
    return numba.njit(nogil=True, cache=True, boundscheck=False)(function)
