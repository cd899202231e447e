"""Debezium change events: row before and after the change, and its place in the source's log.

An event becomes

    op                       c, u, d, r (read by a snapshot), t (truncate), m (message)
    origin                   its log: connector, name, database and server
    happened_ms              commit time, by the database's clock
    position                 bytes in the order of the source's log, or null
    transaction              its id, see `transaction_ids.py`
    total_order              order of the event in its transaction
    data_collection_order    order among the events of its table
    before, after            the row, or null

and a null value, Debezium's tombstone, becomes nulls.

Positions are compared as bytes, among events of one partition and one origin:

    Postgres     the last commit before it and its own LSN, from `sequence`
    MySQL        number of the binlog file, position in it, row of the event
    SQL Server   commit_lsn, because change_lsn decreases within a transaction

A last byte is lower for a deletion, because a change of the key is written as a deletion and a
creation at one place. Events that a snapshot read have no position: they all have one place in the
log. Events of other connectors have no position. Neither have Postgres events without `sequence`:
their LSN alone decreases where transactions overlap.

Rows that one COPY loaded share a position. `dedup.py` defines the meaning of a lower position.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.text_kernels.located_values import NOTHING, OBJECT, LocatedValues
from penstock.errors import UsageError
from penstock.sources.debezium.dedup import LOG
from penstock.sources.debezium.transaction_ids import join_array
from penstock.sources.formats.avro_format import AvroFormat
from penstock.sources.formats.column_reader import raw_text, read_column
from penstock.sources.formats.column_types import Column
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of, shortened
from penstock.sources.formats.json_format import JsonFormat
from penstock.sources.formats.json_scanner import locate_values

__all__ = ["OPS", "DebeziumAvro", "DebeziumJson"]

OPS: Final = ("c", "u", "d", "r", "t", "m")

_ENVELOPE: Final = ("op", "before", "after", "source", "transaction")
_NAMES: Final = (*_ENVELOPE, "payload")
_SOURCE: Final = tuple(
    Column.parse(name, type_name)
    for name, type_name in {
        "connector": "text",
        "snapshot": "json",
        "sequence": "text",
        "file": "text",
        "pos": "bigint",
        "row": "bigint",
        "commit_lsn": "text",
        "name": "text",
        "db": "text",
        "server_id": "bigint",
        "ts_ms": "bigint",
    }.items()
)
_TRANSACTION: Final = tuple(
    Column.parse(name, type_name)
    for name, type_name in {
        "id": "text",
        "total_order": "bigint",
        "data_collection_order": "bigint",
    }.items()
)
_SEQUENCE: Final = r'^\[(?:null|"(?P<commit>[0-9]{1,18})"), ?"(?P<lsn>[0-9]{1,18})"\]$'
_FILE: Final = r"\.(?P<number>[0-9]{1,18})$"
_LSN: Final = r"^(?P<a>[0-9a-f]{8}):(?P<b>[0-9a-f]{8}):(?P<c>[0-9a-f]{4})$"

Named = Mapping[str, pa.Array]


@dataclass(frozen=True, slots=True)
class DebeziumJson:
    """Change events in JSON, with or without an embedded schema."""

    row: JsonFormat
    """Format of `before` and `after`."""

    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", _schema(pa.struct(list(self.row.schema))))

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`."""
        tables: list[pa.Table] = []
        bad: list[Bad] = []
        for first, chunk in chunks_of(values):
            columns, reasons = self._columns(chunk)
            tables.append(blanked(columns, self.schema, reasons))
            bad += [Bad(first + row, reasons[row]) for row in sorted(reasons)]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return Decoded(rows, tuple(bad))

    def _columns(self, chunk: pa.Array) -> tuple[list[pa.Array], dict[int, str]]:
        values, bad = locate_values(chunk, _NAMES)
        no_op, payload = values.kinds[0] == NOTHING, values.kinds[-1]
        is_wrapped = no_op & (payload == OBJECT)
        is_tombstone = _wraps_null(chunk, no_op & (payload == NOTHING))
        if is_wrapped.any():
            inner = raw_text(values, -1, is_wrapped).cast(pa.binary())
            chunk = pc.if_else(pa.array(is_wrapped), inner, chunk)
            values, inner_bad = locate_values(chunk, _NAMES)
            bad |= inner_bad
        is_event = chunk.is_valid().to_numpy(zero_copy_only=False) & ~is_tombstone
        is_event[list(bad)] = False
        values.kinds[:, ~is_event] = NOTHING
        op, reasons = read_column(values, 0, Column.parse("op", "text"))
        _merge(bad, reasons)
        source = _members(values, 3, _SOURCE)
        transaction = _members(values, 4, _TRANSACTION)
        before = self._row(values, 1, "before", bad)
        after = self._row(values, 2, "after", bad)
        _check(op, after, is_event, bad)
        return _columns(op, before, after, source, transaction), bad

    def _row(self, values: LocatedValues, index: int, name: str, bad: dict[int, str]) -> pa.Array:
        kinds = values.kinds[index]
        for row in np.flatnonzero((kinds != OBJECT) & (kinds != NOTHING)).tolist():
            bad.setdefault(row, f"its {name} is not an object")
        is_object = kinds == OBJECT
        texts = raw_text(values, index, is_object).cast(pa.binary())
        decoded = self.row.decode(pa.chunked_array([texts]))
        _merge(bad, {record.row: f"{name}: {record.reason}" for record in decoded.bad})
        columns = [column.combine_chunks() for column in decoded.rows.columns]
        fields = list(self.row.schema)
        return pa.StructArray.from_arrays(columns, fields=fields, mask=pa.array(~is_object))


