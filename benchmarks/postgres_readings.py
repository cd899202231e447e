"""Values of Debezium as the server prints them, decoded by their declared schemas.

Each field of a record has a schema: a type, and often a name such as
`io.debezium.time.MicroTimestamp` that defines its meaning. This module decodes a value by that
schema. If the result is the text that the server prints, no information was lost. Other
spellings of a number, and the special numbers for infinity, count as equal.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from penstock.sources.postgres.types import to_text

__all__ = ["Cast", "Unreadable", "decode_value"]

Cast = Callable[[str, str], str]
"""Function from a literal and a type to the text that the server prints."""

INFINITIES: Final = {
    9223372036825200000: "infinity",
    9223372036825200: "infinity",
    -9223372036832400000: "-infinity",
    -9223372036832400: "-infinity",
}
"""Numbers of pgjdbc for an infinite timestamp, and a thousandth of them."""

SPECIAL: Final = {"NAN": "NaN", "POSITIVE_INFINITY": "Infinity", "NEGATIVE_INFINITY": "-Infinity"}
"""Strings of Debezium for special values of numeric."""

VARYING: Final = 1 << 30
"""Bit strings of this length or more have no declared length."""

ZONED: Final = re.compile(
    r"([+-]?\d{4,})-(\d\d-\d\d)T(\d\d:\d\d)(?::(\d\d))?(?:\.(\d+))?(?:Z|\+00:00)"
)


class Unreadable(Exception):
    """A value that does not conform to its schema."""


def decode_value(schema: Mapping[str, Any], value: Any, declared: str, cast: Cast) -> str:
    """Return the text of a non-null value of a column with this declared type.

    Raises:
        Unreadable: the value does not conform to its schema.
    """
    name = schema.get("name", "")
    if isinstance(value, str) and value == "__debezium_unavailable_value":
        raise Unreadable("unavailable, because unchanged")
    named = _NAMED.get(name)
    if named is not None:
        text = named(schema, value)
        if name == "io.debezium.time.MicroDuration":
            return cast(text, "interval")
    else:
        text = _decode_unnamed(schema, value, declared, cast)
    return _format_output(text, schema, declared, cast)


def _decode_unnamed(schema: Mapping[str, Any], value: Any, declared: str, cast: Cast) -> str:
    match schema["type"]:
        case "boolean":
            if declared == "bit":
                return "1" if value else "0"
            return "t" if value else "f"
        case "int8" | "int16" | "int32" | "int64":
            return str(value)
        case "float" | "float32":
            return _float("float4", pa.float32(), value)
        case "double" | "float64":
            return _float("float8", pa.float64(), value)
        case "string":
            return SPECIAL.get(value, value) if declared == "numeric" else str(value)
        case "bytes":
            content = base64.b64decode(value)
            if declared.startswith("bytea"):
                return "\\x" + content.hex()
            return content.decode(errors="replace")
        case "array":
            inner = declared.removesuffix("[]")
            return _array([_element(schema["items"], item, inner, cast) for item in value])
        case "map":
            return _hstore(value)
        case other:
            raise Unreadable(f"a {other}")


def _element(schema: Mapping[str, Any], value: Any, declared: str, cast: Cast) -> Any:
    if isinstance(value, list) and schema["type"] == "array":
        return [_element(schema["items"], item, declared, cast) for item in value]
    return None if value is None else decode_value(schema, value, declared, cast)


def _format_output(text: str, schema: Mapping[str, Any], declared: str, cast: Cast) -> str:
    """Apply the output format of types whose text differs from the decoded value."""
    if declared == "money":
        return cast(text, "numeric::money")
    if declared.startswith("interval") and schema["type"] == "string":
        try:
            return cast(text, "interval")
        except Exception as error:
            raise Unreadable(f"not an interval: {text}") from error
    if declared.endswith("hstore") and schema.get("name") == "io.debezium.data.Json":
        return _hstore(json.loads(text))
    return text


def _float(label: str, arrow: pa.DataType, value: Any) -> str:
    return str(to_text(label, pa.array([float(value)], pa.float64()).cast(arrow))[0])


def _decimal(schema: Mapping[str, Any], value: Any) -> str:
    scale = int(schema["parameters"]["scale"])
    return _scaled(value, scale)


def _variable(_: Mapping[str, Any], value: Any) -> str:
    return _scaled(value["value"], int(value["scale"]))


def _scaled(value: str, scale: int) -> str:
    unscaled = int.from_bytes(base64.b64decode(value), signed=True)
    digits = tuple(map(int, str(abs(unscaled))))
    return f"{Decimal((int(unscaled < 0), digits, -scale)):f}"


def _bits(schema: Mapping[str, Any], value: Any) -> str:
    content = base64.b64decode(value)
    length = int(schema["parameters"]["length"])
    if length >= VARYING:
        # The number of digits is unknown: print the fewest.
        return f"{int.from_bytes(content, 'little'):b}" if content else ""
    return f"{int.from_bytes(content, 'little'):0{length}b}"


def _date(_: Mapping[str, Any], value: Any) -> str:
    return str(to_text("date", pa.array([value], pa.int32()).cast(pa.date32()))[0])


def _timestamp(unit: int) -> Callable[[Mapping[str, Any], Any], str]:
    def text(_: Mapping[str, Any], value: Any) -> str:
        if value in INFINITIES:
            return INFINITIES[value]
        microseconds = pa.array([value * 1_000_000 // unit], pa.int64())
        return str(to_text("timestamp", microseconds.cast(pa.timestamp("us")))[0])

    return text


def _time(unit: int) -> Callable[[Mapping[str, Any], Any], str]:
    def text(_: Mapping[str, Any], value: Any) -> str:
        seconds, microseconds = divmod(value * 1_000_000 // unit, 1_000_000)
        fraction = f".{microseconds:06d}".rstrip("0").rstrip(".")
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"

    return text


def _zoned(_: Mapping[str, Any], value: Any) -> str:
    if value in ("infinity", "-infinity"):
        return str(value)
    parts = ZONED.fullmatch(value)
    if parts is None:
        raise Unreadable(f"not a timestamp: {value}")
    year, day, minute, second, fraction = parts.groups()
    number, age = int(year), ""
    if number <= 0:
        number, age = 1 - number, " BC"
    tail = f".{fraction}".rstrip("0").rstrip(".") if fraction else ""
    return f"{number:04d}-{day} {minute}:{second or '00'}{tail}+00{age}"


def _zoned_time(_: Mapping[str, Any], value: Any) -> str:
    parts = re.fullmatch(r"(\d\d:\d\d)(?::(\d\d))?(?:\.(\d+))?(Z|[+-][\d:]+)", value)
    if parts is None:
        raise Unreadable(f"not a time: {value}")
    minute, second, fraction, zone = parts.groups()
    tail = f".{fraction}".rstrip("0").rstrip(".") if fraction else ""
    zone = "+00" if zone == "Z" else zone.removesuffix(":00")
    return f"{minute}:{second or '00'}{tail}{zone}"


def _point(_: Mapping[str, Any], value: Any) -> str:
    x, y = (_float("float8", pa.float64(), value[axis]) for axis in ("x", "y"))
    return f"({x},{y})"


def _hstore(value: Mapping[str, Any]) -> str:
    """Return an hstore literal in the order of the server: short keys first."""

    def quoted(text: Any) -> str:
        if text is None:
            return "NULL"
        return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'

    keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
    return ", ".join(f"{quoted(key)}=>{quoted(value[key])}" for key in keys)


def _array(elements: list[Any]) -> str:
    return "{" + ",".join(map(_quoted, elements)) + "}"


def _quoted(element: Any) -> str:
    if element is None:
        return "NULL"
    if isinstance(element, list):
        return _array(element)
    text = str(element)
    if text and text.upper() != "NULL" and not re.search(r'[{}",\\ \t\n\r\v\f]', text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _as_string(_: Mapping[str, Any], value: Any) -> str:
    return str(value)


_NAMED: Final[Mapping[str, Callable[[Mapping[str, Any], Any], str]]] = {
    "org.apache.kafka.connect.data.Decimal": _decimal,
    "io.debezium.data.VariableScaleDecimal": _variable,
    "io.debezium.data.Bits": _bits,
    "io.debezium.time.Date": _date,
    "io.debezium.time.Timestamp": _timestamp(1_000),
    "io.debezium.time.MicroTimestamp": _timestamp(1_000_000),
    "io.debezium.time.NanoTimestamp": _timestamp(1_000_000_000),
    "io.debezium.time.Time": _time(1_000),
    "io.debezium.time.MicroTime": _time(1_000_000),
    "io.debezium.time.NanoTime": _time(1_000_000_000),
    "io.debezium.time.ZonedTimestamp": _zoned,
    "io.debezium.time.ZonedTime": _zoned_time,
    "io.debezium.time.MicroDuration": lambda _, value: f"{value} microseconds",
    "io.debezium.time.Interval": _as_string,
    "io.debezium.data.geometry.Point": _point,
}
