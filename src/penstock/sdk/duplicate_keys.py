"""Each key once in a transaction, held to without keeping the keys.

Of each key 96 bits are kept, twelve bytes, and compared when the runtime has said all: in
a transaction of a hundred million keys the chance that two of them are taken for one is
below one in ten million million.
"""

import secrets
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.jit import compiled_when_large
from penstock.data.packed.cells import packed_cells
from penstock.protocol.errors import RemoteProtocolError
from penstock.sdk.bindings import Binding

__all__ = ["EachOnce", "Once"]

_8: Final = np.uint64(8)

_SEEDS: Final = tuple(np.uint64(secrets.randbits(64) | 1) for _ in range(4))
"""Odd, and of this process: who knew them could make keys that are taken for one."""


class EachOnce:
    """No key of a binding twice in what a transaction loads, or in what it stores."""

    def __init__(self, what: str, hint: str) -> None:
        self._what = what
        self._hint = hint
        self._keys: dict[int, tuple[Binding[Any], Once]] = {}

    def add(self, binding: Binding[Any], packed_keys: pa.BinaryArray) -> None:
        """Take note of keys."""
        self._keys.setdefault(binding.index, (binding, Once()))[1].add(packed_keys)

    def check(self) -> None:
        """Now that all were said, refuse one that came twice.

        Raises:
            RemoteProtocolError: so it is.
        """
        for binding, keys in self._keys.values():
            if twice := keys.twice():
                raise RemoteProtocolError(
                    f"a key of {binding} was {self._what} twice in one transaction",
                    detail="It is that of rows {} and {}, counted from zero.".format(*twice),
                    hint=self._hint,
                )


class Once:
    """The keys of one binding in one transaction."""

    def __init__(self) -> None:
        self._high: list[npt.NDArray[np.uint64]] = []
        self._low: list[npt.NDArray[np.uint32]] = []

    def add(self, packed: pa.BinaryArray) -> None:
        """Take note of keys."""
        cells = packed_cells(packed)
        self._high.append(np.empty(len(cells), np.uint64))
        self._low.append(np.empty(len(cells), np.uint32))
        _hash(cells.data, cells.offsets, self._high[-1], self._low[-1], *_SEEDS)

    def twice(self) -> tuple[int, int] | None:
        """Two that are the same, counted from zero as they came; none, if all are different."""
        high = np.concatenate(self._high)
        high.sort()
        same = high[1:][high[1:] == high[:-1]]
        if not len(same):
            return None
        seen: dict[tuple[int, int], int] = {}
        high = np.concatenate(self._high)
        low = np.concatenate(self._low)
        for row in np.flatnonzero(np.isin(high, same)).tolist():
            first = seen.setdefault((int(high[row]), int(low[row])), row)
            if first != row:
                return first, row
        return None


@compiled_when_large
def _mixed(word, by):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> np.uint64(32))) * by
    return word ^ (word >> np.uint64(29))


@compiled_when_large
def _hash(data, offsets, high, low, one, two, three, four):  # type: ignore[no-untyped-def]
    for i in range(len(high)):
        # Unsigned, for what could be negative would be looked at as counted from the end.
        at, end = np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        a, b = _mixed((end - at) ^ three, two), four
        while at < end:
            word, left = np.uint64(0), min(end - at, _8)
            if left == _8:
                for k in range(8):  # One load, once it is compiled.
                    word |= np.uint64(data[at + np.uint64(k)]) << np.uint64(8 * k)
            else:
                for k in range(left):
                    word |= np.uint64(data[at + np.uint64(k)]) << np.uint64(8 * k)
            a, b = _mixed(a ^ (word * one), two), _mixed(b + word, two) * one
            at += left
        high[i], low[i] = a, b >> np.uint64(32)
