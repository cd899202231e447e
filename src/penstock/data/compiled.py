"""How hot loops over bytes are compiled.

A compiled function does not hold the interpreter's lock, is kept on disk from one
run to the next, and checks no bounds: what it indexes, it has made sure of.

numba itself takes longer to import than all of ours, and many runs come to no such
loop, so it is imported for the first call of one.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Int32s", "Int64s", "compiled"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]


def compiled(function: Callable[..., Any]) -> Any:
    """`function`, compiled when it is first called, by us or by another such function."""
    return _Compiled(function)


class _Compiled:
    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.made(*arguments)

    @functools.cached_property
    def made(self) -> Any:
        """What numba makes of it."""
        options = {"nogil": True, "boundscheck": False}
        try:
            return _numba().njit(cache=True, **options)(self._function)
        except RuntimeError:
            # There is no folder for a cache that could be written.
            return _numba().njit(**options)(self._function)


@functools.cache
def _numba() -> Any:
    import numba
    from numba.extending import typeof_impl

    @typeof_impl.register(_Compiled)
    def _typeof(value: _Compiled, context: Any) -> Any:
        # Where one calls another, numba shall see what it made of that.
        return typeof_impl(value.made, context)

    return numba
