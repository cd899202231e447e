"""How hot loops over bytes are compiled.

A compiled function does not hold the interpreter's lock, is kept on disk from one
run to the next, and checks no bounds: what it indexes, it has made sure of.

numba itself takes longer to import than all of ours, and many runs come to no such
loop, so it is imported for the first call of one. A process that is given little, as
connectors in tests are, need not wait for it at all: loops that mean the same to
Python, `compiled_when_large`, are left to Python until they have walked over so much
that compiled code would have been the cheaper.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Int32s", "Int64s", "compile_always", "compiled", "compiled_when_large"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]

PLAIN_ELEMENTS: Final = 1 << 18
"""So many elements of arrays are left to Python, in all calls together: a tenth of the time
that numba takes to import."""


def compiled(function: Callable[..., Any]) -> Any:
    """`function`, compiled when it is first called, by us or by another such function."""
    return _Compiled(function)


def compiled_when_large(function: Callable[..., Any]) -> Any:
    """The same for one that is also right as it stands, when numbers of numpy wrap around.

    Python keeps the type of an array's element: a byte plus one is a byte, where to numba
    it is an integer. A test must show that both come to the same.
    """
    return _CompiledWhenLarge(function)


_spent = 0


def compile_always() -> None:
    """Leave nothing to Python from now on: much will come."""
    global _spent
    _spent = PLAIN_ELEMENTS


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

    @functools.cached_property
    def plain(self) -> Callable[..., Any]:
        """As it stands, and so are those that it calls."""
        known = self._function.__globals__
        called = {
            name: known[name].plain
            for name in self._function.__code__.co_names
            if isinstance(known.get(name), _Compiled)
        }
        return types.FunctionType(self._function.__code__, {**known, **called})


class _CompiledWhenLarge(_Compiled):
    def __call__(self, *arguments: Any) -> Any:
        if not _numba.cache_info().currsize and _spend(_elements(arguments)):
            with np.errstate(over="ignore"):
                return self.plain(*arguments)
        return self.made(*arguments)


def _spend(elements: int) -> bool:
    """Whether so many more are left to Python."""
    global _spent
    _spent += elements
    return _spent <= PLAIN_ELEMENTS


def _elements(arguments: tuple[Any, ...]) -> int:
    return sum(
        _elements(each) if isinstance(each, tuple) else each.size
        for each in arguments
        if isinstance(each, tuple | np.ndarray)
    )


@functools.cache
def _numba() -> Any:
    import numba
    from numba.extending import typeof_impl

    @typeof_impl.register(_Compiled)
    def _typeof(value: _Compiled, context: Any) -> Any:
        # Where one calls another, numba shall see what it made of that.
        return typeof_impl(value.made, context)

    return numba
