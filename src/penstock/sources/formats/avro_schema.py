"""Avro schemas: inclusion of all referenced types, and compatibility of logical types.

A schema refers to types that are defined earlier in it or, with a registry, in another schema. It
also has nesting and attributes that do not affect decoding. This module converts it once to plain
JSON that contains every referenced type.

fastavro never sees logical types. Python's dates and times end at the year 9999 and cannot hold
every value, so the underlying numbers are decoded. This module checks that these numbers mean the
same to writer and reader.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from penstock.data.text_kernels.located_values import InvalidValue
from penstock.sources.formats.schema_registry import Registered

__all__ = [
    "LOGICAL",
    "MALFORMED",
    "PRIMITIVES",
    "check_meaning",
    "contains_itself",
    "definitions",
    "meaning_of",
    "parsed_schema",
    "whole_schema",
]

PRIMITIVES: Final = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
"""Primitive types, and their Arrow types."""

LOGICAL: Final = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-nanos"): pa.timestamp("ns", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("long", "local-timestamp-nanos"): pa.timestamp("ns"),
}
"""Logical types of numbers, and their Arrow types."""

MALFORMED: Final = (
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""Exceptions of decoders that read malformed bytes."""


def whole_schema(text: str, references: Sequence[tuple[str, Registered]]) -> Any:
    """Return a schema that contains all types it refers to, and only attributes for decoding.

    Names are qualified, and types have no redundant nesting.

    Raises:
        InvalidValue: the text is not a schema.
    """
    outside = dict(_all(references))
    defined: set[str] = set()

    def resolve(node: Any, space: str) -> Any:
        if isinstance(node, str):
            if node in PRIMITIVES:
                return node
            full = _full(node, space)
            if full in defined:
                return full
            if full in outside:
                return resolve(_json(outside[full].schema), "")
            raise InvalidValue(f'it names "{full[:80]}", which does not exist')
        if isinstance(node, list):
            return [resolve(branch, space) for branch in node]
        kind = node["type"]
        if isinstance(kind, dict | list):
            return resolve(kind, space)
        if kind == "array":
            return {"type": kind, "items": resolve(node["items"], space)}
        if kind == "map":
            return {"type": kind, "values": resolve(node["values"], space)}
        attributes = {
            name: node[name]
            for name in ("symbols", "default", "size", "logicalType", "precision", "scale")
            if name in node
        }
        if kind in PRIMITIVES:
            return {"type": kind, **attributes}
        if kind not in ("record", "error", "enum", "fixed"):
            return resolve(kind, space)
        full = _full(node["name"], node.get("namespace", space))
        defined.add(full)
        inside = full.rpartition(".")[0]
        attributes |= {"type": "record" if kind == "error" else kind, "name": full}
        if "aliases" in node:
            attributes["aliases"] = [_full(alias, inside) for alias in node["aliases"]]
        if kind in ("record", "error"):
            attributes["fields"] = [
                {
                    **{k: member[k] for k in ("name", "default", "aliases") if k in member},
                    "type": resolve(member["type"], inside),
                }
                for member in node["fields"]
            ]
        return attributes

    try:
        return resolve(_json(text), "")
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidValue("it is not an Avro schema") from None


def parsed_schema(whole: Any) -> Any:
    """Return the complete schema in fastavro's form, without logical types.

    Raises:
        InvalidValue: it is not a schema.
    """
    # Deferred: the package belongs to an extra.
    import fastavro
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        return fastavro.parse_schema(_stripped(whole))
    except (SchemaParseException, UnknownType, *MALFORMED):
        raise InvalidValue("it is not an Avro schema") from None


