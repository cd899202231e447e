"""Mapping of a Postgres column to an Arrow type, and conversion in both directions.

Values arrive in two forms. A text stream contains each value as the server prints it. The
snapshot and a binary stream contain the binary format of the type. The snapshot may
read an expression instead of the column. For every value,

    from_copy(field) = from_text(text)    and    to_text(label, from_text(text)) = text

or the value is rejected with the name of its column. The equality is necessary because a
row that arrived in one form may be retracted in the other.

    boolean                      bool
    smallint, integer, bigint    int16, int32, int64
    oid, xid, cid                int64
    real, double precision       float, double
    numeric(p, s)                decimal128(p, s), if p <= 38 and 0 <= s <= p
    bytea                        binary
    date                         date32
    timestamp, timestamptz       timestamp[us], in UTC if it has a zone
    array                        struct<elements: list<…>, shape: string>
    domain                       like its base type
    all others                   string, as the server prints them

SUBTLE: a cast to text differs from the type's output function. The cast does not pad
char(n), adds /32 to an inet, and returns `true` instead of `t`. Users can define their own
casts for their own types. The expressions in this module therefore call the output
function of the type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa

from penstock.errors import DefiniteError, InternalError, PenstockError, UsageError
from penstock.sources.postgres.catalog_types import PgColumn, PgType
from penstock.sources.postgres.types.arrays import array_of, parse_arrays, print_arrays
from penstock.sources.postgres.types.cells import Refused, Why
from penstock.sources.postgres.types.decimals import (
    parse_decimals,
    print_decimals,
    receive_decimals,
)
from penstock.sources.postgres.types.numbers import (
    parse_bools,
    parse_floats,
    parse_integers,
    parse_oids,
    print_bools,
    print_floats,
    print_integers,
    receive_bools,
    receive_floats,
    receive_integers,
    receive_oids,
)
from penstock.sources.postgres.types.strings import (
    parse_bytes,
    parse_strings,
    print_bytes,
    receive_bytes,
    receive_uuids,
)
from penstock.sources.postgres.types.timestamps import (
    parse_dates,
    parse_timestamps,
    print_dates,
    print_timestamps,
    receive_dates,
    receive_timestamps,
)

__all__ = ["ColumnType", "column_type", "to_text"]

AS_IS: Final = "{0}"
BY_FORMAT: Final = "CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {0}) END"
"""Output of any type's output function, with null as null.

`IS DISTINCT FROM NULL` is necessary: for a composite value, `IS NOT NULL` tests its fields.
"""

NUMERIC: Final = 1700
BOX: Final = 603
FIRST_OF_USERS: Final = 16384
"""Least oid of a user-defined type."""

Conversion = Callable[[pa.Array, pa.DataType], pa.Array]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """Storage type of a column, and the conversion of its values."""

    column: str
    arrow: pa.DataType
    label: str
    """Postgres type, stored with the field. Readers use it to print values like the server."""

    select: str = AS_IS
    """SQL template for COPY; its parameter is the quoted column name."""

    binary: bool = False
    """True if COPY returns the binary format of the type, false if text."""

    @property
    def as_sent(self) -> bool:
        """Return whether COPY reads the column itself, so its binary format is supported."""
        return self.select == AS_IS

    def from_text(self, values: pa.Array) -> pa.Array:
        """Return the column, parsed from the server's text output.

        Raises:
            DefiniteError: the column's type cannot represent a value exactly.
        """
        return self._read(_parser(self.label, self.arrow), values)

    def from_copy(self, values: pa.Array) -> pa.Array:
        """Return the column, decoded from binary COPY fields of `select`.

        Raises:
            DefiniteError: the column's type cannot represent a value exactly.
        """
        if self.binary:
            return self._read(_RECEIVERS[self.label], values)
        return self.from_text(values)

    def _read(self, convert: Conversion, values: pa.Array) -> pa.Array:
        try:
            return convert(values, self.arrow)
        except Refused as refused:
            cell = values.cast(pa.large_binary())[refused.row].as_py()
            raise _error(self, refused.why, cell) from None


def column_type(column: PgColumn, *, text: bool) -> ColumnType:
    """Return the storage type of `column`; with `text`, the server's text output."""
    kind, typmod, domain = _resolved(column.type, column.typmod)
    if kind.element is not None and kind.name.endswith("[]"):
        printed = BY_FORMAT if domain else _output("array_out")
        element, typmod, _ = _resolved(kind.element, typmod)
        label, arrow = _plain(element, typmod)
        if text or not _parted_by_comma(element):
            return ColumnType(column.name, pa.string(), f"{label}[]", printed)
        return ColumnType(column.name, array_of(arrow), f"{label}[]", printed)
    label, arrow = _plain(kind, typmod)
    if pa.types.is_string(arrow) or text:
        if label in _STRINGS_AS_IS or kind.kind == "e":
            return ColumnType(column.name, pa.string(), label)
        if label == "uuid":
            return ColumnType(column.name, pa.string(), label, binary=True)
        return ColumnType(column.name, pa.string(), label, _printed(kind, domain=domain))
    return ColumnType(column.name, arrow, label, binary=True)


