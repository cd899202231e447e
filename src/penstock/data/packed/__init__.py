"""Packed tuples: tuples encoded as bytes, in the order of the tuples.

The encoding is FoundationDB's tuple layer. Each element is a type code and its data, and is
self-delimiting. A packed tuple is the concatenation of its packed elements:

    null       00                     inside a nested tuple, 00 ff
    bytes      01 … 00                a 00 in the data is written 00 ff
    text       02 … 00                UTF-8, likewise
    nested     05 … 00                elements
    integer    0c … 13, 14, 15 … 1c   14 is zero; the distance to 14 is the number of bytes
               0b, 1d                 followed by the number of bytes, if above eight
    float      20, 21                 of 32 and of 64 bits, ordered as numbers
    bool       26, 27
    uuid       30                     sixteen bytes
    versionstamp  33                  twelve bytes

Negative integers and floats have inverted bits, lengths included, which puts the smaller number
first. These are different elements: 1 and 1.0, 0.0 and -0.0, two NaNs with different bits.

`pack` and `unpack` convert Arrow columns in compiled code. `pack_row` and `unpack_row` convert one
tuple in Python, support every type, and define the meaning of the compiled code.
Implementations differ on ±(2 ** 64 - 1): Penstock writes eight bytes, as Go and Rust do. It also
reads the longer form of FoundationDB's Python client, and integers with leading zeros.

Reference: `design/tuple.md` in the sources of FoundationDB 7.
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
