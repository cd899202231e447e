"""Packed tuples: encoding, order, hashes, and rejection of malformed bytes."""

import json
import math
import struct
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.data.packed import (
    Float32,
    PackedError,
    Versionstamp,
    key_hashes,
    pack,
    pack_row,
    unpack,
    unpack_row,
    unpack_rows,
)
from penstock.data.packed import cells as cells_module
from penstock.data.packed import unpacking as unpacking_module

VECTORS = Path(__file__).parents[1] / "vectors"
FLOW = json.loads((VECTORS / "flow.json").read_text())["cases"]
TUPLES = json.loads((VECTORS / "tuples.json").read_text())["cases"]
BIG = pa.decimal128(38, 0)
EDGES = [
    sign * (1 << 8 * size) + step for size in range(17) for sign in (1, -1) for step in (-1, 0, 1)
]


def double(bits):
    return struct.unpack(">d", struct.pack(">Q", bits))[0]


def float32(bits):
    """Return the float with these 32 bits, which may be a signalling NaN."""
    ordered = bits ^ (0xFFFF_FFFF if bits >> 31 else 0x8000_0000)
    return unpack_row(bytes([0x20]) + ordered.to_bytes(4))[0]


def integers(least, most):
    edges = sorted({edge for edge in EDGES if least <= edge <= most} | {least, most})
    return st.sampled_from(edges) | st.integers(least, most)


DOUBLES = st.floats().map(lambda f: struct.unpack(">Q", struct.pack(">d", f))[0]) | st.integers(
    0, 2**64 - 1
)
FLOATS = st.integers(0, 2**32 - 1) | st.sampled_from(
    [0, 1 << 31, 0x7F80_0001, 0xFFC0_0001, 0x7F80_0000, 0xFF80_0000, 0x3F80_0000]
)
TEXT = st.text(st.sampled_from("\0\1aé\uffff😀"), max_size=4) | st.text(max_size=40)
BYTES = st.lists(st.sampled_from([0, 1, 0xFE, 0xFF]), max_size=4).map(bytes) | st.binary(
    max_size=40
)

# Test values of each column type: floats are given as their bits.
HELD = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.float32(): FLOATS,
    pa.float64(): DOUBLES,
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.binary(): BYTES,
    pa.large_binary(): BYTES,
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.binary(16): st.binary(min_size=16, max_size=16),
    pa.uuid(): st.binary(min_size=16, max_size=16),
    BIG: integers(1 - 10**38, 10**38 - 1),
    pa.decimal128(5, 0): integers(-99999, 99999),
    **{
        kind: integers(int(np.iinfo(str(kind)).min), int(np.iinfo(str(kind)).max))
        for kind in (
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
            *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        )
    },
}


def column(kind, held):
    """Return an Arrow column of test values."""
    if pa.types.is_floating(kind):
        wide = kind == pa.float64()
        bits = np.array([h or 0 for h in held], np.uint64 if wide else np.uint32)
        nulls = np.array([h is None for h in held], np.bool_)
        return pa.array(bits.view(np.float64 if wide else np.float32), kind, mask=nulls)
    if kind == pa.uuid():
        return pa.ExtensionArray.from_storage(kind, pa.array(held, pa.binary(16)))
    return pa.array(held, kind)


def packable(kind, held):
    """Return a test value as `pack_row` accepts it."""
    if held is None:
        return None
    if kind == pa.float64():
        return double(held)
    if kind == pa.float32():
        return float32(held)
    return UUID(bytes=held) if kind == pa.uuid() else held


def same(column, other):
    """Return whether two columns have the same bits, NaNs included."""
    if pa.types.is_floating(column.type):
        bits = pa.int64() if column.type == pa.float64() else pa.int32()
        return other.type == column.type and column.view(bits).equals(other.view(bits))
    return other.type == column.type and column.equals(other)


@st.composite
def tables(pick, *, least_rows=0):
    """Generate types, columns of them and their rows, possibly as slices of longer columns."""
    kinds = pick(st.lists(st.sampled_from(list(HELD)), min_size=1, max_size=4))
    before, after = pick(st.integers(0, 9)), pick(st.integers(0, 2))
    count = pick(st.integers(least_rows, 4))
    cells = [
        pick(st.lists(st.none() | HELD[kind], min_size=count, max_size=count)) for kind in kinds
    ]
    columns = [
        column(kind, [pick(HELD[kind])] * before + held + [None] * after).slice(before, count)
        for kind, held in zip(kinds, cells, strict=True)
    ]
    rows = [
        tuple(packable(k, h) for k, h in zip(kinds, r, strict=True))
        for r in zip(*cells, strict=True)
    ]
    return kinds, columns, rows


