"""Protobuf format: records of one message type with a given descriptor.

    double, float               double, float
    int32, int64 and their kin  int32, int64; uint32, uint64
    bool, string, bytes         bool, string, binary
    an enum                     string: the value's name, or its number if it has none
    a message                   struct
    repeated, map               list, map with its keys in order
    google.protobuf.…Value      the wrapped value, or null
    anything else               string: JSON text

A field with presence is null if it is not set. A field without presence then has its default,
because the encoding does not distinguish the two. The last line of the table applies to a message
that contains itself or has no fields. The descriptor determines the columns; unknown fields are
ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from penstock.data.text_kernels.located_values import InvalidValue
from penstock.errors import UsageError
from penstock.sources.formats.column_types import check_columns
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of

__all__ = ["ProtobufFormat"]

_PLAIN: Final = {
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.uint32(),
    FieldDescriptor.CPPTYPE_UINT64: pa.uint64(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
}
_WRAPPERS: Final = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in (
        "Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes",
    )
)  # fmt: skip

Get = Callable[[Any], Any]
"""Conversion of the field of a message to Arrow's input."""


@dataclass(frozen=True, slots=True)
class ProtobufFormat:
    """Records that are one message each."""

    descriptors: bytes = field(repr=False)
    """FileDescriptorSet, as `protoc --include_imports --descriptor_set_out` writes it."""

    message: str
    """Full name of the message type."""

    framed: bool = False
    """True if records have the header of a schema registry: a zero byte, a schema id and a message
    index. The id is not resolved; the given descriptor is used.
    """

    schema: pa.Schema = field(init=False)
    _cache: dict[str, Any] = field(init=False, repr=False, compare=False)
    """Data derived from the descriptor; not pickled, but built again."""

    def __post_init__(self) -> None:
        message = _find_message(self.descriptors, self.message)
        columns = [
            (descriptor.name, *_field(descriptor, (message.full_name,)))
            for descriptor in message.fields
        ]
        cache = {
            "class": message_factory.GetMessageClass(message),
            "columns": columns,
            "path": _path(message),
        }
        schema = pa.schema([(name, kind) for name, kind, _ in columns])
        what = f'protobuf message "{self.message}"'
        object.__setattr__(self, "schema", check_columns(schema, owner=what))
        object.__setattr__(self, "_cache", cache)

    def __getstate__(self) -> tuple[bytes, str, bool]:
        return self.descriptors, self.message, self.framed

    def __setstate__(self, state: tuple[bytes, str, bool]) -> None:
        for name, value in zip(("descriptors", "message", "framed"), state, strict=True):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`."""
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            reasons: dict[int, str] = {}
            messages = [
                self._read(value, row, reasons) for row, value in enumerate(chunk.to_pylist())
            ]
            columns = [
                _array(messages, name, kind, get, reasons)
                for name, kind, get in self._cache["columns"]
            ]
            tables.append(blanked(columns, self.schema, reasons))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))

    def _read(self, value: bytes | None, row: int, bad: dict[int, str]) -> Message | None:
        if value is None:
            return None
        try:
            start = _unframed(value, self._cache["path"]) if self.framed else 0
            message: Message = self._cache["class"].FromString(value[start:] if start else value)
        except InvalidValue as invalid:
            bad[row] = str(invalid)
        except DecodeError:
            bad[row] = f'it is not a message "{self.message}"'
        else:
            return message
        return None


def _find_message(descriptors: bytes, name: str) -> Descriptor:
    pool = descriptor_pool.DescriptorPool()
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors)
    except DecodeError:
        raise UsageError(
            "descriptors of protobuf format are not a FileDescriptorSet",
            hint="Create them with protoc --include_imports --descriptor_set_out=FILE.",
        ) from None
    try:
        for file in _in_order(files):
            pool.AddSerializedFile(file.SerializeToString())
        return pool.FindMessageTypeByName(name.removeprefix("."))
    except TypeError:
        raise UsageError(
            "descriptors of protobuf format miss a file that another imports",
            hint="Create them with protoc --include_imports --descriptor_set_out=FILE.",
        ) from None
    except KeyError:
        names = sorted(
            ".".join(filter(None, (file.package, message.name)))
            for file in files.file
            for message in file.message_type
            if not file.package.startswith("google.protobuf")
        )
        raise UsageError(
            f'descriptors of protobuf format have no message "{name[:80]}"',
            hint=f"They have {', '.join(names[:10])}.",
        ) from None


def _in_order(files: Any) -> list[Any]:
    """Return the files in import order: each after its imports."""
    by_name = {file.name: file for file in files.file}
    done: dict[str, Any] = {}

    def visit(name: str) -> None:
        if name in done or name not in by_name:
            return
        file = by_name.pop(name)
        for other in file.dependency:
            visit(other)
        done[name] = file

    for file in files.file:
        visit(file.name)
    return list(done.values())


def _path(described: Descriptor) -> tuple[int, ...]:
    """Return the message index: the index at each nesting level, outermost first."""
    indexes: list[int] = []
    inner: Descriptor = described
    while inner.containing_type is not None:
        outer: Descriptor = inner.containing_type
        indexes.insert(0, [nested.name for nested in outer.nested_types].index(inner.name))
        inner = outer
    own = descriptor_pb2.FileDescriptorProto()
    inner.file.CopyToProto(own)
    return ([nested.name for nested in own.message_type].index(inner.name), *indexes)


def _unframed(value: bytes, path: tuple[int, ...]) -> int:
    """Return the start offset of the message."""
    if len(value) < 6 or value[0] != 0:
        raise InvalidValue(
            "it does not begin with a zero byte, the id of a schema and a message's index"
        )
    count, at = _zigzag(value, 5)
    # The encoding has a short form for the first message of a file.
    indexes = [0] if count == 0 else []
    if not 0 <= count <= 100:
        raise InvalidValue("its message index is malformed")
    for _ in range(count):
        index, at = _zigzag(value, at)
        indexes.append(index)
    if tuple(indexes) != path:
        raise InvalidValue(
            f"it is message {'.'.join(map(str, indexes))} of its schema, and not "
            f"{'.'.join(map(str, path))}"
        )
    return at


def _zigzag(value: bytes, at: int) -> tuple[int, int]:
    number, shift = 0, 0
    while at < len(value) and shift < 35:
        byte = value[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
        shift += 7
    raise InvalidValue("its message index is malformed")


def _array(
    messages: list[Message | None], name: str, kind: pa.DataType, get: Get, bad: dict[int, str]
) -> pa.Array:
    try:
        return pa.array([None if message is None else get(message) for message in messages], kind)
    except ValueError:
        pass
    # In proto2, string fields may hold bytes that are not UTF-8.
    arrays = []
    for row, message in enumerate(messages):
        try:
            arrays.append(pa.array([None if message is None else get(message)], kind))
        except ValueError:
            bad.setdefault(row, f'field "{name}" contains text that is not UTF-8')
            arrays.append(pa.nulls(1, kind))
    return pa.concat_arrays(arrays)


def _field(descriptor: FieldDescriptor, around: tuple[str, ...]) -> tuple[pa.DataType, Get]:
    """Return the type of a field, and a function that gets its value from a message."""
    name = descriptor.name
    entry = descriptor.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key_kind, key = _value(entry.fields_by_name["key"], around)
        kind, item = _value(entry.fields_by_name["value"], around)

        def entries(message: Any) -> Any:
            # Sorted by key: maps have no order, and rows must be deterministic.
            items = getattr(message, name)
            return [(_convert(key, k), _convert(item, items[k])) for k in sorted(items)]

        return pa.map_(key_kind, kind), entries
    kind, convert = _value(descriptor, around)
    if descriptor.is_repeated:
        return pa.list_(kind), lambda message: [
            _convert(convert, v) for v in getattr(message, name)
        ]
    if descriptor.has_presence:
        return (
            kind,
            lambda message: (
                _convert(convert, getattr(message, name)) if message.HasField(name) else None
            ),
        )
    return kind, lambda message: _convert(convert, getattr(message, name))


def _convert(convert: Get | None, value: Any) -> Any:
    return value if convert is None else convert(value)


def _value(descriptor: FieldDescriptor, around: tuple[str, ...]) -> tuple[pa.DataType, Get | None]:
    """Return the type of one value of a field, and its conversion; None if none is needed."""
    if descriptor.cpp_type in _PLAIN:
        return _PLAIN[descriptor.cpp_type], None
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return (pa.binary() if descriptor.type == FieldDescriptor.TYPE_BYTES else pa.string()), None
    if descriptor.enum_type is not None:
        names: dict[int, str] = {}
        for value in descriptor.enum_type.values:
            names.setdefault(value.number, value.name)
        return pa.string(), lambda number: names.get(number) or str(number)
    inner = descriptor.message_type
    assert inner is not None
    if inner.full_name in _WRAPPERS:
        kind, _ = _value(inner.fields_by_name["value"], around)
        return kind, lambda message: message.value
    if inner.full_name in around or not inner.fields or _contains_itself(inner):
        return pa.string(), _as_json
    fields = [(f.name, *_field(f, (*around, inner.full_name))) for f in inner.fields]
    return pa.struct([(name, kind) for name, kind, _ in fields]), lambda message: {
        name: get(message) for name, _, get in fields
    }


def _contains_itself(described: Descriptor) -> bool:
    seen: set[str] = set()
    waiting = [described]
    while waiting:
        for descriptor in waiting.pop().fields:
            inner = descriptor.message_type
            if inner is None or inner.full_name in seen:
                continue
            if inner.full_name == described.full_name:
                return True
            seen.add(inner.full_name)
            waiting.append(inner)
    return False


def _as_json(message: Message) -> str:
    document = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return msgspec.json.encode(document, order="sorted").decode()