def to_text(label: str, values: pa.Array) -> pa.Array:
    """Return the exact text that the server prints for values of this label.

    The text assumes the pinned session settings.

    Raises:
        UsageError: the values do not have the Arrow type of this label.
    """
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values.cast(pa.string())
    if pa.types.is_struct(values.type) and label.endswith("[]"):
        return print_arrays(values, partial(to_text, label[:-2]))
    printed = _PRINTERS.get(label)
    if printed is None:
        raise UsageError(
            f'values of {values.type} are not of the Postgres type "{label}"',
            hint="Take the label from the metadata of the column's own field.",
        )
    return printed(values)


def _resolved(kind: PgType, typmod: int) -> tuple[PgType, int, bool]:
    """Return the base type, its modifier, and whether the type was a domain."""
    domain = False
    while kind.base is not None:
        typmod, kind, domain = kind.typmod, kind.base, True
    return kind, typmod if typmod != -1 else kind.typmod, domain


def _plain(kind: PgType, typmod: int) -> tuple[str, pa.DataType]:
    """Return label and Arrow type of a type that is not an array."""
    if kind.oid == NUMERIC:
        return "numeric", _decimal(typmod)
    known = _OWN.get(kind.oid)
    return known if known is not None else (kind.name, pa.string())


def _decimal(typmod: int) -> pa.DataType:
    """Return the decimal type for a numeric modifier, or text if none fits."""
    if typmod < 4:
        return pa.string()
    precision = ((typmod - 4) >> 16) & 0xFFFF
    scale = (((typmod - 4) & 0x7FF) ^ 1024) - 1024  # Signed 11-bit number.
    if precision > 38 or not 0 <= scale <= precision:
        return pa.string()
    return pa.decimal128(precision, scale)


def _parted_by_comma(element: PgType) -> bool:
    """Return whether the array delimiter of the type is certain to be a comma."""
    if element.kind == "b":
        return element.oid < FIRST_OF_USERS and element.oid != BOX
    return element.kind in "cemr"


def _printed(kind: PgType, *, domain: bool) -> str:
    """Return the SQL expression for the server's text output."""
    known = _OUTPUTS.get(kind.oid)
    if known is not None:
        return _output(known)
    generic = {"c": "record_out", "r": "range_out", "m": "multirange_out"}.get(kind.kind)
    return BY_FORMAT if generic is None or domain else _output(generic)


def _output(function: str) -> str:
    return f"pg_catalog.textin(pg_catalog.{function}({AS_IS}))"


def _parser(label: str, arrow: pa.DataType) -> Conversion:
    if pa.types.is_string(arrow):
        return parse_strings
    if pa.types.is_struct(arrow):
        inner = arrow.field("elements").type.value_type
        return partial(parse_arrays, parse=_parser(label[:-2], inner))
    return _PARSERS[label]


def _error(kind: ColumnType, why: Why, cell: bytes) -> PenstockError:
    sample = f"The bytes are {cell[:60]!r}{'…' if len(cell) > 60 else ''}."
    as_text = f'List "{kind.column}" under "text" of its table, to store it as text.'
    subject = f'column "{kind.column}" of type {kind.label}'
    match why:
        case Why.NOT_FINITE:
            return DefiniteError(
                f"{subject} holds NaN, which {_leaf(kind.arrow)} cannot",
                detail="Postgres allows NaN in every numeric; a decimal has only numbers.",
                hint=as_text,
            )
        case Why.BEYOND:
            return DefiniteError(
                f"{subject} holds a time after the year 294246",
                detail="Microseconds since 1970 do not reach further in 64 bits.",
                hint=as_text,
            )
        case Why.SCALE:
            return DefiniteError(
                f"{subject} holds a number that is not a {_leaf(kind.arrow)}",
                detail=f"It has other digits than the column declares. {sample}",
                hint=as_text,
            )
        case Why.ENCODING:
            return DefiniteError(
                f"{subject} holds text that is not UTF-8",
                detail=f"A server whose own encoding is SQL_ASCII does not convert. {sample}",
                hint="Correct the rows there, or exclude the column.",
            )
        case _:
            return InternalError(
                f"{subject} has a text that the server does not print under the pinned settings",
                detail=sample,
                hint="Check for a proxy in front of the server that resets session settings.",
            )


