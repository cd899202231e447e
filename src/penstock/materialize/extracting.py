"""Packed keys and values of JSON documents.

Only the values at the requested pointers are decoded; the other parts of a document are skipped.
The values at one pointer form a column. A column of one type is packed as an Arrow array. A
column may mix types: for example, a number may be an integer in some rows only. Each type of such
a column is packed separately, and each row takes the result for its own type.

    null              null
    absent            the default of the pointer, else null
    boolean, string   the same value
    integer           exact, of any size
    other number      the nearest double
    object, array     bytes: compact JSON with sorted names and exact numbers
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from math import inf, isinf, nan
from operator import attrgetter
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.packed import PackedError, pack, pack_row
from penstock.data.packed.cells import MOST_BYTES
from penstock.errors import DefiniteError
from penstock.reduce import ABSENT, decode, encode
from penstock.reduce.document import Absent, Pointer, find, parse_pointer

__all__ = ["packed_at"]

_ARROW: Final[Mapping[type, pa.DataType]] = {
    bool: pa.bool_(),
    bytes: pa.large_binary(),
    float: pa.float64(),
    int: pa.int64(),
    str: pa.large_string(),
}

_NO_FIELD: Final = re.compile(r'[\\"\x00-\x1f]')
"""Characters that msgspec does not support in the name of a field."""

_NO_JSON: Final = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}

_NOT_READY: Final = frozenset((Absent, dict, list))


def packed_at(
    documents: pa.Array,
    pointers: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    numbers: Collection[str] = (),
    what: str,
) -> pa.Array:
    """Return, for each document, the packed tuple of the values at `pointers`.

    Args:
        documents: JSON texts as binary or large_binary, without nulls.
        pointers: JSON pointers.
        defaults: values by pointer for documents without a value there.
        numbers: pointers of numbers whose NaN and infinities are JSON strings.
        what: noun for a document in error messages.

    Raises:
        DefiniteError: a document is not JSON, or has a number that cannot be packed.
    """
    if not pointers:
        return pa.array([b""] * len(documents), pa.binary())
    places = [parse_pointer(each, what=f'pointer "{each}"') for each in pointers]
    otherwise = [_element((defaults or {}).get(each), what) for each in pointers]
    columns = [*_columns(documents.to_pylist(), places, otherwise, what)]
    for at, pointer in enumerate(pointers):
        if pointer in numbers and str in {*map(type, columns[at])}:
            columns[at] = [
                _NO_JSON.get(each, each) if type(each) is str else each for each in columns[at]
            ]
    try:
        return _packed(columns)
    except PackedError as error:
        raise DefiniteError(
            f"{what} has a value that cannot be packed",
            detail=f"{error}.",
            hint="Correct it at its source, or select fields without it.",
        ) from error


def _columns(
    texts: list[bytes], places: list[Pointer], otherwise: list[Any], what: str
) -> Iterator[list[Any]]:
    """Yield a column of values that can be packed, for each of `places`."""
    fields = {
        name: f"at{i}"
        for i, name in enumerate(dict.fromkeys(place[0] for place in places if place))
        if not _NO_FIELD.search(name)
    }
    rows, odd = _rows(texts, fields)
    for place, default in zip(places, otherwise, strict=True):
        if not place or place[0] not in fields:
            yield [_exact(text, place, default, what) for text in texts]
            continue
        column = [*map(attrgetter(fields[place[0]]), rows)]
        if place[1:]:
            column = [find(value, place[1:]) for value in column]
        if odd or not _NOT_READY.isdisjoint(map(type, column)):
            for row, value in enumerate(column):
                if row in odd or type(value) in (dict, list):
                    # The fast decoder does not keep the numbers in it exact.
                    column[row] = _exact(texts[row], place, default, what)
                elif value is ABSENT:
                    column[row] = default
        yield column


def _rows(texts: list[bytes], fields: Mapping[str, str]) -> tuple[list[Any], set[int]]:
    """Decode only `fields` of each document; return also the rows that could not be decoded.

    Such a row has no values in the result. The caller decodes it with the exact decoder.
    """
    shape = msgspec.defstruct(
        "Document",
        [(field, Any, ABSENT) for field in fields.values()],
        rename={field: name for name, field in fields.items()},
        gc=False,
    )
    read = msgspec.json.Decoder(shape).decode
    try:
        return [*map(read, texts)], set()
    except (ValueError, RecursionError):
        rows, odd = [], set()
    for row, text in enumerate(texts):
        try:
            rows.append(read(text))
        except (ValueError, RecursionError):
            rows.append(shape())
            odd.add(row)
    return rows, odd


def _exact(text: bytes, place: Pointer, default: Any, what: str) -> Any:
    found = find(decode(text, what=what), place)
    return default if found is ABSENT else _element(found, what)


def _element(value: Any, what: str) -> Any:
    """Return the value to pack for `value`, which the exact decoder returned."""
    match value:
        case dict() | list():
            return encode(value)
        case Decimal():
            nearest = float(value)
            if isinf(nearest):
                raise DefiniteError(
                    f"{what} has a number that is too large for a double",
                    hint="Correct it at its source, make it a string, or select fields without it.",
                )
            return nearest
        case _:
            return value


def _packed(columns: Sequence[Sequence[Any]]) -> pa.Array:
    arrays = [_array(column) for column in columns]
    if all(array is not None for array in arrays):
        return pack(arrays)
    parts = [
        _mixed(column) if array is None else pack([array]).cast(pa.large_binary())
        for column, array in zip(columns, arrays, strict=True)
    ]
    # A packed tuple is the concatenation of its packed elements.
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    return joined.cast(pa.binary()) if joined.nbytes < MOST_BYTES else joined


def _array(column: Sequence[Any]) -> pa.Array | None:
    """Return the column as Arrow; None if its types mix or its integers exceed 38 digits.

    Nulls are allowed in each column.
    """
    kinds = {*map(type, column)} - {type(None)}
    if not kinds:
        return pa.nulls(len(column))
    if len(kinds) > 1:
        return None
    (kind,) = kinds
    try:
        return pa.array(column, _ARROW[kind])
    except OverflowError:
        try:
            return pa.array(column, pa.decimal128(38, 0))
        except ValueError:
            return None


def _mixed(column: Sequence[Any]) -> pa.Array:
    """Return the packed elements of a column, each packed by its own type."""
    found = None
    for kind in sorted({*map(type, column)} - {type(None)}, key=lambda each: each.__name__):
        there = [type(value) is kind for value in column]
        only = [value if kept else None for value, kept in zip(column, there, strict=True)]
        array = _array(only)
        packed = pa.array([pack_row([value]) for value in only]) if array is None else pack([array])
        packed = packed.cast(pa.large_binary())
        found = packed if found is None else pc.if_else(pa.array(there), packed, found)
    return found