ELEMENTS = st.one_of(
    st.none(),
    st.booleans(),
    integers(-(2**200), 2**200),
    DOUBLES.map(double),
    FLOATS.map(float32),
    TEXT,
    BYTES,
    st.uuids(),
    st.builds(Versionstamp, st.binary(min_size=10, max_size=10), st.integers(0, 2**16 - 1)),
)
VALUES = st.recursive(ELEMENTS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
ROWS = st.lists(VALUES, max_size=4).map(tuple)


def logical(value):
    """Return a sort key for packable values, derived from their meaning."""
    match value:
        case None:
            return (0x00,)
        case bytes():
            return 0x01, value
        case str():
            return 0x02, value.encode()
        case tuple():
            return 0x05, tuple(map(logical, value))
        case bool():
            return 0x26, value
        case int():
            return 0x14, value
        case Float32():
            return 0x20, number(value.value)
        case float():
            return 0x21, number(value)
        case UUID():
            return 0x30, value.int
        case Versionstamp():
            return 0x33, value.transaction, value.user
        case _:
            raise AssertionError(value)


def number(value):
    """Return a sort key for numbers: between the NaNs of either sign, -0.0 before 0.0."""
    sign = int(math.copysign(1, value))
    if math.isnan(value):
        return 2 * sign, sign * (struct.unpack(">Q", struct.pack(">d", value))[0] & (1 << 52) - 1)
    return sign, value


# --- the laws -----------------------------------------------------------------


@given(tables())
def test_pack_equals_pack_row(table):
    _, columns, rows = table
    packed = pack(columns)
    packed.validate(full=True)
    assert packed.type == pa.binary()
    assert packed.to_pylist() == [pack_row(row) for row in rows]


@given(tables())
def test_unpack_reverses_pack(table):
    kinds, columns, rows = table
    packed = pack(columns)
    found = unpack(packed, kinds)
    for each, was in zip(found, columns, strict=True):
        each.validate(full=True)
        assert same(was, each)
    assert list(map(logical, unpack_rows(packed))) == list(map(logical, rows))


@pytest.mark.parametrize("kind", HELD, ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_pack_and_unpack_of_each_type_equal_rows(kind, data):
    held = data.draw(st.lists(st.none() | HELD[kind], min_size=4, max_size=12))
    was = column(kind, held)
    packed = pack([was])
    assert packed.to_pylist() == [pack_row([packable(kind, each)]) for each in held]
    (unpacked,) = unpack(packed, [kind])
    assert same(was, unpacked)


@given(ROWS)
def test_unpack_row_reverses_pack_row(row):
    found = unpack_row(pack_row(row))
    assert logical(found) == logical(row)
    assert pack_row(list(found)) == pack_row(row)


@given(ROWS, ROWS)
@example((None, 1), ((None,), 1))
@example(("a",), ("a\0",))
@example(((), 0), ((None,), 0))
@example((-0.0,), (0.0,))
def test_packed_bytes_have_order_of_tuples(one, other):
    assert (pack_row(one) < pack_row(other)) == (logical(one) < logical(other))
    assert (pack_row(one) == pack_row(other)) == (logical(one) == logical(other))


@given(st.data())
def test_packed_tuples_with_common_prefix_keep_order(data):
    start = data.draw(ROWS)
    one, other = start + data.draw(ROWS), start + data.draw(ROWS)
    assert (pack_row(one) < pack_row(other)) == (logical(one) < logical(other))


@given(st.lists(st.binary(max_size=100), max_size=5), st.integers(0, 3))
@example([bytes(range(size)) for size in range(101)], 1)
def test_key_hashes_are_upper_half_of_xxh64(keys, skipped):
    for kind in (pa.binary(), pa.large_binary()):
        hashes = key_hashes(pa.array([b"other"] * skipped + keys, kind).slice(skipped))
        assert hashes.dtype == np.uint32
        assert hashes.tolist() == [xxhash.xxh64_intdigest(key, 0) >> 32 for key in keys]


# --- malformed bytes -------------------------------------------------------------


REFUSED = "refused"


def expected(data, kinds):
    """Return the elements as column values, or None if the column must reject them."""
    try:
        values = unpack_row(data)
    except PackedError:
        return None
    if len(values) != len(kinds):
        return None
    found = [taken(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return None if REFUSED in found else found


def taken(value, kind):
    if value is None:
        return None
    if pa.types.is_boolean(kind):
        fits = isinstance(value, bool)
    elif isinstance(value, bool):
        fits = False
    elif pa.types.is_float64(kind) and isinstance(value, int):
        try:
            return logical(float(value)) if int(float(value)) == value else REFUSED
        except OverflowError:
            return REFUSED
    elif pa.types.is_floating(kind):
        fits = isinstance(value, float if kind == pa.float64() else Float32)
    elif pa.types.is_decimal(kind):
        fits = isinstance(value, int) and abs(value) < 10**kind.precision
    elif pa.types.is_integer(kind):
        limits = np.iinfo(str(kind))
        fits = isinstance(value, int) and limits.min <= value <= limits.max
    elif kind == pa.uuid():
        fits = isinstance(value, UUID)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        fits = isinstance(value, str)
    elif pa.types.is_fixed_size_binary(kind):
        fits = isinstance(value, bytes) and len(value) == kind.byte_width
    else:
        fits = not pa.types.is_null(kind) and isinstance(value, bytes)
    return logical(value) if fits else REFUSED


def unpacked_or_none(packed, kinds):
    try:
        columns = unpack(packed, kinds)
    except PackedError:
        return None
    (row,) = unpack_rows(pack(columns)) if columns else [()]
    return [None if value is None else logical(value) for value in row]


@st.composite
def damaged(pick):
    """Generate types, a damaged tuple of about these types, and the bytes after it."""
    kinds, columns, _ = pick(tables(least_rows=1))
    data = bytearray(pack(columns)[0].as_py())
    codes = st.sampled_from([0, 1, 2, 5, *range(0x0B, 0x1E), 0x20, 0x21, 0x26, 0x27, 0x30, 0xFF])
    for _ in range(pick(st.integers(0, 2))):
        at, replaced = pick(st.integers(0, len(data))), pick(st.integers(0, 1))
        data[at : at + replaced] = pick(st.lists(codes | st.integers(0, 255), max_size=2))
    cut = pick(st.just(len(data)) | st.integers(0, len(data)))
    return kinds, bytes(data[:cut]), pick(st.just(bytes(data[cut:])) | st.just(bytes([0xFF] * 300)))


@given(damaged())
def test_unpack_of_damaged_tuple_equals_python_reader(case):
    # The bytes after the cut follow in memory, where a read beyond the row would find them.
    kinds, data, behind = case
    packed = pa.array([data, behind], pa.binary()).slice(0, 1)
    assert unpacked_or_none(packed, kinds) == expected(data, kinds)


@given(st.lists(st.sampled_from(list(HELD)), max_size=2), st.binary(max_size=24))
def test_unpack_of_arbitrary_bytes_equals_python_reader(kinds, data):
    packed = pa.array([data, bytes(300)], pa.large_binary()).slice(0, 1)
    assert unpacked_or_none(packed, kinds) == expected(data, kinds)


# Every beginning of a tuple of every kind, right before memory that cannot be read.
AT_THE_EDGE = """
import ctypes, mmap
import pyarrow as pa
from penstock.data.packed import PackedError, key_hashes, pack_row, unpack
from tests.data.test_packed import HELD, SAMPLES

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
if libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0):
    raise OSError(ctypes.get_errno(), "mprotect")
refused = 0
for data in {pack_row([value])[:cut] for value in SAMPLES for cut in range(1, 40)}:
    memory[page - len(data) : page] = data
    bounds = pa.array([0, len(data)], pa.int32()).buffers()[1]
    held = pa.foreign_buffer(start + page - len(data), len(data), memory)
    packed = pa.Array.from_buffers(pa.binary(), 1, [None, bounds, held])
    key_hashes(packed)
    for kind in HELD:
        try:
            unpack(packed, [kind])
        except PackedError:
            refused += 1
print(refused)
"""
SAMPLES = [
    None,
    True,
    7,
    -7,
    2**63,
    2**100,
    -(2**100),
    1.5,
    Float32(1.5),
    "a\0b",
    b"\0" * 9,
    UUID(int=5),
]


def test_unpack_reads_no_byte_beyond_row():
    ran = subprocess.run(
        [sys.executable, "-c", AT_THE_EDGE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 1000  # Most types reject most prefixes.


@given(integers(-(2**1100), 2**1100) | st.floats(allow_nan=False, allow_infinity=False).map(int))
@example(2**53 + 1)
@example(2**64)
@example(2**1023)
@example(2**1024)
@example(0)
def test_unpack_of_integer_as_float64_requires_exact_value(value):
    packed = pa.array([pack_row([value])])
    try:
        exact = int(float(value)) == value
    except OverflowError:
        exact = False
    if exact:
        assert unpack(packed, [pa.float64()])[0].to_pylist() == [float(value)]
    else:
        with pytest.raises(PackedError, match="is an integer, which double cannot hold"):
            unpack(packed, [pa.float64()])


WRONG = [
    ("1501", [], "the packed tuple in row 1 has 1 elements, not 0"),
    ("1501", [pa.int8(), pa.int8()], "the packed tuple in row 1 has 1 elements, not 2"),
    ("15011501", [pa.int8()], "the packed tuple in row 1 has 2 elements, not 1"),
    ("1501ff", [pa.int8()], "element 1 of the packed tuple in row 1 is malformed"),
    (
        "1580",
        [pa.int8()],
        "element 0 of the packed tuple in row 1 is an integer, which int8",
    ),
    ("13fe", [pa.uint64()], "is an integer, which uint64 cannot hold"),
    ("1d11" + "01" * 17, [BIG], r"is an integer, which decimal128\(38, 0\) cannot hold"),
    ("1d104b3b4ca85a86c47a098a224000000000", [BIG], "is an integer, which decimal128"),
    ("1501", [pa.string()], "is an integer, which string cannot hold"),
    ("026100", [pa.binary()], "is text, which binary cannot hold"),
    ("016100", [pa.string()], "is bytes, which string cannot hold"),
    ("016100", [pa.binary(3)], r"is bytes, which fixed_size_binary\[3\] cannot hold"),
    ("27", [pa.int8()], "is a bool, which int8 cannot hold"),
    ("15010527", [pa.int8(), pa.int8()], "element 1 of the packed tuple in row 1 is malformed"),
    ("15010500", [pa.int8(), pa.int8()], r"element 1 of .* is a nested tuple, which int8"),
    ("20bf800000", [pa.float64()], "is a 32-bit float, which double cannot hold"),
    ("21bff0000000000000", [pa.float32()], "is a 64-bit float, which float cannot hold"),
    ("21bff0000000000000", [pa.int64()], "is a 64-bit float, which int64 cannot hold"),
    ("30" + "00" * 16, [pa.binary(16)], "is a uuid, which fixed_size_binary"),
    ("33" + "00" * 12, [pa.binary()], "is a Versionstamp, which binary cannot hold"),
    ("1501", [pa.null()], "is an integer, which null cannot hold"),
    ("02ff00", [pa.string()], "element 0 of the packed tuple in row 1 is malformed"),
    ("02eda08000", [pa.string()], "element 0 of the packed tuple in row 1 is malformed"),
    ("0261", [pa.string()], "element 0 of the packed tuple in row 1 is malformed"),
    ("026100ff", [pa.string()], "element 0 of the packed tuple in row 1 is malformed"),
    ("1601", [pa.int64()], "element 0 of the packed tuple in row 1 is malformed"),
    ("1d", [BIG], "element 0 of the packed tuple in row 1 is malformed"),
    ("2100", [pa.float64()], "element 0 of the packed tuple in row 1 is malformed"),
    ("2000", [pa.float32()], "element 0 of the packed tuple in row 1 is malformed"),
    ("3000", [pa.uuid()], "element 0 of the packed tuple in row 1 is malformed"),
    ("04", [pa.int64()], "element 0 of the packed tuple in row 1 is malformed"),
]


@pytest.mark.parametrize(("data", "kinds", "message"), WRONG)
def test_unpack_of_other_types_names_row_and_element(data, kinds, message):
    before = pack_row([None] * len(kinds))
    packed = pa.array([b"other", before, bytes.fromhex(data)]).slice(1)
    with pytest.raises(PackedError, match=message) as caught:
        unpack(packed, kinds)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        ("0261", "The element at byte 0 does not end at byte 2 of 2."),
        ("140500ff", "The element at byte 1 does not end at byte 4 of 4."),
        ("1c01", "7 bytes are missing at byte 2 of 2."),
        ("33" + "00" * 11, "1 bytes are missing at byte 12 of 12."),
        ("15013f", "Type code 3f does not exist at byte 2 of 3."),
        ("02ff00", "Text is not UTF-8 at byte 0 of 3."),
        ("05" * 101, "Tuples are nested more than 100 deep at byte 100 of 101."),
    ],
    ids=["text", "nested", "integer", "versionstamp", "code", "utf-8", "deep"],
)
def test_unpack_of_malformed_bytes_reports_reason_and_offset(data, detail):
    with pytest.raises(PackedError, match="of the packed tuple is malformed") as caught:
        unpack_row(bytes.fromhex(data))
    assert caught.value.detail == detail
    with pytest.raises(PackedError, match="of the packed tuple in row 1 is malformed"):
        unpack_rows(pa.array([b"", bytes.fromhex(data)]))


def test_unpack_of_other_column_raises_packed_error():
    for function in (lambda c: unpack(c, []), unpack_rows, key_hashes):
        with pytest.raises(PackedError, match="column of type int64 does not hold packed tuples"):
            function(pa.array([1]))
        with pytest.raises(PackedError, match="row 2 is null, not a packed tuple"):
            function(pa.array([None, b"", b"", None]).slice(1))


NESTED: list[Any] = [[]]
for _ in range(100):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Decimal(1), "element 1 of the tuple is a Decimal, which has no packed form"),
        (1 << 8 * 255, "element 1 of the tuple is an integer of 256 bytes"),
        ("\ud800", "element 1 of the tuple contains a lone surrogate"),
        (NESTED, "element 1 of the tuple is nested more than 100 deep"),
    ],
    ids=["type", "integer", "surrogate", "deep"],
)
def test_pack_row_of_other_value_raises_packed_error(value, message):
    with pytest.raises(PackedError, match=message) as caught:
        pack_row([None, value])
    assert caught.value.hint


def test_float32_and_versionstamp_reject_invalid_values():
    assert Float32(0.1).value == np.float32(0.1)
    with pytest.raises(PackedError, match=r"1e\+300 does not fit a 32-bit float"):
        Float32(1e300)
    for transaction, user in [(b"short", 0), (bytes(10), -1), (bytes(10), 1 << 16)]:
        with pytest.raises(PackedError, match="is not a versionstamp"):
            Versionstamp(transaction, user)


@pytest.mark.parametrize(
    "kind",
    [pa.float16(), pa.timestamp("us"), pa.date32(), pa.decimal128(5, 2), pa.list_(pa.int8()),
     pa.json_(), pa.string_view()],
    ids=str,
)  # fmt: skip
def test_pack_and_unpack_of_other_types_raise_packed_error(kind):
    empty = pa.nulls(0, kind)
    with pytest.raises(PackedError, match=r"column 1 is of type .* no packed form") as caught:
        pack([pa.nulls(0), empty])
    assert "Cast" in caught.value.hint
    with pytest.raises(PackedError, match="element 1 cannot be unpacked as"):
        unpack(pa.array([], pa.binary()), [pa.null(), kind])


def test_pack_of_columns_with_different_lengths_raises_packed_error():
    with pytest.raises(PackedError, match="no columns to pack"):
        pack([])
    with pytest.raises(PackedError, match="column 1 has 2 rows and column 0 has 1"):
        pack([pa.array([1]), pa.array([1, 2])])


# --- cases ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        (2**64 - 1, "1c" + "ff" * 8),
        (1 - 2**64, "0c" + "00" * 8),
        (2**64, "1d0901" + "00" * 8),
        (-(2**64), "0bf6fe" + "ff" * 8),
        ("a\0b", "026100ff6200"),
        (b"\0\xff", "0100ffff00"),
        (None, "00"),
        ((None, 1, (None,)), "0500ff15010500ff0000"),
        (-0.0, "217fffffffffffffff"),
        (double(0x7FF0_0000_0000_0001), "21fff0000000000001"),
        (double(0xFFF8_0000_0000_0002), "210007fffffffffffd"),
        (Float32(-1.0), "20407fffff"),
        (float32(0x7F80_0001), "20ff800001"),
        (UUID(int=1), "30" + "00" * 15 + "01"),
        (Versionstamp(b"0123456789", 258), "33303132333435363738390102"),
        (1 << 8 * 254, "1dff01" + "00" * 254),
    ],
    ids=lambda case: case[:8] if isinstance(case, str) else "",
)
def test_pack_row_of_edge_cases(value, packed):
    assert pack_row([value]).hex() == packed
    assert logical(unpack_row(bytes.fromhex(packed))) == logical((value,))


