"""From JSON documents to their keys and values, packed.

What is at the pointers is all that is read of a document; the rest is passed over. The
values at one pointer are a column, and a column of one type is packed as such; of a
column where types mix, which numbers do that are whole now and then, each type is packed
by itself, and every row takes its own.

    null, nothing there     null, or the default of the pointer if there is nothing
    booleans, strings       themselves
    integers                exactly, however large
    other numbers           doubles, as nearest
    objects, arrays         bytes: their JSON, compact, with names in order and numbers exact
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
"""What the name of a field that msgspec reads cannot have."""

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
    """Of each of `documents`, JSON without nulls, the tuple of what is at `pointers`.

    Args:
        documents: of binary or large_binary.
        pointers: JSON pointers.
        defaults: from some of the pointers to what is taken where there is nothing.
        numbers: those at which what is no number in JSON, as NaN, stands as text.
        what: what an error calls a document.

    Raises:
        DefiniteError: one of them is not JSON, or has a number that cannot be packed.
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
    """What is at each of `places`, ready to be packed."""
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
                    # As it was read, its numbers would not be exact.
                    column[row] = _exact(texts[row], place, default, what)
                elif value is ABSENT:
                    column[row] = default
        yield column


def _rows(texts: list[bytes], fields: Mapping[str, str]) -> tuple[list[Any], set[int]]:
    """The documents, with no more than `fields`, and which could not be read so."""
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
    """What is packed for `value`, which was read exactly."""
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
    # A packed tuple is its packed elements one after another.
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    return joined.cast(pa.binary()) if joined.nbytes < MOST_BYTES else joined


def _array(column: Sequence[Any]) -> pa.Array | None:
    """The column, if its values are of one type, besides null, and of one that Arrow has."""
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
    """The packed elements of a column, each as its own type."""
    found = None
    for kind in sorted({*map(type, column)} - {type(None)}, key=lambda each: each.__name__):
        there = [type(value) is kind for value in column]
        only = [value if kept else None for value, kept in zip(column, there, strict=True)]
        array = _array(only)
        packed = pa.array([pack_row([value]) for value in only]) if array is None else pack([array])
        packed = packed.cast(pa.large_binary())
        found = packed if found is None else pc.if_else(pa.array(there), packed, found)
    return found
