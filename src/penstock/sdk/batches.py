"""Batches of keys to load and of documents to store.

A batch is a set of columns. `columns()` unpacks them in compiled code. `rows()` returns Python
objects, for connectors that process documents one by one.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.packed import PackedError, unpack, unpack_row
from penstock.data.packed.elements import kind_of
from penstock.protocol.errors import RemoteProtocolError
from penstock.sdk.bindings import ARROW, Binding, Field, FieldKind

__all__ = ["Documents", "Keys", "LoadedDocuments"]

SLOW_ROWS: Final = 256
"""Largest batch that is unpacked row by row if compiled code cannot unpack one of its rows."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of requested documents."""

    binding: Binding[Any]
    packed: pa.BinaryArray

    def __len__(self) -> int:
        return len(self.packed)

    def columns(self) -> list[pa.Array]:
        """Return one column for each key field."""
        return _columns(self.packed, self.binding.keys, f"keys of {self.binding}")

    def rows(self) -> list[tuple[Any, ...]]:
        """Return one tuple for each key."""
        return _tuples(self.packed, self.binding.keys, f"keys of {self.binding}")


@dataclass(frozen=True, slots=True)
class LoadedDocuments:
    """Requested documents that exist."""

    binding: Binding[Any]
    docs_json: pa.BinaryArray


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents to store and keys to delete, or the request to truncate the resource."""

    binding: Binding[Any]
    packed_keys: pa.BinaryArray
    packed_values: pa.BinaryArray
    docs_json: pa.BinaryArray
    exists: pa.BooleanArray
    """True if the runtime has seen the key in the resource. A hint."""

    deletes: pa.BooleanArray | None
    """True for keys to delete. None deletes no key."""

    empties: bool = False
    """True to truncate the resource in this transaction. Such a batch has no documents and is the
    first of its binding."""

    def __len__(self) -> int:
        return len(self.packed_keys)

    def keys(self) -> Keys:
        """Return the keys of the documents."""
        return Keys(self.binding, self.packed_keys)

    @property
    def nbytes(self) -> int:
        """Return the approximate size in memory, in bytes."""
        return int(self.packed_keys.nbytes + self.packed_values.nbytes + self.docs_json.nbytes)

    def without_deletes(self) -> "Documents":
        """Return the batch without its deletes."""
        if self.deletes is None:
            return self
        stored = pc.invert(self.deletes)
        return Documents(
            self.binding,
            self.packed_keys.filter(stored),
            self.packed_values.filter(stored),
            self.docs_json.filter(stored),
            self.exists.filter(stored),
            None,
        )

    def columns(self) -> list[pa.Array]:
        """Return one column for each field of the binding: keys, values, the document as text."""
        binding = self.binding
        columns = _columns(self.packed_keys, binding.keys, f"keys of {binding}")
        columns += _columns(self.packed_values, binding.values, f"values of {binding}")
        if binding.document is not None:
            columns.append(_as_text(self.docs_json, f"documents of {binding}", 0, binding.document))
        return columns

    def rows(self) -> list[tuple[Any, ...]]:
        """Return one tuple for each document: keys, values, the document as an object."""
        binding = self.binding
        keys = _tuples(self.packed_keys, binding.keys, f"keys of {binding}")
        values = _tuples(self.packed_values, binding.values, f"values of {binding}")
        if binding.document is None:
            return [(*key, *value) for key, value in zip(keys, values, strict=True)]
        documents = self._documents()
        return [
            (*key, *value, document)
            for key, value, document in zip(keys, values, documents, strict=True)
        ]

    def _documents(self) -> Iterator[Any]:
        for row, text in enumerate(self.docs_json.to_pylist()):
            try:
                yield json.loads(text) if text else None
            except (ValueError, RecursionError) as error:
                raise RemoteProtocolError(
                    f"documents of {self.binding}, row {row}: document is not JSON"
                ) from error


def _columns(
    packed: pa.BinaryArray, fields: Sequence[Field], name: str, first: int = 0
) -> list[pa.Array]:
    """Unpack columns. `first` is the number of the first row, for errors."""
    try:
        columns = unpack(packed, [ARROW[field.kind] for field in fields])
    except PackedError:
        # An integer beyond 64 bits, an integer that a double cannot hold, or values of several
        # types. Only the rows next to such a value are unpacked row by row.
        if len(packed) <= SLOW_ROWS:
            return _slow_columns(packed, fields, name, first)
        half = len(packed) // 2
        parts = (
            _columns(packed.slice(0, half), fields, name, first),
            _columns(packed.slice(half), fields, name, first + half),
        )
        return [_concat(pair) for pair in zip(*parts, strict=True)]
    return [
        _convert(column, field, name, first) for field, column in zip(fields, columns, strict=True)
    ]


def _convert(column: pa.Array, field: Field, name: str, first: int) -> pa.Array:
    if field.kind is FieldKind.BYTES:
        return _decode_base64(column.to_pylist(), field, name, first)
    if field.kind is FieldKind.JSON:
        return _as_text(column, name, first, field)
    return column


def _as_text(column: pa.Array, name: str, first: int, field: Field) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        for row, data in enumerate(column.to_pylist(), first):
            try:
                (data or b"").decode()
            except UnicodeDecodeError as error:
                raise RemoteProtocolError(
                    f'{name}, row {row}: "{field.name}" is not UTF-8'
                ) from error
        raise


def _concat(parts: Sequence[pa.Array]) -> pa.Array:
    """Concatenate parts of a column, as text if a part of its numbers is text."""
    if len({part.type for part in parts}) > 1:
        parts = [_number_texts(part) for part in parts]
    return pa.concat_arrays(parts)


def _number_texts(column: pa.Array) -> pa.Array:
    text = column.cast(pa.string())
    if not pa.types.is_floating(column.type):
        return text
    # A double remains a double: 1.0 differs from 1, and -0.0 from 0.
    integral = pc.match_substring_regex(text, r"^-?\d+$")
    return pc.if_else(integral, pc.binary_join_element_wise(text, ".0", ""), text)


# Row by row, exact for all values.


def _tuples(
    packed: pa.BinaryArray, fields: Sequence[Field], name: str, first: int = 0
) -> list[tuple[Any, ...]]:
    rows = []
    for row, data in enumerate(packed.to_pylist(), first):
        try:
            values = unpack_row(data)
        except PackedError as error:
            raise RemoteProtocolError(f"{name}, row {row}: {error}", detail=error.detail) from error
        if len(values) != len(fields):
            raise RemoteProtocolError(
                f"{name}, row {row}: {len(values)} elements, not {len(fields)}",
                detail=f"The fields are: {', '.join(field.name for field in fields) or 'none'}.",
            )
        rows.append(values)
    return rows


def _slow_columns(
    packed: pa.BinaryArray, fields: Sequence[Field], name: str, first: int
) -> list[pa.Array]:
    rows = _tuples(packed, fields, name, first)
    columns = []
    for index, field in enumerate(fields):
        values = [row[index] for row in rows]
        for row, value in enumerate(values, first):
            if value is not None and not _is_allowed(value, field.kind):
                raise RemoteProtocolError(
                    f'{name}, row {row}: "{field.name}" is {kind_of(value)}',
                    detail=f"The schema of the collection defines the field as {field.kind.value}.",
                )
        columns.append(_exact_column(values, field, name, first))
    return columns


_ALLOWED: Final[Mapping[FieldKind, frozenset[type]]] = {
    FieldKind.BOOLEAN: frozenset({bool}),
    FieldKind.INTEGER: frozenset({int}),
    FieldKind.NUMBER: frozenset({int, float}),
    FieldKind.STRING: frozenset({str}),
    FieldKind.BYTES: frozenset({str}),
    FieldKind.JSON: frozenset({bool, int, float, str, bytes}),
}


def _is_allowed(value: Any, kind: FieldKind) -> bool:
    if kind is FieldKind.INTEGER and isinstance(value, float):
        return value.is_integer()  # In JSON, 1.0 is an integer.
    return type(value) in _ALLOWED[kind]


def _exact_column(values: list[Any], field: Field, name: str, first: int) -> pa.Array:
    match field.kind:
        case FieldKind.JSON:
            # Objects and arrays are packed as their JSON.
            texts = [
                value
                if value is None or isinstance(value, bytes)
                else json.dumps(value, ensure_ascii=False).encode()
                for value in values
            ]
            return _as_text(pa.array(texts, pa.binary()), name, first, field)
        case FieldKind.BYTES:
            return _decode_base64(values, field, name, first)
        case FieldKind.INTEGER | FieldKind.NUMBER:
            number = int if field.kind is FieldKind.INTEGER else float
            if number is int:
                values = [None if value is None else int(value) for value in values]
            if all(value is None or _fits(value, number) for value in values):
                return pa.array(
                    [None if value is None else number(value) for value in values],
                    ARROW[field.kind],
                )
            return pa.array(
                [None if value is None else repr(value) for value in values], pa.string()
            )
        case FieldKind.BOOLEAN | FieldKind.STRING:
            return pa.array(values, ARROW[field.kind])


def _fits(value: Any, number: type) -> bool:
    """Return whether a column of this type can hold the value exactly."""
    if number is int:
        return bool(-(2**63) <= value < 2**63)
    try:
        return isinstance(value, float) or int(float(value)) == value
    except OverflowError:
        return False


def _decode_base64(values: list[Any], field: Field, name: str, first: int) -> pa.Array:
    """Decode base64 strings."""
    decoded = []
    for row, value in enumerate(values, first):
        try:
            decoded.append(None if value is None else base64.b64decode(value, validate=True))
        except ValueError as error:
            raise RemoteProtocolError(
                f'{name}, row {row}: "{field.name}" is not base64: {error}'
            ) from error
    return pa.array(decoded, pa.binary())