@pytest.mark.parametrize(
    ("packed", "value"),
    [
        ("1d08" + "ff" * 8, 2**64 - 1),
        ("0bf7" + "00" * 8, 1 - 2**64),
        ("16000a", 10),
        ("13ff", 0),
        ("1d00", 0),
        ("1d20" + "00" * 31 + "07", 7),
    ],
)
def test_unpack_of_longer_integer_forms(packed, value):
    data = bytes.fromhex(packed)
    assert unpack_row(data) == (value,)
    assert unpack(pa.array([data]), [BIG])[0].to_pylist() == [value]
    if value in range(100):
        assert unpack(pa.array([data]), [pa.int8()])[0].to_pylist() == [value]
        (unpacked,) = unpack(pa.array([data]), [pa.float64()])[0].to_pylist()
        assert pack_row([unpacked]) == pack_row([float(value)])


def test_pack_of_dictionary_equals_decoded_column():
    words = pa.array(["b", None, "a", "b"]).dictionary_encode().slice(1)
    assert pack([words]).to_pylist() == [pack_row([w]) for w in (None, "a", "b")]


def test_pack_beyond_32_bit_offsets_returns_large_binary(monkeypatch):
    monkeypatch.setattr(cells_module, "MOST_BYTES", 6)
    monkeypatch.setattr(unpacking_module, "MOST_BYTES", 1)
    small, large = pack([pa.array(["a", "b"])]), pack([pa.array(["a", "bc"])])
    assert (small.type, large.type) == (pa.binary(), pa.large_binary())
    assert large.to_pylist() == [pack_row(["a"]), pack_row(["bc"])]
    assert unpack(large, [pa.large_string()])[0].to_pylist() == ["a", "bc"]
    with pytest.raises(PackedError, match="3 bytes do not fit a column of type string"):
        unpack(large, [pa.string()])


