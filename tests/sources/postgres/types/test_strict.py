"""Rejection of text that no server prints and of values that a column cannot represent."""

import struct
from fractions import Fraction

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import DefiniteError, InternalError, UsageError
from penstock.sources.postgres.types import ColumnType, to_text
from penstock.sources.postgres.types.arrays import array_of

KINDS = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "oid": pa.int64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "bytea": pa.binary(),
}
DECIMALS = [(1, 0), (1, 1), (10, 2), (18, 18), (19, 0), (38, 0), (38, 10), (38, 38)]
EXACT = [
    *(ColumnType("c", kind, label, binary=True) for label, kind in KINDS.items()),
    *(ColumnType("c", pa.decimal128(p, s), "numeric", binary=True) for p, s in DECIMALS),
]
FLOATS = [ColumnType("c", pa.float64(), "float8"), ColumnType("c", pa.float32(), "float4")]
ARRAYS = [
    ColumnType("c", array_of(pa.string()), "text[]"),
    ColumnType("c", array_of(pa.int32()), "int4[]"),
    ColumnType("c", array_of(pa.timestamp("us")), "timestamp[]"),
]

TRUE = {
    "bool": [b"t", b"f"],
    "int2": [b"0", b"-7", b"32767", b"-32768"],
    "int4": [b"0", b"10", b"2147483647", b"-2147483648"],
    "int8": [b"0", b"-100", b"9223372036854775807", b"-9223372036854775808"],
    "oid": [b"0", b"4294967295"],
    "date": [b"2011-11-11", b"0044-03-15 BC", b"10000-02-29", b"infinity", b"2000-02-29"],
    "timestamp": [b"2011-11-11 11:11:11.000001", b"0044-03-15 00:00:00 BC", b"-infinity"],
    "timestamptz": [b"2011-11-11 23:59:59.12+00", b"0044-03-15 00:00:00.5+00 BC", b"infinity"],
    "bytea": [b"\\x", b"\\x00ff"],
    "numeric": [
        b"0",
        b"1.10",
        b"-0.01",
        b"0.5",
        b"9",
        b"-12345678.90",
        b"9" * 38,
        b"0." + b"9" * 38,
    ],
    "float4": [b"0.1", b"1e+06", b"NaN", b"-Infinity", b"-0"],
    "float8": [b"0.1", b"1e+15", b"NaN", b"Infinity", b"5e-324"],
}
"""Text that a server prints, by type label."""


def bent(text: bytes) -> st.SearchStrategy[bytes]:
    """Return the text with up to two bytes inserted, removed or replaced."""
    byte = st.sampled_from(b"0123456789-+.: {}BCTZefxNaIt\xff\x00")

    @st.composite
    def change(pick):
        found = bytearray(text)
        for _ in range(pick(st.integers(0, 2))):
            at = pick(st.integers(0, len(found)))
            found[at : at + pick(st.integers(0, 1))] = bytes(pick(st.lists(byte, max_size=1)))
        return bytes(found)

    return change()


def some(kinds: list[ColumnType]) -> st.SearchStrategy[tuple[ColumnType, bytes]]:
    """Return a column type and a text that is valid for it, or almost valid."""
    return st.sampled_from(kinds).flatmap(
        lambda column_type: st.tuples(
            st.just(column_type), st.sampled_from(TRUE[column_type.label]).flatmap(bent)
        )
    )


LISTS = st.text('{},"\\[]:=-01aNUL ', max_size=24).map(str.encode)
NESTED = st.one_of(LISTS, LISTS.map(lambda text: b"{" + text + b"}"))


def read(column_type: ColumnType, cell: bytes) -> bytes | None:
    """Return the printed value of a text, or None if the text is rejected."""
    try:
        column = column_type.from_text(pa.array([None, cell], pa.binary()))
    except (DefiniteError, InternalError):
        return None
    column.validate(full=True)
    return to_text(column_type.label, column)[1].as_py().encode()


@settings(max_examples=300)
@given(some(EXACT))
def test_text_is_rejected_or_printed_unchanged(sample):
    column_type, cell = sample
    assert read(column_type, cell) in (None, cell)