@dataclass(frozen=True, slots=True)
class DebeziumAvro:
    """Change events in Avro."""

    envelope: AvroFormat
    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        types = {column.name: column.type for column in self.envelope.schema}
        before, after = types.get("before"), types.get("after")
        if (
            after is None
            or not pa.types.is_struct(after)
            or before != after
            or types.get("op") != pa.string()
        ):
            raise UsageError(
                "schema of avro format is not an envelope of Debezium",
                detail="An envelope has op and, of one record type, before and after.",
                hint="Use the schema of the topic's values, or remove envelope.",
            )
        object.__setattr__(self, "schema", _schema(after))

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`.

        Raises:
            TransientError: the registry could not return a schema.
            DefiniteError: the registry rejects the request.
        """
        decoded = self.envelope.decode(values)
        table = decoded.rows.combine_chunks()
        arrays = {
            name: table.column(name).combine_chunks() if table.num_rows else pa.nulls(0, type_)
            for name, type_ in zip(table.column_names, table.schema.types, strict=True)
        }
        bad = {record.row: record.reason for record in decoded.bad}
        is_valid = pa.chunked_array(values.chunks, values.type).is_valid()
        is_event = is_valid.to_numpy(zero_copy_only=False).copy()
        is_event[list(bad)] = False
        op, before, after = (arrays[name] for name in ("op", "before", "after"))
        _check(op, after, is_event, bad)
        source = _struct_members(arrays.get("source"), _SOURCE, table.num_rows)
        transaction = _struct_members(arrays.get("transaction"), _TRANSACTION, table.num_rows)
        columns = _columns(op, before, after, source, transaction)
        rows = blanked(columns, self.schema, bad)
        return Decoded(rows, tuple(Bad(row, bad[row]) for row in sorted(bad)))


def _schema(row: pa.DataType) -> pa.Schema:
    return pa.schema(
        [
            ("op", pa.string()),
            *LOG,
            ("transaction", pa.string()),
            ("total_order", pa.int64()),
            ("data_collection_order", pa.int64()),
            ("before", row),
            ("after", row),
        ]
    )


def _columns(
    op: pa.Array, before: pa.Array, after: pa.Array, source: Named, transaction: Named
) -> list[pa.Array]:
    orders = [transaction[name] for name in ("total_order", "data_collection_order")]
    log = [_origins(source), source["ts_ms"], _positions(op, source)]
    ids = transaction["id"]
    informix = pc.fill_null(pc.equal(source["connector"], "informix"), fill_value=False)
    ids = pc.if_else(informix, join_array(ids), ids)
    return [op, *log, ids, *orders, before, after]


def _check(op: pa.Array, after: pa.Array, is_event: Any, bad: dict[int, str]) -> None:
    """Add a reason to `bad` for each record that is not a valid change event."""
    known = pc.is_in(op, pa.array(OPS)).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(is_event & ~known).tolist():
        text = op[row].as_py()
        bad.setdefault(
            row,
            "it has no op, so it is not a change event of Debezium"
            if text is None
            else f'its op is "{shortened(text)}", and not one of {", ".join(OPS)}',
        )
    needs = pc.is_in(op, pa.array(["c", "u", "r"])).to_numpy(zero_copy_only=False)
    missing = needs & ~after.is_valid().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(is_event & missing).tolist():
        bad.setdefault(row, f'its op is "{op[row].as_py()}", but it has no after')


def _members(values: LocatedValues, index: int, columns: tuple[Column, ...]) -> dict[str, pa.Array]:
    """Return members of an object; a value of another type is null."""
    texts = raw_text(values, index, values.kinds[index] == OBJECT).cast(pa.binary())
    members, _ = locate_values(texts, [column.name for column in columns])
    return {column.name: read_column(members, i, column)[0] for i, column in enumerate(columns)}


def _struct_members(struct: pa.Array | None, columns: tuple[Column, ...], count: int) -> Named:
    """Return members of a struct; a value of another type is null."""
    names: set[str] = set()
    if struct is not None and pa.types.is_struct(struct.type):
        names = {member.name for member in struct.type}
    members = {}
    for column in columns:
        array = pa.nulls(count, column.arrow)
        if column.name in names:
            member = pc.struct_field(struct, column.name)
            are_integers = pa.types.is_integer(member.type) and pa.types.is_integer(column.arrow)
            if member.type == column.arrow or are_integers:
                array = member.cast(column.arrow)
            elif column.name == "snapshot":
                array = member.cast(pa.string())
        members[column.name] = array
    return members


def _origins(source: Named) -> pa.Array:
    server = pc.cast(source["server_id"], pa.string())
    parts = [pc.fill_null(part, "") for part in (source["name"], source["db"], server)]
    return pc.binary_join_element_wise(source["connector"], *parts, "\n")


def _positions(op: pa.Array, source: Named) -> pa.Array:
    snapshot = pc.fill_null(source["snapshot"], "false")
    live = pc.is_in(snapshot, pa.array(["false", '"false"']))
    deletion = pc.equal(op, "d")
    count = len(op)

    def by(*connectors: str) -> pa.Array:
        return pc.and_(
            live, pc.fill_null(pc.is_in(source["connector"], pa.array(connectors)), False)
        )

    sequence = pc.extract_regex(source["sequence"], _SEQUENCE)
    commit, lsn = (pc.struct_field(sequence, name) for name in ("commit", "lsn"))
    commit = pc.if_else(pc.equal(commit, ""), "0", commit)
    postgres = _bytes(by("postgresql"), deletion, [_number(commit), _number(lsn)], count)
    file = pc.struct_field(pc.extract_regex(source["file"], _FILE), "number")
    numbers = [_number(file), source["pos"], source["row"]]
    mysql = _bytes(by("mysql", "mariadb"), deletion, numbers, count)
    # All events of a transaction have one position there, so deletions get no lower one.
    no_deletion = pa.array(np.zeros(count, np.bool_))
    sql_server = _bytes(by("sqlserver"), no_deletion, _lsn(source["commit_lsn"]), count)
    return pc.coalesce(postgres, mysql, sql_server)


def _number(text: pa.Array) -> pa.Array:
    return pc.cast(text, pa.int64())


def _lsn(text: pa.Array) -> list[pa.Array]:
    """Return the three numbers of an LSN in SQL Server's notation."""
    parts = pc.extract_regex(pc.utf8_lower(text), _LSN)
    return [_hex(pc.struct_field(parts, name)) for name in ("a", "b", "c")]


def _hex(text: pa.Array) -> pa.Array:
    is_valid = text.is_valid()
    return pc.if_else(
        is_valid, pc.cast(pc.binary_join_element_wise("0x", text, ""), pa.int64()), None
    )


def _bytes(which: pa.Array, deletion: pa.Array, numbers: list[pa.Array], count: int) -> pa.Array:
    """Return the numbers as big-endian bytes, where `which` is true and all numbers are present."""
    is_known = which
    for number in numbers:
        is_known = pc.and_(is_known, pc.fill_null(pc.greater_equal(number, 0), False))
    width = 8 * len(numbers) + 1
    out = np.zeros((count, width), np.uint8)
    for i, number in enumerate(numbers):
        big_endian = pc.fill_null(number, 0).to_numpy(zero_copy_only=False).astype(">i8")
        out[:, 8 * i : 8 * i + 8] = big_endian.view(np.uint8).reshape(count, 8)
    out[:, -1] = ~pc.fill_null(deletion, False).to_numpy(zero_copy_only=False)
    positions = pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(out)])
    return pc.if_else(is_known, positions.cast(pa.binary()), None)


def _wraps_null(chunk: pa.Array, candidates: Any) -> Any:
    """Return which records have a schema and a null payload, another form of a tombstone."""
    wraps = np.zeros(len(chunk), np.bool_)
    for row in np.flatnonzero(candidates).tolist():
        value = chunk[row].as_py()
        if value is not None and b'"payload"' in value:
            try:
                event = json.loads(value)
            except ValueError:
                continue  # `locate_values` reports the reason.
            wraps[row] = isinstance(event, dict) and event.get("payload", ...) is None
    return wraps


def _merge(bad: dict[int, str], more: Mapping[int, str]) -> None:
    for row, reason in more.items():
        bad.setdefault(row, reason)
