"""Tuples as bytes whose order is the order of the tuples.

The encoding is FoundationDB's tuple layer. Each element is a type code and
what follows it, and ends by itself, so a packed tuple is its packed elements
one after another:

    null       00                     inside a nested tuple, 00 ff
    bytes      01 … 00                a 00 among them is written 00 ff
    text       02 … 00                UTF-8, likewise
    nested     05 … 00                elements
    integer    0c … 13, 14, 15 … 1c   14 is zero; the distance is the number of bytes
               0b, 1d                 then that number, if it is above eight
    float      20, 21                 of 32 and of 64 bits, ordered as numbers
    bool       26, 27
    uuid       30                     sixteen bytes
    versionstamp  33                  twelve bytes

Negative integers and floats have their bits inverted, lengths included, so
that the smaller comes first. The distinctions are the encoding's: 1 and 1.0,
0.0 and -0.0, and any two NaNs of different bits are different elements.

`pack` and `unpack` go between Arrow columns and packed tuples in compiled
code; `pack_row` and `unpack_row` do the same for one tuple in plain Python,
know every type, and say what the others mean. Implementations differ on
±(2 ** 64 - 1): here it takes eight bytes, as in Go and Rust; the longer form
that FoundationDB's Python client writes is read as well, as is any integer
behind leading zeros.

The format: `design/tuple.md` in the sources of FoundationDB 7.
"""

from penstock.data.packed.elements import (
    Float32,
    PackedError,
    Versionstamp,
    pack_row,
    unpack_row,
)
from penstock.data.packed.hashing import key_hashes
from penstock.data.packed.packing import pack
from penstock.data.packed.unpacking import unpack, unpack_rows

__all__ = [
    "Float32",
    "PackedError",
    "Versionstamp",
    "key_hashes",
    "pack",
    "pack_row",
    "unpack",
    "unpack_row",
    "unpack_rows",
]