@settings(max_examples=100)
@given(some(FLOATS))
def test_float_that_was_read_is_printed_unchanged(sample):
    column_type, cell = sample
    printed = read(column_type, cell)
    assert printed is None or read(column_type, printed) == printed


FALSE = [
    *(("bool", cell) for cell in ("", "true", "T", "1", "tt")),
    *(("int2", cell) for cell in ("", "-", "+1", "01", "-0", " 1", "1 ", "1.0", "32768", "-32769")),
    *(("int4", cell) for cell in ("2147483648", "-2147483649", "99999999999")),
    *(("int8", cell) for cell in ("9223372036854775808", "-9223372036854775809", "1" * 20)),
    *(("oid", cell) for cell in ("-1", "4294967296")),
    *(
        ("date", cell)
        for cell in (
            "2011-11-1",
            "02011-11-11",
            "011-11-11",
            "2011-13-01",
            "2011-00-01",
            "0000-01-01",
        )
    ),
    *(
        ("date", cell)
        for cell in (
            "2011-02-29",
            "1900-02-29",
            "2011-04-31",
            "2011-11-00",
            "0000-01-01 BC",
            "2011-11-11 ",
        )
    ),
    *(("date", cell) for cell in ("2011-11-11 AD", "2011-11-11BC", "Infinity", "+infinity", "")),
    *(
        ("timestamp", f"2011-11-11 {cell}")
        for cell in (
            "11:11:11.10",
            "11:11:11.",
            "11:11:11.1234567",
            "24:00:00",
            "23:59:60",
            "23:60:00",
        )
    ),
    *(
        ("timestamp", f"2011-11-11{cell}")
        for cell in ("", " ", "T11:11:11", " 11:11", " 11:11:11+00")
    ),
    *(
        ("timestamptz", f"2011-11-11 11:11:11{cell}")
        for cell in ("", "+01", "-00", "+0", "+00:00", "Z", " UTC", "+00BC", " BC")
    ),
    *(("bytea", cell) for cell in ("", "\\", "\\x0", "\\xAB", "abc", "\\X00", "\\x0g")),
]


@pytest.mark.parametrize(("label", "cell"), FALSE)
def test_text_that_the_server_does_not_print_is_rejected(label, cell):
    column_type = ColumnType("c", KINDS[label], label)
    with pytest.raises(InternalError, match="does not print"):
        column_type.from_text(pa.array([cell.encode()], pa.binary()))


@given(st.sampled_from(ARRAYS), NESTED)
def test_array_that_was_read_is_printed_unchanged(column_type, cell):
    printed = read(column_type, cell)
    assert printed is None or read(column_type, printed) == printed


@given(st.sampled_from(EXACT), st.binary(max_size=40))
def test_binary_field_is_rejected_or_equals_its_text(column_type, field):
    try:
        by_copy = column_type.from_copy(pa.array([field], pa.binary()))
    except (DefiniteError, InternalError):
        return
    text = to_text(column_type.label, by_copy)
    assert column_type.from_text(text.cast(pa.binary())) == by_copy


@given(st.integers(-(10**40), 10**40), st.booleans(), st.sampled_from(DECIMALS))
@example(10**28 + 1, False, (38, 0))
def test_binary_numeric_is_rejected_or_read_exactly(number, shifted, shape):
    precision, scale = shape
    column_type = ColumnType("c", pa.decimal128(precision, scale), "numeric", binary=True)
    number %= 10 ** (precision + 2)
    exponent = -4 * ((scale + 3) // 4) + 4 * shifted
    groups: list[int] = []
    rest = number
    while rest:
        rest, group = divmod(rest, 10_000)
        groups.insert(0, group)
    weight = len(groups) - 1 + exponent // 4
    head = struct.pack("!hhHh", len(groups), weight, 0, scale)
    field = head + b"".join(struct.pack("!h", group) for group in groups)
    exact, left = divmod(number * 10**scale * 10**8, 10 ** (8 - exponent))
    try:
        (read,) = column_type.from_copy(pa.array([field], pa.binary())).to_pylist()
    except DefiniteError:
        assert left or exact >= 10**precision or (groups and groups[-1] == 0)
    else:
        assert left == 0
        # A Decimal operation would round to the 28 digits of the default context.
        assert Fraction(read) * 10**scale == exact


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (b"NaN", "holds NaN"),
        (b"Infinity", "holds NaN"),
        (b"-Infinity", "holds NaN"),
        (b"1.234", "not a decimal128"),
        (b"1", "not a decimal128"),
        (b"123456789.00", "not a decimal128"),
    ],
)
def test_number_beyond_the_decimal_raises_error_with_column_and_hint(cell, message):
    column_type = ColumnType("price", pa.decimal128(10, 2), "numeric", binary=True)
    with pytest.raises(DefiniteError, match=message) as refused:
        column_type.from_text(pa.array([b"1.00", cell], pa.binary()))
    assert '"price"' in str(refused.value)
    assert "text" in refused.value.hint