def plain(value):
    """Return the value of a vector element."""
    match value:
        case {"bytes": held}:
            return bytes.fromhex(held)
        case {"bytes_utf8": text}:
            return text.encode()
        case {"int": digits}:
            return int(digits)
        case {"float64": bits}:
            return double(int(bits, 16))
        case {"float32": bits}:
            return float32(int(bits, 16))
        case {"uuid": text}:
            return UUID(text)
        case {"versionstamp": transaction, "user": user}:
            return Versionstamp(bytes.fromhex(transaction), user)
        case {"tuple": inner}:
            return tuple(map(plain, inner))
        case _:
            return value


def arrow(value):
    """Return a column with one value, if Arrow has a type for it."""
    match value:
        case Float32():
            return pa.array(np.array([value.value]).astype(np.float32))
        case UUID():
            return column(pa.uuid(), [value.bytes])
        case bool() | None | str() | bytes() | float():
            return pa.array([value])
        case int() if abs(value) < 10**38:
            return pa.array([value], BIG)
    return None


def check_packs(row, packed):
    assert pack_row(row) == packed
    assert logical(unpack_row(packed)) == logical(row)
    columns = list(map(arrow, row))
    if None not in columns:
        assert pack(columns).to_pylist() == [packed]


PACKED = [
    (case["id"], case["input"]["tuple"], case["expect"].get("hex", case["input"].get("packed_hex")))
    for case in FLOW
    if case["kind"] in ("tuple_pack", "key_hash")
]


@pytest.mark.parametrize(("row", "packed"), [c[1:] for c in PACKED], ids=[c[0] for c in PACKED])
def test_pack_equals_flow_vectors(row, packed):
    check_packs(tuple(map(plain, row)), bytes.fromhex(packed))


def test_packed_order_equals_flow_vectors():
    (case,) = [case for case in FLOW if case["kind"] == "tuple_order"]
    tuples = case["input"]["tuples_in_order"]
    rows = [pack_row(row) for row in tuples]
    assert rows == sorted(set(rows))
    assert pack([pa.array([row[0] for row in tuples])]).to_pylist() == rows


def test_pack_of_flow_extracted_fields_round_trips():
    (case,) = [case for case in FLOW if case["kind"] == "field_extraction"]
    row = tuple(map(plain, case["expect"]["elements"]))
    check_packs(row, b"".join(pack_row([element]) for element in row))


def test_pack_equals_foundationdb_vectors():
    for case in TUPLES:
        check_packs(tuple(map(plain, case["tuple"])), bytes.fromhex(case["hex"]))
