"""Mapping of Avro types to Arrow types, as the reader schema determines it.

    null, boolean, int, long     null, bool, int32, int64
    float, double                float, double
    bytes, fixed                 binary, fixed_size_binary
    string, enum                 string
    array, map, record           list, map, struct
    [null, T]                    T, which may always be null
    decimal                      decimal of its precision and scale
    date, time                   date32, time32[ms] or time64[us]
    timestamp, local-timestamp   timestamp with and without UTC
    uuid                         string
    anything else                string: JSON text

The last line of the table applies to a union of several types, and to a record that contains itself
or has no fields.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa

from penstock.sources.formats.avro_schema import (
    LOGICAL,
    MALFORMED,
    PRIMITIVES,
    contains_itself,
    meaning_of,
)

__all__ = ["Kind", "kind_of"]

_WIDE: Final = Context(prec=100)

Ready = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Arrow type of a schema, and the conversion of its values."""

    arrow: pa.DataType
    ready: Ready | None = None
    """Conversion of a value that is not null to Arrow's input; None if none is needed."""

    def array(self, values: list[Any], name: str, bad: dict[int, str]) -> pa.Array:
        """Return a column; a value that does not fit is null, with a reason in `bad`."""
        try:
            return pa.array(self._ready(values), self.arrow)
        except MALFORMED:
            pass
        arrays = []
        for row, value in enumerate(values):
            try:
                arrays.append(pa.array(self._ready([value]), self.arrow))
            except MALFORMED:
                bad.setdefault(
                    row, f'column "{name}" is {self.arrow}, which its value does not fit'
                )
                arrays.append(pa.nulls(1, self.arrow))
        return pa.concat_arrays(arrays) if arrays else pa.nulls(0, self.arrow)

    def _ready(self, values: list[Any]) -> list[Any]:
        ready = self.ready
        return values if ready is None else [None if v is None else ready(v) for v in values]


def kind_of(node: Any, named: Mapping[str, Any], around: tuple[str, ...]) -> Kind:
    """Return the mapping of `node`; `around` names the records that contain it."""
    if isinstance(node, str) and node in named:
        node = named[node]
    if isinstance(node, str):
        return Kind(PRIMITIVES[node], _bytes if node == "bytes" else None)
    if isinstance(node, list):
        others = [each for each in node if each != "null"]
        return kind_of(others[0], named, around) if len(others) == 1 else _AS_JSON
    match meaning_of(node):
        case ("decimal", precision, scale):
            kind = pa.decimal128 if precision <= 38 else pa.decimal256
            return Kind(kind(precision, scale), lambda value: _decimal(value, scale))
        case ("uuid",):
            return Kind(pa.string(), _uuid)
        case (word,):
            return Kind(LOGICAL[node["type"], word])
        case _:
            return _unmarked(node, named, around)


def _unmarked(node: Any, named: Mapping[str, Any], around: tuple[str, ...]) -> Kind:
    """Return the mapping of a type without a logical type."""
    match node["type"]:
        case "enum":
            return Kind(pa.string())
        case "fixed":
            return Kind(pa.binary(node["size"]), _bytes) if node["size"] else _AS_JSON
        case "array":
            item = kind_of(node["items"], named, around)
            return Kind(pa.list_(item.arrow), _convert_items(item))
        case "map":
            item = kind_of(node["values"], named, around)
            return Kind(pa.map_(pa.string(), item.arrow), _entries(item))
        case "record":
            if node["name"] in around or not node["fields"] or contains_itself(node, named):
                return _AS_JSON
            inside = [
                (member, kind_of(member["type"], named, (*around, node["name"])))
                for member in node["fields"]
            ]
            return Kind(pa.struct([(e["name"], k.arrow) for e, k in inside]), _members(inside))
        case primitive:
            return kind_of(primitive, named, around)


def _bytes(value: Any) -> bytes:
    # A default is written as text, with one character for each byte.
    return value.encode("latin-1") if isinstance(value, str) else value


def _decimal(value: Any, scale: int) -> Decimal:
    unscaled = Decimal(int.from_bytes(_bytes(value), "big", signed=True))
    return unscaled.scaleb(-scale, _WIDE)


def _uuid(value: Any) -> str:
    digits = _bytes(value).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _convert_items(item: Kind) -> Ready | None:
    ready = item.ready
    if ready is None:
        return None
    return lambda values: [None if value is None else ready(value) for value in values]


def _entries(item: Kind) -> Ready:
    ready = item.ready
    if ready is None:
        return lambda values: list(values.items())
    return lambda values: [(k, None if v is None else ready(v)) for k, v in values.items()]


def _members(inside: list[tuple[Any, Kind]]) -> Ready | None:
    if all(kind.ready is None and "default" not in member for member, kind in inside):
        return None

    def convert(values: Any) -> Any:
        converted = {}
        for member, kind in inside:
            # A record that is itself a default may omit members that have a default.
            name = member["name"]
            value = values[name] if name in values else member["default"]
            converted[name] = value if value is None or not kind.ready else kind.ready(value)
        return converted

    return convert


def _as_json(value: Any) -> str:
    return msgspec.json.encode(_jsonable(value), order="sorted").decode()


def _jsonable(value: Any) -> Any:
    """Return `value` with text for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


_AS_JSON: Final = Kind(pa.string(), _as_json)