def check_meaning(writer: Any, reader: Any) -> None:
    """Check that numbers mean the same to the writer and the reader.

    Avro resolves schemas by their underlying types alone. Milliseconds would be read as
    microseconds.

    Raises:
        InvalidValue: a logical type differs.
    """
    named = definitions(writer), definitions(reader)
    seen: set[tuple[str, str]] = set()
    waiting = [(writer, reader)]
    while waiting:
        w, r = waiting.pop()
        w = named[0].get(w, w) if isinstance(w, str) else w
        r = named[1].get(r, r) if isinstance(r, str) else r
        if isinstance(w, list) or isinstance(r, list):
            ws, rs = (node if isinstance(node, list) else [node] for node in (w, r))
            waiting += [(a, b) for a in ws for b in rs if _base(a, named[0]) == _base(b, named[1])]
            continue
        if not isinstance(w, dict) or not isinstance(r, dict):
            continue
        written, read = meaning_of(w), meaning_of(r)
        if written and read and (written[0], written[2:]) != (read[0], read[2:]):
            raise InvalidValue(f"{_logical_type_text(written)} is not {_logical_type_text(read)}")
        waiting += [(w[part], r[part]) for part in ("items", "values") if part in w and part in r]
        if "fields" in w and "fields" in r and (w["name"], r["name"]) not in seen:
            seen.add((w["name"], r["name"]))
            ours = {n: e for e in r["fields"] for n in (*e.get("aliases", ()), e["name"])}
            waiting += [
                (member["type"], ours[member["name"]]["type"])
                for member in w["fields"]
                if member["name"] in ours
            ]


def definitions(node: Any) -> dict[str, Any]:
    """Return the named types by name."""
    by_name: dict[str, Any] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if "name" in node:
                by_name[node["name"]] = node
            waiting += [node[inner] for inner in ("items", "values") if inner in node]
            waiting += [member["type"] for member in node.get("fields", ())]
    return by_name


def meaning_of(node: Any) -> tuple[Any, ...] | None:
    """Return the logical type of a node with its parameters; None without a valid one."""
    if not isinstance(node, dict) or "logicalType" not in node:
        return None
    word = node["logicalType"]
    if word == "decimal":
        precision, scale = node.get("precision"), node.get("scale", 0)
        decimal = (
            node["type"] in ("bytes", "fixed")
            and isinstance(precision, int)
            and isinstance(scale, int)
            and 0 <= scale <= precision
            and 1 <= precision <= 76
        )
        return ("decimal", precision, scale) if decimal else None
    if word == "uuid" and node["type"] == "fixed" and node["size"] == 16:
        return ("uuid",)
    return (word,) if (node["type"], word) in LOGICAL else None


def contains_itself(node: Any, named: Mapping[str, Any]) -> bool:
    """Return whether a record contains itself, at any depth."""
    seen: set[str] = set()
    waiting = [each["type"] for each in node["fields"]]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            if inner in PRIMITIVES or inner in seen:
                continue
            inner = named[inner]
        if isinstance(inner, list):
            waiting += inner
            continue
        name = inner.get("name")
        if name == node["name"]:
            return True
        if name is not None:
            seen.add(name)
        waiting += [inner[part] for part in ("items", "values") if part in inner]
        waiting += [each["type"] for each in inner.get("fields", ())]
    return False


def _all(
    references: Sequence[tuple[str, Registered]],
) -> Sequence[tuple[str, Registered]]:
    return [
        pair
        for name, registered in references
        for pair in (*_all(registered.references), (name, registered))
    ]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        # A registry may return the schema "string" as that word without quotes.
        if text.strip() in PRIMITIVES:
            return text.strip()
        raise InvalidValue("it is not JSON") from None


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _stripped(node: Any) -> Any:
    if isinstance(node, list):
        return [_stripped(branch) for branch in node]
    if not isinstance(node, dict):
        return node
    physical = {k: v for k, v in node.items() if k not in ("logicalType", "precision", "scale")}
    for inner in ("items", "values"):
        if inner in physical:
            physical[inner] = _stripped(physical[inner])
    if "fields" in physical:
        physical["fields"] = [
            {**member, "type": _stripped(member["type"])} for member in physical["fields"]
        ]
    return physical


def _base(node: Any, named: Mapping[str, Any]) -> Any:
    node = named.get(node, node) if isinstance(node, str) else node
    return node["type"] if isinstance(node, dict) else node


def _logical_type_text(meaning: tuple[Any, ...]) -> str:
    return f"decimal({meaning[1]},{meaning[2]})" if meaning[0] == "decimal" else str(meaning[0])
