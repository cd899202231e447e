"""Keys to load and documents to store, a batch at a time.

A batch is columns. `columns()` unpacks them in compiled code; `rows()` makes Python
objects of them, for connectors that handle documents one by one.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.packed import PackedError, unpack, unpack_rows
from penstock.protocol.errors import RemoteProtocolError
from penstock.sdk.bindings import ARROW, Binding, Field, FieldKind

__all__ = ["Documents", "Found", "Keys"]


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
        return unpack_rows(self.packed)


@dataclass(frozen=True, slots=True)
class Found:
    """Documents that were asked for and are there."""

    binding: Binding[Any]
    docs_json: pa.BinaryArray


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents to keep, or to remove."""

    binding: Binding[Any]
    packed_keys: pa.BinaryArray
    packed_values: pa.BinaryArray
    docs_json: pa.BinaryArray
    exists: pa.BooleanArray
    """Whether the key is known to be there; a hint."""

    deletes: pa.BooleanArray | None
    """Whether the key is to be removed; none of them, if absent."""

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
        if binding.values:
            found += _columns(self.packed_values, binding.values, f"values of {binding}")
        if binding.document is not None:
            found.append(as_text(self.docs_json, f"a document of {binding}"))
        return found

    def rows(self) -> list[tuple[Any, ...]]:
        """A tuple for each document: keys, values, and the document as an object."""
        keys, values = unpack_rows(self.packed_keys), unpack_rows(self.packed_values)
        if self.binding.document is None:
            return [(*key, *value) for key, value in zip(keys, values, strict=True)]
        documents = [json.loads(each) if each else None for each in self.docs_json.to_pylist()]
        return [
            (*key, *value, document)
            for key, value, document in zip(keys, values, documents, strict=True)
        ]


def _columns(packed: pa.BinaryArray, fields: Sequence[Field], what: str) -> list[pa.Array]:
    try:
        found = unpack(packed, [ARROW[each.kind] for each in fields])
    except PackedError:
        # An integer beyond 64 bits, a whole number that a double cannot hold, or a value that
        # is now of one type and then of another. Rare, so the slow way is good enough.
        return _slow_columns(packed, fields, what)
    return [_told(column, each, what) for each, column in zip(fields, found, strict=True)]


def _told(column: pa.Array, field: Field, what: str) -> pa.Array:
    if field.kind is FieldKind.BYTES:
        return _decoded(column)
    if field.kind is FieldKind.JSON:
        return as_text(column, f'{what}: "{field.name}"')
    return column


def as_text(column: pa.Array, what: str) -> pa.Array:
    """Bytes as text.

    Raises:
        RemoteProtocolError: they are none.
    """
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise RemoteProtocolError(f"{what} is not text in UTF-8") from error


def _slow_columns(packed: pa.BinaryArray, fields: Sequence[Field], what: str) -> list[pa.Array]:
    """By way of objects: whatever a value is, it is told exactly."""
    try:
        rows = unpack_rows(packed)
    except PackedError as error:
        raise RemoteProtocolError(f"{what} are not packed tuples: {error}") from error
    for row in rows:
        if len(row) != len(fields):
            raise RemoteProtocolError(
                f"{what}: a tuple has {len(row)} elements",
                detail=f"The binding has {', '.join(each.name for each in fields)}.",
            )
    return [_exact([row[index] for row in rows], field, what) for index, field in enumerate(fields)]


def _exact(values: list[Any], field: Field, what: str) -> pa.Array:
    match field.kind:
        case FieldKind.JSON:
            return pa.array([_json_text(each) for each in values], pa.string())
        case FieldKind.BYTES:
            return _decoded(pa.array(values, pa.string()))
        case FieldKind.INTEGER | FieldKind.NUMBER:
            if any(isinstance(each, bool | str | bytes) for each in values):
                raise RemoteProtocolError(f'{what}: "{field.name}" holds what is no number')
            return _numbers(values, field.kind)
        case FieldKind.BOOLEAN | FieldKind.STRING:
            try:
                return pa.array(values, ARROW[field.kind])
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise RemoteProtocolError(
                    f'{what}: "{field.name}" holds what is no {field.kind.value}'
                ) from error


def _numbers(values: list[Any], kind: FieldKind) -> pa.Array:
    """As numbers, if each of them can be held exactly; else as text."""
    if kind is FieldKind.INTEGER:
        if all(
            each is None or (isinstance(each, int) and -(2**63) <= each < 2**63) for each in values
        ):
            return pa.array(values, pa.int64())
    elif all(
        each is None or isinstance(each, float) or int(float(each)) == each for each in values
    ):
        return pa.array([None if each is None else float(each) for each in values], pa.float64())
    return pa.array([None if each is None else repr(each) for each in values], pa.string())


def _json_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        return value.decode()  # Objects and arrays are packed as their JSON.
    return json.dumps(value, ensure_ascii=False)


def _decoded(column: pa.Array) -> pa.Array:
    """Base 64 to bytes."""
    try:
        found = [
            None if each is None else base64.b64decode(each, validate=True)
            for each in column.to_pylist()
        ]
    except binascii.Error as error:
        raise RemoteProtocolError(f"a value is not in base 64: {error}") from error
    return pa.array(found, pa.binary())
