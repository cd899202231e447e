"""Check that a transaction contains each key once, without storing the keys.

The check stores a hash of 96 bits for each key and compares the hashes at the end of the phase.
With 10⁸ keys in a transaction, the probability of a false duplicate is below 10⁻¹³.
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

__all__ = ["DuplicateKeyCheck", "KeyHashes"]

_8: Final = np.uint64(8)

_SEEDS: Final = tuple(np.uint64(secrets.randbits(64) | 1) for _ in range(4))
"""Random odd factors, private to this process: who knows them can construct collisions."""


class DuplicateKeyCheck:
    """Rejects a key that one transaction loads, or stores, twice."""

    def __init__(self, verb: str, hint: str) -> None:
        self._verb = verb
        self._hint = hint
        self._keys: dict[int, tuple[Binding[Any], KeyHashes]] = {}

    def add(self, binding: Binding[Any], packed_keys: pa.BinaryArray) -> None:
        """Record keys."""
        self._keys.setdefault(binding.index, (binding, KeyHashes()))[1].add(packed_keys)

    def check(self) -> None:
        """Check the recorded keys.

        Raises:
            RemoteProtocolError: a key was recorded twice.
        """
        for binding, keys in self._keys.values():
            if rows := keys.find_duplicate():
                raise RemoteProtocolError(
                    f"a key of {binding} was {self._verb} twice in one transaction",
                    detail="Rows {} and {}, counted from zero, have the same key.".format(*rows),
                    hint=self._hint,
                )


class KeyHashes:
    """Hashes of the keys of one binding in one transaction."""

    def __init__(self) -> None:
        self._high: list[npt.NDArray[np.uint64]] = []
        self._low: list[npt.NDArray[np.uint32]] = []

    def add(self, packed: pa.BinaryArray) -> None:
        """Record keys."""
        cells = packed_cells(packed)
        self._high.append(np.empty(len(cells), np.uint64))
        self._low.append(np.empty(len(cells), np.uint32))
        _hash(cells.data, cells.offsets, self._high[-1], self._low[-1], *_SEEDS)

    def find_duplicate(self) -> tuple[int, int] | None:
        """Return the numbers of two rows with the same key; None if all keys differ."""
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
def _mix(word, factor):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> np.uint64(32))) * factor
    return word ^ (word >> np.uint64(29))


@compiled_when_large
def _hash(data, offsets, high, low, one, two, three, four):  # type: ignore[no-untyped-def]
    for i in range(len(high)):
        # Unsigned, because compiled code checks signed indexes for wraparound.
        at, end = np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        a, b = _mix((end - at) ^ three, two), four
        while at < end:
            word, left = np.uint64(0), min(end - at, _8)
            if left == _8:
                for k in range(8):  # The compiler turns this loop into one load.
                    word |= np.uint64(data[at + np.uint64(k)]) << np.uint64(8 * k)
            else:
                for k in range(left):
                    word |= np.uint64(data[at + np.uint64(k)]) << np.uint64(8 * k)
            a, b = _mix(a ^ (word * one), two), _mix(b + word, two) * one
            at += left
        high[i], low[i] = a, b >> np.uint64(32)
