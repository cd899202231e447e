"""Avro: records of a schema that is fixed here, whichever schema they were written with.

With a registry each record says by its first five bytes which schema wrote it;
without one all were written with one that is given. What a record becomes is
decided once, from the schema it is read with:

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

Anything else is a union of several types, a record that contains itself or has
no fields. Python's own dates and times end at the year 9999 and would not hold
every value, so logical types are read as the numbers they are, and become
Arrow's.
"""

import io
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any, Final, Self

import fastavro
import msgspec
import pyarrow as pa
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException, UnknownType

from penstock.errors import UsageError
from penstock.sources.kafka.formats.cells import Unfit
from penstock.sources.kafka.formats.format import Bad, Decoded, blanked, chunks_of
from penstock.sources.kafka.formats.registry import NoSuchSchema, Registered, Registry
from penstock.sources.kafka.formats.schema import fit_for_collections

__all__ = ["AvroFormat"]

VALUE: Final = "value"
"""The column of a schema that is no record."""

_PRIMITIVES: Final = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Final = {
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
_WIDE: Final = Context(prec=100)
_MALFORMED: Final = (
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
"""What comes of reading bytes that are not what they are taken for."""

Ready = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class AvroFormat:
    """Records that are Avro, read as `reader`."""

    reader: str
    """The schema whose fields are the columns, as JSON."""

    writer: str | None = None
    """The schema that wrote all records, if it is another and there is no registry."""

    registry: Registry | None = None
    """Where the ids are known with which records begin."""

    reader_references: tuple[tuple[str, Registered], ...] = ()
    """What `reader` names and does not hold."""

    schema: pa.Schema = field(init=False)
    _kept: dict[Any, Any] = field(init=False, repr=False, compare=False)
    """What was made of schemas; made again where this is unpickled."""

    def __post_init__(self) -> None:
        if self.writer is not None and self.registry is not None:
            raise UsageError(
                "avro format has a writer's schema and a registry",
                hint="Leave the schema out: records of a registry say what wrote them.",
            )
        object.__setattr__(self, "_kept", {})
        plan = self._plan()
        fields = [pa.field(name, kind.arrow) for name, kind in plan.columns]
        schema = fit_for_collections(pa.schema(fields), what="avro format")
        object.__setattr__(self, "schema", schema)
        if self.writer is not None:
            whole = _given(self.writer, (), "writer's schema of avro format")
            try:
                _check_meaning(whole, plan.whole)
            except Unfit as unfit:
                raise UsageError(
                    f"writer's schema of avro format cannot be read as the reader's: {unfit}",
                    hint="Give the type that the writer has.",
                ) from None
            self._kept["writer"] = _parsed(whole)

    @classmethod
    def of(cls, registered: Registered, registry: Registry) -> Self:
        """Read as a schema of the registry, such as the latest of a subject."""
        return cls(registered.schema, registry=registry, reader_references=registered.references)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.reader, self.writer, self.registry, self.reader_references

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        names = ("reader", "writer", "registry", "reader_references")
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Rows of `schema`.

        Raises:
            TransientError: the registry did not tell a schema.
            DefiniteError: it refuses to.
        """
        plan = self._plan()
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            reasons: dict[int, str] = {}
            rows = [self._read(value, row, reasons) for row, value in enumerate(chunk.to_pylist())]
            columns = [
                kind.array([None if row is None else row[name] for row in rows], name, reasons)
                for name, kind in plan.columns
            ]
            tables.append(blanked(columns, self.schema, reasons))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))

    def _read(self, value: bytes | None, row: int, bad: dict[int, str]) -> Any:
        """One record as names and values, or None."""
        if value is None:
            return None
        try:
            return self._datum(value)
        except Unfit as unfit:
            bad[row] = str(unfit)
            return None

    def _datum(self, value: bytes) -> Any:
        plan, start, written_with = self._plan(), 0, "its schema"
        writer = self._kept.get("writer", plan.parsed)
        if self.registry is not None:
            if len(value) < 5 or value[0] != 0:
                raise Unfit("it does not begin with a zero byte and the id of a schema")
            start, id = 5, int.from_bytes(value[1:5], "big")
            writer, written_with = self._writer(id), f"schema id {id}"
        data = io.BytesIO(value)
        data.seek(start)
        try:
            datum = fastavro.schemaless_reader(
                data, writer, None if writer is plan.parsed else plan.parsed
            )
        except SchemaResolutionError:
            raise Unfit(f"{written_with}, which wrote it, cannot be read as ours") from None
        except _MALFORMED:
            raise Unfit(f"it is not Avro of {written_with}") from None
        if rest := len(value) - data.tell():
            raise Unfit(f"it is not Avro of {written_with}: {rest} bytes follow")
        return datum if plan.record else {VALUE: datum}

    def _writer(self, id: int) -> Any:
        assert self.registry is not None
        known = self._kept.get(id)
        if known is None:
            try:
                found = self.registry.by_id(id)
                if found.kind != "AVRO":
                    raise Unfit(f"it is {found.kind}, and not Avro")
                whole = whole_schema(found.schema, found.references)
                _check_meaning(whole, self._plan().whole)
                known = _parsed(whole)
            except NoSuchSchema:
                known = Unfit(f"schema id {id} does not exist in the registry")
            except Unfit as unfit:
                known = Unfit(f"schema id {id}, which wrote it, cannot be read as ours: {unfit}")
            self._kept[id] = known
        if isinstance(known, Unfit):
            raise Unfit(str(known))
        return known

    def _plan(self) -> "_Plan":
        if "plan" not in self._kept:
            whole = _given(self.reader, self.reader_references, "schema of avro format")
            self._kept["plan"] = _Plan.of(whole)
        plan: _Plan = self._kept["plan"]
        return plan


@dataclass(frozen=True, slots=True)
class _Kind:
    """What values of a schema become."""

    arrow: pa.DataType
    ready: Ready | None = None
    """What Arrow takes for a value that is not null; None if that is the value."""

    def array(self, values: list[Any], name: str, bad: dict[int, str]) -> pa.Array:
        """A column, null where a value does not fit, which is told in `bad`."""
        try:
            return pa.array(self._ready(values), self.arrow)
        except _MALFORMED:
            pass
        kept = []
        for row, value in enumerate(values):
            try:
                kept.append(pa.array(self._ready([value]), self.arrow))
            except _MALFORMED:
                bad.setdefault(
                    row, f'column "{name}" is {self.arrow}, which its value does not fit'
                )
                kept.append(pa.nulls(1, self.arrow))
        return pa.concat_arrays(kept) if kept else pa.nulls(0, self.arrow)

    def _ready(self, values: list[Any]) -> list[Any]:
        ready = self.ready
        return values if ready is None else [None if v is None else ready(v) for v in values]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How records of one schema are read."""

    whole: Any
    parsed: Any
    record: bool
    columns: tuple[tuple[str, _Kind], ...]

    @classmethod
    def of(cls, whole: Any) -> Self:
        named = _definitions(whole)
        parsed = _parsed(whole)
        if isinstance(whole, dict) and whole["type"] == "record":
            columns = tuple(
                (each["name"], _kind(each["type"], named, (whole["name"],)))
                for each in whole["fields"]
            )
            return cls(whole, parsed, True, columns)
        return cls(whole, parsed, False, ((VALUE, _kind(whole, named, ())),))


def whole_schema(text: str, references: Sequence[tuple[str, Registered]]) -> Any:
    """A schema with all that it names in it, and only what bears on reading.

    Names are full, types are never wrapped for nothing.

    Raises:
        Unfit: it is no schema.
    """
    outside = dict(_all(references))
    defined: set[str] = set()

    def walk(node: Any, space: str) -> Any:
        if isinstance(node, str):
            if node in _PRIMITIVES:
                return node
            full = _full(node, space)
            if full in defined:
                return full
            if full in outside:
                return walk(_json(outside[full].schema), "")
            raise Unfit(f'it names "{full[:80]}", which is not there')
        if isinstance(node, list):
            return [walk(each, space) for each in node]
        kind = node["type"]
        if isinstance(kind, dict | list):
            return walk(kind, space)
        if kind == "array":
            return {"type": kind, "items": walk(node["items"], space)}
        if kind == "map":
            return {"type": kind, "values": walk(node["values"], space)}
        kept = {
            name: node[name]
            for name in ("symbols", "default", "size", "logicalType", "precision", "scale")
            if name in node
        }
        if kind in _PRIMITIVES:
            return {"type": kind, **kept}
        if kind not in ("record", "error", "enum", "fixed"):
            return walk(kind, space)
        full = _full(node["name"], node.get("namespace", space))
        defined.add(full)
        inside = full.rpartition(".")[0]
        kept |= {"type": "record" if kind == "error" else kind, "name": full}
        if "aliases" in node:
            kept["aliases"] = [_full(alias, inside) for alias in node["aliases"]]
        if kind in ("record", "error"):
            kept["fields"] = [
                {
                    **{k: each[k] for k in ("name", "default", "aliases") if k in each},
                    "type": walk(each["type"], inside),
                }
                for each in node["fields"]
            ]
        return kept

    try:
        return walk(_json(text), "")
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise Unfit("it is no Avro schema") from None


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
        # A registry has the schema "string" also as that word alone.
        if text.strip() in _PRIMITIVES:
            return text.strip()
        raise Unfit("it is not JSON") from None


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _given(text: str, references: Sequence[tuple[str, Registered]], what: str) -> Any:
    try:
        whole = whole_schema(text, references)
        _parsed(whole)
    except Unfit as unfit:
        raise UsageError(
            f"{what} cannot be understood: {unfit}", hint="Give an Avro schema as JSON."
        ) from None
    return whole


def _parsed(whole: Any) -> Any:
    """The schema as fastavro takes it, without logical types."""
    try:
        return fastavro.parse_schema(_stripped(whole))
    except (SchemaParseException, UnknownType, *_MALFORMED):
        raise Unfit("it is no Avro schema") from None


def _stripped(node: Any) -> Any:
    if isinstance(node, list):
        return [_stripped(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {k: v for k, v in node.items() if k not in ("logicalType", "precision", "scale")}
    for inner in ("items", "values"):
        if inner in kept:
            kept[inner] = _stripped(kept[inner])
    if "fields" in kept:
        kept["fields"] = [{**each, "type": _stripped(each["type"])} for each in kept["fields"]]
    return kept


def _definitions(node: Any) -> dict[str, Any]:
    """The types that have names, by them."""
    found: dict[str, Any] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if "name" in node:
                found[node["name"]] = node
            waiting += [node[inner] for inner in ("items", "values") if inner in node]
            waiting += [each["type"] for each in node.get("fields", ())]
    return found


def _logical(node: Any) -> tuple[Any, ...] | None:
    """What a number or some bytes mean, if they mean something else."""
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
    return (word,) if (node["type"], word) in _LOGICAL else None


def _kind(node: Any, named: Mapping[str, Any], around: tuple[str, ...]) -> _Kind:
    """What values of `node` become; `around` names the records that it is in."""
    if isinstance(node, str) and node in named:
        node = named[node]
    if isinstance(node, str):
        return _Kind(_PRIMITIVES[node], _bytes if node == "bytes" else None)
    if isinstance(node, list):
        others = [each for each in node if each != "null"]
        return _kind(others[0], named, around) if len(others) == 1 else _AS_JSON
    match _logical(node):
        case ("decimal", precision, scale):
            kind = pa.decimal128 if precision <= 38 else pa.decimal256
            return _Kind(kind(precision, scale), lambda value: _decimal(value, scale))
        case ("uuid",):
            return _Kind(pa.string(), _uuid)
        case (word,):
            return _Kind(_LOGICAL[node["type"], word])
        case _:
            return _unmarked(node, named, around)


def _unmarked(node: Any, named: Mapping[str, Any], around: tuple[str, ...]) -> _Kind:
    """The same of a type that means just what it is."""
    match node["type"]:
        case "enum":
            return _Kind(pa.string())
        case "fixed":
            return _Kind(pa.binary(node["size"]), _bytes) if node["size"] else _AS_JSON
        case "array":
            item = _kind(node["items"], named, around)
            return _Kind(pa.list_(item.arrow), _each(item))
        case "map":
            item = _kind(node["values"], named, around)
            return _Kind(pa.map_(pa.string(), item.arrow), _entries(item))
        case "record":
            if node["name"] in around or not node["fields"] or _contains_itself(node, named):
                return _AS_JSON
            inside = [
                (each, _kind(each["type"], named, (*around, node["name"])))
                for each in node["fields"]
            ]
            return _Kind(pa.struct([(e["name"], k.arrow) for e, k in inside]), _members(inside))
        case primitive:
            return _kind(primitive, named, around)


def _contains_itself(node: Any, named: Mapping[str, Any]) -> bool:
    seen: set[str] = set()
    waiting = [each["type"] for each in node["fields"]]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            if inner in _PRIMITIVES or inner in seen:
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


def _bytes(value: Any) -> bytes:
    # A default is written as text, of which each character is a byte.
    return value.encode("latin-1") if isinstance(value, str) else value


def _decimal(value: Any, scale: int) -> Decimal:
    unscaled = Decimal(int.from_bytes(_bytes(value), "big", signed=True))
    return unscaled.scaleb(-scale, _WIDE)


def _uuid(value: Any) -> str:
    digits = _bytes(value).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _each(item: _Kind) -> Ready | None:
    ready = item.ready
    if ready is None:
        return None
    return lambda values: [None if each is None else ready(each) for each in values]


def _entries(item: _Kind) -> Ready:
    ready = item.ready
    if ready is None:
        return lambda values: list(values.items())
    return lambda values: [(k, None if v is None else ready(v)) for k, v in values.items()]


def _members(inside: list[tuple[Any, _Kind]]) -> Ready | None:
    if all(kind.ready is None and "default" not in each for each, kind in inside):
        return None

    def members(values: Any) -> Any:
        said = {}
        for each, kind in inside:
            # A record that is itself a default may leave out members that have one.
            value = values[each["name"]] if each["name"] in values else each["default"]
            said[each["name"]] = value if value is None or not kind.ready else kind.ready(value)
        return said

    return members


def _as_json(value: Any) -> str:
    return msgspec.json.encode(_jsonable(value), order="sorted").decode()


def _jsonable(value: Any) -> Any:
    """`value` with words for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


_AS_JSON: Final = _Kind(pa.string(), _as_json)


def _check_meaning(writer: Any, reader: Any) -> None:
    """That numbers mean to the reader what they meant to the writer.

    Avro resolves them by their plain types alone, so that milliseconds would pass for
    microseconds.

    Raises:
        Unfit: they do not.
    """
    named = _definitions(writer), _definitions(reader)
    seen: set[tuple[str, str]] = set()
    waiting = [(writer, reader)]
    while waiting:
        w, r = waiting.pop()
        w = named[0].get(w, w) if isinstance(w, str) else w
        r = named[1].get(r, r) if isinstance(r, str) else r
        if isinstance(w, list) or isinstance(r, list):
            ws, rs = (each if isinstance(each, list) else [each] for each in (w, r))
            waiting += [(a, b) for a in ws for b in rs if _base(a, named[0]) == _base(b, named[1])]
            continue
        if not isinstance(w, dict) or not isinstance(r, dict):
            continue
        said, read = _logical(w), _logical(r)
        if said and read and (said[0], said[2:]) != (read[0], read[2:]):
            raise Unfit(f"{_shown(said)} is not {_shown(read)}")
        waiting += [(w[part], r[part]) for part in ("items", "values") if part in w and part in r]
        if "fields" in w and "fields" in r and (w["name"], r["name"]) not in seen:
            seen.add((w["name"], r["name"]))
            ours = {n: e for e in r["fields"] for n in (*e.get("aliases", ()), e["name"])}
            waiting += [
                (each["type"], ours[each["name"]]["type"])
                for each in w["fields"]
                if each["name"] in ours
            ]


def _base(node: Any, named: Mapping[str, Any]) -> Any:
    node = named.get(node, node) if isinstance(node, str) else node
    return node["type"] if isinstance(node, dict) else node


def _shown(logical: tuple[Any, ...]) -> str:
    return f"decimal({logical[1]},{logical[2]})" if logical[0] == "decimal" else str(logical[0])
