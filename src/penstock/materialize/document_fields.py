"""Fields of JSON documents: their specification, and their packed values.

Each location that the schema of a collection names is a field. The name of the field is the JSON
pointer without the first slash. The complete document is also a field. Users add fields with
other names as projections. A key identifies a document. It must therefore exist in each document,
have a type with exact equality, and never change.

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

import json
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
from penstock.errors import DefiniteError, UsageError
from penstock.protocol.specs import DOCUMENT, CollectionSpec, Exists, Inference, Projection
from penstock.reduce import (
    ABSENT,
    Absent,
    Outline,
    Pointer,
    check_key,
    decode,
    encode,
    find,
    parse_pointer,
)

__all__ = ["build_document_spec", "field_defaults", "pack_fields"]

_KEYS: Final = frozenset(("boolean", "integer", "string"))
"""JSON types of the values in a key."""

_ARROW: Final[Mapping[type, pa.DataType]] = {
    bool: pa.bool_(),
    bytes: pa.large_binary(),
    float: pa.float64(),
    int: pa.int64(),
    str: pa.large_string(),
}

_UNSUPPORTED_NAME: Final = re.compile(r'[\\"\x00-\x1f]')
"""Characters that msgspec does not support in the name of a field."""

_NON_FINITE: Final = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}

_NOT_READY: Final = frozenset((Absent, dict, list))


def pack_fields(
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
    places = [parse_pointer(pointer, what=f'pointer "{pointer}"') for pointer in pointers]
    default_values = [_element((defaults or {}).get(pointer), what) for pointer in pointers]
    columns = [*_columns(documents.to_pylist(), places, default_values, what)]
    for number, pointer in enumerate(pointers):
        if pointer in numbers and str in {*map(type, columns[number])}:
            columns[number] = [
                _NON_FINITE.get(value, value) if type(value) is str else value
                for value in columns[number]
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
    texts: list[bytes], places: list[Pointer], default_values: list[Any], what: str
) -> Iterator[list[Any]]:
    """Yield a column of values that can be packed, for each of `places`."""
    fields = {
        name: f"at{i}"
        for i, name in enumerate(dict.fromkeys(place[0] for place in places if place))
        if not _UNSUPPORTED_NAME.search(name)
    }
    rows, undecoded = _rows(texts, fields)
    for place, default in zip(places, default_values, strict=True):
        if not place or place[0] not in fields:
            yield [_exact(text, place, default, what) for text in texts]
            continue
        column = [*map(attrgetter(fields[place[0]]), rows)]
        if place[1:]:
            column = [find(value, place[1:]) for value in column]
        if undecoded or not _NOT_READY.isdisjoint(map(type, column)):
            for row, value in enumerate(column):
                if row in undecoded or type(value) in (dict, list):
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
        rows, undecoded = [], set()
    for row, text in enumerate(texts):
        try:
            rows.append(read(text))
        except (ValueError, RecursionError):
            rows.append(shape())
            undecoded.add(row)
    return rows, undecoded


def _exact(text: bytes, place: Pointer, default: Any, what: str) -> Any:
    value = find(decode(text, what=what), place)
    return default if value is ABSENT else _element(value, what)


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
    packed_column = None
    for kind in sorted(
        {*map(type, column)} - {type(None)}, key=lambda python_type: python_type.__name__
    ):
        has_type = [type(value) is kind for value in column]
        only = [value if is_kind else None for value, is_kind in zip(column, has_type, strict=True)]
        array = _array(only)
        packed = pa.array([pack_row([value]) for value in only]) if array is None else pack([array])
        packed = packed.cast(pa.large_binary())
        packed_column = (
            packed
            if packed_column is None
            else pc.if_else(pa.array(has_type), packed, packed_column)
        )
    return packed_column


def build_document_spec(
    name: str, schema: Any, key: Sequence[str], projections: Mapping[str, str]
) -> CollectionSpec:
    """Return the collection spec of a collection of documents.

    `projections` maps field names to JSON pointers. A property with the name of the document
    field has no field, unless a projection gives it another name.

    Raises:
        UsageError: the schema, a location of the key or a projection cannot be used.
    """
    outline = Outline(schema)
    check_key(schema, key, collection=name)
    for pointer in key:
        _check_key(name, pointer, outline.locate(pointer))
    fields = {pointer[1:]: (pointer, inference) for pointer, inference in outline.locations()}
    # A property with an empty name would become a field with an empty name.
    fields.pop("", None)
    fields[DOCUMENT] = "", outline.locate("")
    for field, pointer in projections.items():
        inference = outline.locate(pointer)
        _check_projection(name, field, pointer, inference, fields.get(field, (pointer,))[0])
        fields[field] = pointer, inference
    text = encode(schema).decode()
    return CollectionSpec(
        collection=name,
        key_ptrs=tuple(key),
        projections=tuple(
            Projection(
                ptr=pointer,
                field=field,
                explicit=field in projections,
                is_primary_key=pointer in key,
                inference=inference,
            )
            for field, (pointer, inference) in fields.items()
        ),
        write_schema_json=text,
        read_schema_json=text,
    )


def field_defaults(collection: CollectionSpec) -> dict[str, Any]:
    """Return the default values by pointer, for documents without a value there."""
    return {
        projection.ptr: decode(
            projection.inference.default_json, what=f'default of "{projection.ptr}"'
        )
        for projection in collection.projections
        if projection.inference.default_json
    }


def _check_key(name: str, pointer: str, inference: Inference) -> None:
    what = f'key "{pointer}" of collection "{name}"'
    if inference.exists is Exists.CANNOT:
        raise UsageError(
            f"{what} cannot exist in its documents",
            hint="Name a location that the schema has.",
        )
    if inference.exists is Exists.IMPLICIT:
        raise UsageError(
            f"{what} is not in its schema", hint="Declare it under properties, and as required."
        )
    default = json.loads(inference.default_json or "null")
    if default is not None and not isinstance(default, bool | int | str):
        raise UsageError(
            f"{what} has a default that cannot be part of a key",
            hint="Make the default a string, an integer or a boolean.",
        )
    if inference.exists is Exists.MAY and default is None:
        raise UsageError(
            f"{what} may be absent from a document",
            hint='Give each parent object only "type": "object" and list the location as required; '
            "or give the location a default.",
        )
    unfit = sorted({*inference.types} - _KEYS - ({"null"} if default is not None else set()))
    if unfit:
        raise UsageError(
            f"{what} may be of type {' or '.join(unfit)}",
            detail="A key consists of strings, integers and booleans. Equal floating-point numbers "
            "may have different bits.",
            hint="Narrow its type in the schema, or name another location. A location that may be "
            "null needs a default.",
        )


def _check_projection(
    name: str, field: str, pointer: str, inference: Inference, canonical: str
) -> None:
    what = f'projection "{field}" of collection "{name}"'
    if pointer != canonical:
        raise UsageError(
            f'{what} is of "{pointer}", but its name belongs to "{canonical}"',
            hint=f'Give the field of "{pointer}" another name.',
        )
    if inference.exists in (Exists.IMPLICIT, Exists.CANNOT):
        why = "cannot exist" if inference.exists is Exists.CANNOT else "is not in the schema"
        raise UsageError(
            f'{what} is of "{pointer}", which {why}',
            hint="Correct the pointer, or declare the location in the schema.",
        )