def _leaf(kind: pa.DataType) -> pa.DataType:
    return kind.field("elements").type.value_type if pa.types.is_struct(kind) else kind


_OWN: Final[dict[int, tuple[str, pa.DataType]]] = {
    16: ("bool", pa.bool_()),
    17: ("bytea", pa.binary()),
    18: ("char", pa.string()),
    19: ("name", pa.string()),
    20: ("int8", pa.int64()),
    21: ("int2", pa.int16()),
    23: ("int4", pa.int32()),
    25: ("text", pa.string()),
    26: ("oid", pa.int64()),
    28: ("xid", pa.int64()),
    29: ("cid", pa.int64()),
    114: ("json", pa.string()),
    142: ("xml", pa.string()),
    650: ("cidr", pa.string()),
    700: ("float4", pa.float32()),
    701: ("float8", pa.float64()),
    774: ("macaddr8", pa.string()),
    790: ("money", pa.string()),
    829: ("macaddr", pa.string()),
    869: ("inet", pa.string()),
    1042: ("bpchar", pa.string()),
    1043: ("varchar", pa.string()),
    1082: ("date", pa.date32()),
    1083: ("time", pa.string()),
    1114: ("timestamp", pa.timestamp("us")),
    1184: ("timestamptz", pa.timestamp("us", "UTC")),
    1186: ("interval", pa.string()),
    1266: ("timetz", pa.string()),
    1560: ("bit", pa.string()),
    1562: ("varbit", pa.string()),
    2950: ("uuid", pa.string()),
    3802: ("jsonb", pa.string()),
}
"""Built-in types by oid. Other types are stored as text under their name."""

_OUTPUTS: Final = {
    16: "boolout",
    17: "byteaout",
    18: "charout",
    20: "int8out",
    21: "int2out",
    23: "int4out",
    26: "oidout",
    28: "xidout",
    29: "cidout",
    142: "xml_out",
    650: "cidr_out",
    700: "float4out",
    701: "float8out",
    774: "macaddr8_out",
    790: "cash_out",
    829: "macaddr_out",
    869: "inet_out",
    1082: "date_out",
    1083: "time_out",
    1114: "timestamp_out",
    1184: "timestamptz_out",
    1186: "interval_out",
    1266: "timetz_out",
    1560: "bit_out",
    1562: "varbit_out",
    1700: "numeric_out",
    3802: "jsonb_out",
}
"""Output functions by type oid, where a direct call is preferable to `format`."""

_STRINGS_AS_IS: Final = frozenset({"text", "varchar", "bpchar", "name", "json"})
"""Types whose binary format is their text output. This is also true of enums."""

_PARSERS: Final[dict[str, Conversion]] = {
    "bool": parse_bools,
    "bytea": parse_bytes,
    "int2": parse_integers,
    "int4": parse_integers,
    "int8": parse_integers,
    "oid": parse_oids,
    "xid": parse_oids,
    "cid": parse_oids,
    "float4": parse_floats,
    "float8": parse_floats,
    "numeric": parse_decimals,
    "date": parse_dates,
    "timestamp": parse_timestamps,
    "timestamptz": parse_timestamps,
}

_RECEIVERS: Final[dict[str, Conversion]] = {
    "bool": receive_bools,
    "bytea": receive_bytes,
    "int2": receive_integers,
    "int4": receive_integers,
    "int8": receive_integers,
    "oid": receive_oids,
    "xid": receive_oids,
    "cid": receive_oids,
    "float4": receive_floats,
    "float8": receive_floats,
    "numeric": receive_decimals,
    "date": receive_dates,
    "timestamp": receive_timestamps,
    "timestamptz": receive_timestamps,
    "uuid": receive_uuids,
}

_PRINTERS: Final[dict[str, Callable[[pa.Array], pa.Array]]] = {
    "bool": print_bools,
    "bytea": print_bytes,
    "int2": print_integers,
    "int4": print_integers,
    "int8": print_integers,
    "oid": print_integers,
    "xid": print_integers,
    "cid": print_integers,
    "float4": print_floats,
    "float8": print_floats,
    "numeric": print_decimals,
    "date": print_dates,
    "timestamp": print_timestamps,
    "timestamptz": print_timestamps,
}
