"""The key hash: the upper half of XXH64.

Reference: `doc/xxhash_spec.md` of xxHash 0.8. Most keys are shorter than 32 bytes and skip the
loop over stripes.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.data.jit import compiled
from penstock.data.packed.cells import packed_cells

__all__ = ["key_hashes"]

_1: Final = np.uint64(0x9E3779B185EBCA87)
_2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_3: Final = np.uint64(0x165667B19E3779F9)
_4: Final = np.uint64(0x85EBCA77C2B2AE63)
_5: Final = np.uint64(0x27D4EB2F165667C5)


def key_hashes(packed: pa.Array) -> npt.NDArray[np.uint32]:
    """Return the high 32 bits of XXH64 with seed 0 over the bytes of each row.

    Raises:
        PackedError: the column is not binary, or contains nulls.
    """
    cells = packed_cells(packed)
    hashes = np.empty(len(cells), np.uint32)
    _hash_rows(cells.data, cells.offsets, hashes)
    return hashes


@compiled
def _rotated(word, left):  # type: ignore[no-untyped-def]
    return (word << np.uint64(left)) | (word >> np.uint64(64 - left))


@compiled
def _word(data, at, size):  # type: ignore[no-untyped-def]
    """Return the next `size` bytes as a little-endian integer."""
    word = np.uint64(0)
    for k in range(size):
        word |= np.uint64(data[at + k]) << np.uint64(8 * k)
    return word


@compiled
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotated(lane + word * _2, 31) * _1


@compiled
def _merged(word, lane):  # type: ignore[no-untyped-def]
    return (word ^ _round(np.uint64(0), lane)) * _1 + _4


@compiled
def _hash_rows(data, offsets, hashes):  # type: ignore[no-untyped-def]
    for i in range(len(hashes)):
        at, end = offsets[i], offsets[i + 1]
        size = np.uint64(end - at)
        if end - at >= 32:
            a, b, c, d = _1 + _2, _2, np.uint64(0), np.uint64(0) - _1
            while end - at >= 32:
                a = _round(a, _word(data, at, 8))
                b = _round(b, _word(data, at + 8, 8))
                c = _round(c, _word(data, at + 16, 8))
                d = _round(d, _word(data, at + 24, 8))
                at += 32
            word = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
            word = _merged(_merged(_merged(_merged(word, a), b), c), d)
        else:
            word = _5
        word += size
        while end - at >= 8:
            word = _rotated(word ^ _round(np.uint64(0), _word(data, at, 8)), 27) * _1 + _4
            at += 8
        if end - at >= 4:
            word = _rotated(word ^ (_word(data, at, 4) * _1), 23) * _2 + _3
            at += 4
        while at < end:
            word = _rotated(word ^ (np.uint64(data[at]) * _5), 11) * _1
            at += 1
        word = (word ^ (word >> np.uint64(33))) * _2
        word = (word ^ (word >> np.uint64(29))) * _3
        hashes[i] = (word ^ (word >> np.uint64(32))) >> np.uint64(32)
