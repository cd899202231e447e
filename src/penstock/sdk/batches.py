"""Keys to load and documents to store, a batch at a time.

A batch is columns. `columns()` unpacks them in compiled code; `rows()` makes Python
objects of them, for connectors that handle documents one by one.
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

__all__ = ["Documents", "Found", "Keys"]

SLOW_ROWS: Final = 256
"""Of so many rows or fewer, one that compiled code does not take sends all the slow way."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys whose documents are asked for."""

    binding: Binding[Any]
    packed: pa.BinaryArray

    def __len__(self) -> int:
        return len(self.packed)

    def columns(self) -> list[pa.Array]:
        """A column for each key field."""
        return _columns(self.packed, self.binding.keys, f"keys of {self.binding}")

    def rows(self) -> list[tuple[Any, ...]]:
        """A tuple for each key."""
        return _tuples(self.packed, self.binding.keys, f"keys of {self.binding}")


@dataclass(frozen=True, slots=True)
class Found:
    """Documents that were asked for and are there."""

    binding: Binding[Any]
    docs_json: pa.BinaryArray


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents to keep, or to remove; or none, and the word that all others go."""

    binding: Binding[Any]
    packed_keys: pa.BinaryArray
    packed_values: pa.BinaryArray
    docs_json: pa.BinaryArray
    exists: pa.BooleanArray
    """Whether the key is known to be there; a hint."""

    deletes: pa.BooleanArray | None
    """Whether the key is to be removed; none of them, if absent."""

    empties: bool = False
    """All that the resource holds goes, in this transaction. Such a batch has no documents, and
    comes before all others of its binding."""

    def __len__(self) -> int:
        return len(self.packed_keys)

    def keys(self) -> Keys:
        """Their keys alone."""
        return Keys(self.binding, self.packed_keys)

    @property
    def nbytes(self) -> int:
        """How much memory they take, about."""
        return int(self.packed_keys.nbytes + self.packed_values.nbytes + self.docs_json.nbytes)

    def without_deletes(self) -> "Documents":
        """Those that are to be kept."""
        if self.deletes is None:
            return self
        kept = pc.invert(self.deletes)
        return Documents(
            self.binding,
            self.packed_keys.filter(kept),
            self.packed_values.filter(kept),
            self.docs_json.filter(kept),
            self.exists.filter(kept),
            None,
        )

    def columns(self) -> list[pa.Array]:
        """A column for each field of the binding: keys, values, and the document as text."""
        binding = self.binding
        found = _columns(self.packed_keys, binding.keys, f"keys of {binding}")
        found += _columns(self.packed_values, binding.values, f"values of {binding}")
        if binding.document is not None:
            found.append(_as_text(self.docs_json, f"documents of {binding}", 0, binding.document))
        return found

    def rows(self) -> list[tuple[Any, ...]]:
        """A tuple for each document: keys, values, and the document as an object."""
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
                    f"documents of {self.binding}, row {row}: it is not JSON"
                ) from error


def _columns(
    packed: pa.BinaryArray, fields: Sequence[Field], what: str, first: int = 0
) -> list[pa.Array]:
    """Of rows that are counted from `first`."""
    try:
        found = unpack(packed, [ARROW[each.kind] for each in fields])
    except PackedError:
        # An integer beyond 64 bits, a whole number that a double cannot hold, or a value that
        # is now of one type and then of another. The slow way is for those that need it.
        if len(packed) <= SLOW_ROWS:
            return _slow_columns(packed, fields, what, first)
        half = len(packed) // 2
        parts = (
            _columns(packed.slice(0, half), fields, what, first),
            _columns(packed.slice(half), fields, what, first + half),
        )
        return [_joined(pair) for pair in zip(*parts, strict=True)]
    return [_told(column, each, what, first) for each, column in zip(fields, found, strict=True)]


def _told(column: pa.Array, field: Field, what: str, first: int) -> pa.Array:
    if field.kind is FieldKind.BYTES:
        return _decoded(column.to_pylist(), field, what, first)
    if field.kind is FieldKind.JSON:
        return _as_text(column, what, first, field)
    return column


def _as_text(column: pa.Array, what: str, first: int, field: Field) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        for row, data in enumerate(column.to_pylist(), first):
            try:
                (data or b"").decode()
            except UnicodeDecodeError as error:
                raise RemoteProtocolError(
                    f'{what}, row {row}: "{field.name}" is not text in UTF-8'
                ) from error
        raise


def _joined(parts: Sequence[pa.Array]) -> pa.Array:
    """One column; as text, if some of its numbers are."""
    if len({each.type for each in parts}) > 1:
        parts = [_number_texts(each) for each in parts]
    return pa.concat_arrays(parts)


def _number_texts(column: pa.Array) -> pa.Array:
    text = column.cast(pa.string())
    if not pa.types.is_floating(column.type):
        return text
    # A double stays one: 1.0 is not 1, nor -0.0 0.
    whole = pc.match_substring_regex(text, r"^-?\d+$")
    return pc.if_else(whole, pc.binary_join_element_wise(text, ".0", ""), text)


# One by one: whatever a value is, it is told exactly.


def _tuples(
    packed: pa.BinaryArray, fields: Sequence[Field], what: str, first: int = 0
) -> list[tuple[Any, ...]]:
    found = []
    for row, data in enumerate(packed.to_pylist(), first):
        try:
            values = unpack_row(data)
        except PackedError as error:
            raise RemoteProtocolError(f"{what}, row {row}: {error}", detail=error.detail) from error
        if len(values) != len(fields):
            raise RemoteProtocolError(
                f"{what}, row {row}: {len(values)} elements, not {len(fields)}",
                detail=f"The fields are: {', '.join(each.name for each in fields) or 'none'}.",
            )
        found.append(values)
    return found


def _slow_columns(
    packed: pa.BinaryArray, fields: Sequence[Field], what: str, first: int
) -> list[pa.Array]:
    rows = _tuples(packed, fields, what, first)
    columns = []
    for index, field in enumerate(fields):
        values = [row[index] for row in rows]
        for row, value in enumerate(values, first):
            if value is not None and not _taken(value, field.kind):
                raise RemoteProtocolError(
                    f'{what}, row {row}: "{field.name}" is {kind_of(value)}',
                    detail=f"The collection's schema says that it is of kind {field.kind.value}.",
                )
        columns.append(_exact(values, field, what, first))
    return columns


_TAKEN: Final[Mapping[FieldKind, frozenset[type]]] = {
    FieldKind.BOOLEAN: frozenset({bool}),
    FieldKind.INTEGER: frozenset({int}),
    FieldKind.NUMBER: frozenset({int, float}),
    FieldKind.STRING: frozenset({str}),
    FieldKind.BYTES: frozenset({str}),
    FieldKind.JSON: frozenset({bool, int, float, str, bytes}),
}


def _taken(value: Any, kind: FieldKind) -> bool:
    if kind is FieldKind.INTEGER and isinstance(value, float):
        return value.is_integer()  # In JSON, 1.0 is an integer.
    return type(value) in _TAKEN[kind]


def _exact(values: list[Any], field: Field, what: str, first: int) -> pa.Array:
    match field.kind:
        case FieldKind.JSON:
            # Objects and arrays are packed as their JSON.
            texts = [
                each
                if each is None or isinstance(each, bytes)
                else json.dumps(each, ensure_ascii=False).encode()
                for each in values
            ]
            return _as_text(pa.array(texts, pa.binary()), what, first, field)
        case FieldKind.BYTES:
            return _decoded(values, field, what, first)
        case FieldKind.INTEGER | FieldKind.NUMBER:
            number = int if field.kind is FieldKind.INTEGER else float
            if number is int:
                values = [None if each is None else int(each) for each in values]
            if all(each is None or _fits(each, number) for each in values):
                return pa.array(
                    [None if each is None else number(each) for each in values], ARROW[field.kind]
                )
            return pa.array([None if each is None else repr(each) for each in values], pa.string())
        case FieldKind.BOOLEAN | FieldKind.STRING:
            return pa.array(values, ARROW[field.kind])


def _fits(value: Any, number: type) -> bool:
    """Whether a column of such numbers has the value exactly."""
    if number is int:
        return bool(-(2**63) <= value < 2**63)
    try:
        return isinstance(value, float) or int(float(value)) == value
    except OverflowError:
        return False


def _decoded(values: list[Any], field: Field, what: str, first: int) -> pa.Array:
    """Base 64 to bytes."""
    found = []
    for row, each in enumerate(values, first):
        try:
            found.append(None if each is None else base64.b64decode(each, validate=True))
        except ValueError as error:
            raise RemoteProtocolError(
                f'{what}, row {row}: "{field.name}" is not in base 64: {error}'
            ) from error
    return pa.array(found, pa.binary())