@pytest.mark.parametrize("sign", [0xC000, 0xD000, 0xF000])
def test_binary_nan_and_infinity_are_rejected_in_a_decimal(sign):
    column_type = ColumnType("price", pa.decimal128(10, 2), "numeric", binary=True)
    with pytest.raises(DefiniteError, match="holds NaN"):
        column_type.from_copy(pa.array([struct.pack("!hhHh", 0, 0, sign, 0)], pa.binary()))


LATE = [b"294247-01-10 04:00:54.775807", b"294247-01-10 04:00:54.775808", b"294276-12-31 23:59:59"]


@pytest.mark.parametrize("text", LATE)
def test_timestamp_beyond_the_range_raises_error_with_column_and_hint(text):
    column_type = ColumnType("at", pa.timestamp("us"), "timestamp", binary=True)
    with pytest.raises(DefiniteError, match='"at"') as refused:
        column_type.from_text(pa.array([text], pa.binary()))
    assert "text" in refused.value.hint


@pytest.mark.parametrize("late", [0, 1, 704_000_000_000])
def test_binary_timestamp_beyond_the_range_is_rejected(late):
    column_type = ColumnType("at", pa.timestamp("us"), "timestamp", binary=True)
    first = 2**63 - 1 - 946_684_800_000_000
    with pytest.raises(DefiniteError, match='"at"'):
        column_type.from_copy(pa.array([struct.pack("!q", first + late)], pa.binary()))
    last = column_type.from_copy(pa.array([struct.pack("!q", first - 1)], pa.binary()))
    assert to_text("timestamp", last).to_pylist() == ["294247-01-10 04:00:54.775806"]


def test_text_that_is_not_utf_8_is_rejected():
    column_type = ColumnType("note", pa.string(), "text")
    with pytest.raises(DefiniteError, match="not UTF-8") as refused:
        column_type.from_text(pa.array([b"fine", b"\xff\xfe"], pa.binary()))
    assert '"note"' in str(refused.value)


def test_rejected_element_raises_error_with_column():
    column_type = ColumnType("prices", array_of(pa.decimal128(4, 1)), "numeric[]")
    with pytest.raises(DefiniteError, match=r'"prices".*NaN'):
        column_type.from_text(pa.array([b"{1.0,2.0}", None, b"{3.0,NaN}"], pa.binary()))


def test_to_text_with_another_type_than_the_label_raises_usage_error():
    with pytest.raises(UsageError, match=r"public\.mood"):
        to_text("public.mood", pa.array([1]))


@pytest.mark.parametrize(
    "column_type", [*EXACT, *FLOATS, *ARRAYS], ids=lambda column_type: column_type.label
)
def test_column_without_values_stays_empty_or_null(column_type):
    for empty in (
        pa.array([], pa.binary()),
        pa.nulls(3, pa.binary()),
        pa.nulls(9, pa.large_binary()),
    ):
        column = column_type.from_text(empty)
        assert column.type == column_type.arrow
        assert column.null_count == len(column) == len(empty)
        assert column_type.from_copy(empty) == column
        assert to_text(column_type.label, column) == pa.nulls(len(empty), pa.string())
