"""Compilation of kernels, the loops over bytes, by numba.

A compiled function releases the GIL, is cached on disk between runs, and does not check bounds:
its own code ensures that indexes are valid.

The import of numba takes longer than all imports of Penstock, and many processes never call a
kernel, so numba is imported at the first call of one. A process with little data, such as a
connector in a test, does not import numba at all: a kernel marked `compiled_when_large` runs in
Python until the process has passed so many elements that compiled code would have been faster.
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
"""Number of array elements, in all calls together, that run in Python. Python takes a tenth of
the import time of numba for them."""


def compiled(function: Callable[..., Any]) -> Any:
    """Return `function`, compiled at its first call."""
    return _Compiled(function)


def compiled_when_large(function: Callable[..., Any]) -> Any:
    """Return `function`, which runs in Python until the process has passed enough elements.

    `function` must give the same result in both. In Python an element keeps the numpy type of
    its array, so a byte plus one is a byte and may wrap around; in numba it is an integer. Each
    such kernel needs a test that compares both.
    """
    return _CompiledWhenLarge(function)


_elements_in_python = 0


def compile_always() -> None:
    """Run all later calls compiled, in a process that expects much data."""
    global _elements_in_python
    _elements_in_python = PLAIN_ELEMENTS


class _Compiled:
    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.jitted(*arguments)

    @functools.cached_property
    def jitted(self) -> Any:
        options = {"nogil": True, "boundscheck": False}
        try:
            return _numba().njit(cache=True, **options)(self._function)
        except RuntimeError:
            # numba found no writable folder for its cache.
            return _numba().njit(**options)(self._function)

    @functools.cached_property
    def plain(self) -> Callable[..., Any]:
        """Return the Python function, which calls other kernels in Python too."""
        module_globals = self._function.__globals__
        callees = {
            name: module_globals[name].plain
            for name in self._function.__code__.co_names
            if isinstance(module_globals.get(name), _Compiled)
        }
        return types.FunctionType(self._function.__code__, {**module_globals, **callees})


class _CompiledWhenLarge(_Compiled):
    def __call__(self, *arguments: Any) -> Any:
        if not _numba.cache_info().currsize and _spend(_elements(arguments)):
            with np.errstate(over="ignore"):
                return self.plain(*arguments)
        return self.jitted(*arguments)


def _spend(elements: int) -> bool:
    """Count elements, and return whether they still run in Python."""
    global _elements_in_python
    _elements_in_python += elements
    return _elements_in_python <= PLAIN_ELEMENTS


def _elements(arguments: tuple[Any, ...]) -> int:
    return sum(
        _elements(argument) if isinstance(argument, tuple) else argument.size
        for argument in arguments
        if isinstance(argument, tuple | np.ndarray)
    )


@functools.cache
def _numba() -> Any:
    import numba
    from numba.extending import typeof_impl

    @typeof_impl.register(_Compiled)
    def _typeof(value: _Compiled, context: Any) -> Any:
        # A kernel that calls another one calls its compiled form.
        return typeof_impl(value.jitted, context)

    return numba
