"""Debezium change events: row before and after the change, and its place in the source's log.

An event becomes

    op                       c, u, d, r (read by a snapshot), t (truncate), m (message)
    origin                   its log: connector, name, database and server
    happened_ms              commit time, by the database's clock
    position                 bytes in the order of the source's log, or null
    transaction              its id (see `ids.py`), total_order and data_collection_order in it
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

Rows that one COPY loaded share a position. `resent.py` defines the meaning of a lower position.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import UsageError
from penstock.sources.debezium.dedup import LOG
from penstock.sources.debezium.transaction_ids import whole_all
from penstock.sources.formats.avro_format import AvroFormat
from penstock.sources.formats.column_types import Column
from penstock.sources.formats.format import Bad, Decoded, blanked, chunks_of, shortened
from penstock.sources.formats.json_format import JsonFormat
from penstock.sources.formats.json_scanner import find
from penstock.sources.formats.text_values import raw_text, read_column
from penstock.sources.formats.values import NOTHING, OBJECT

__all__ = ["OPS", "DebeziumAvro", "DebeziumJson"]

OPS: Final = ("c", "u", "d", "r", "t", "m")

_ENVELOPE: Final = ("op", "before", "after", "source", "transaction")
_NAMES: Final = (*_ENVELOPE, "payload")
_SOURCE: Final = tuple(
    Column.parse(name, word)
    for name, word in {
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
    Column.parse(name, word)
    for name, word in {
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
        cells, bad = find(chunk, _NAMES)
        no_op, payload = cells.kinds[0] == NOTHING, cells.kinds[-1]
        wrapped = no_op & (payload == OBJECT)
        empty = _wraps_nothing(chunk, no_op & (payload == NOTHING))
        if wrapped.any():
            inner = raw_text(cells, -1, wrapped).cast(pa.binary())
            chunk = pc.if_else(pa.array(wrapped), inner, chunk)
            cells, again = find(chunk, _NAMES)
            bad |= again
        there = chunk.is_valid().to_numpy(zero_copy_only=False) & ~empty
        there[list(bad)] = False
        cells.kinds[:, ~there] = NOTHING
        op, reasons = read_column(cells, 0, Column.parse("op", "text"))
        _merge(bad, reasons)
        source = _members(cells, 3, _SOURCE)
        transaction = _members(cells, 4, _TRANSACTION)
        before = self._row(cells, 1, "before", bad)
        after = self._row(cells, 2, "after", bad)
        _check(op, after, there, bad)
        return _columns(op, before, after, source, transaction), bad

    def _row(self, cells: Any, at: int, name: str, bad: dict[int, str]) -> pa.Array:
        kinds = cells.kinds[at]
        for row in np.flatnonzero((kinds != OBJECT) & (kinds != NOTHING)).tolist():
            bad.setdefault(row, f"its {name} is not an object")
        held = kinds == OBJECT
        texts = raw_text(cells, at, held).cast(pa.binary())
        decoded = self.row.decode(pa.chunked_array([texts]))
        _merge(bad, {each.row: f"{name}: {each.reason}" for each in decoded.bad})
        columns = [column.combine_chunks() for column in decoded.rows.columns]
        fields = list(self.row.schema)
        return pa.StructArray.from_arrays(columns, fields=fields, mask=pa.array(~held))


@dataclass(frozen=True, slots=True)
class DebeziumAvro:
    """Change events in Avro."""

    envelope: AvroFormat
    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        kinds = {each.name: each.type for each in self.envelope.schema}
        rows = [kinds.get("before"), kinds.get("after")]
        if (
            not all(kind is not None and pa.types.is_struct(kind) for kind in rows)
            or rows[0] != rows[1]
            or kinds.get("op") != pa.string()
        ):
            raise UsageError(
                "schema of avro format is no envelope of Debezium",
                detail="An envelope has op and, of one record type, before and after.",
                hint="Give the schema of the topic's values, or leave the envelope out.",
            )
        object.__setattr__(self, "schema", _schema(rows[1]))

    def decode(self, values: pa.ChunkedArray) -> Decoded:
        """Decode values into rows of `schema`.

        Raises:
            TransientError: the registry could not return a schema.
            DefiniteError: the registry rejects the request.
        """
        decoded = self.envelope.decode(values)
        table = decoded.rows.combine_chunks()
        held = {
            name: table.column(name).combine_chunks() if table.num_rows else pa.nulls(0, kind)
            for name, kind in zip(table.column_names, table.schema.types, strict=True)
        }
        bad = {each.row: each.reason for each in decoded.bad}
        present = pa.chunked_array(values.chunks, values.type).is_valid()
        there = present.to_numpy(zero_copy_only=False).copy()
        there[list(bad)] = False
        _check(held["op"], held["after"], there, bad)
        source = _taken(held.get("source"), _SOURCE, table.num_rows)
        transaction = _taken(held.get("transaction"), _TRANSACTION, table.num_rows)
        columns = _columns(held["op"], held["before"], held["after"], source, transaction)
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
    ids = pc.if_else(informix, whole_all(ids), ids)
    return [op, *log, ids, *orders, before, after]


def _check(op: pa.Array, after: pa.Array, there: Any, bad: dict[int, str]) -> None:
    """Add a reason to `bad` for each record that is not a valid change event."""
    known = pc.is_in(op, pa.array(OPS)).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(there & ~known).tolist():
        said = op[row].as_py()
        bad.setdefault(
            row,
            "it has no op, so it is no change event of Debezium"
            if said is None
            else f'its op is "{shortened(said)}", and not one of {", ".join(OPS)}',
        )
    needs = pc.is_in(op, pa.array(["c", "u", "r"])).to_numpy(zero_copy_only=False)
    missing = needs & ~after.is_valid().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(there & missing).tolist():
        bad.setdefault(row, f'its op is "{op[row].as_py()}", but it has no after')


def _members(cells: Any, at: int, columns: tuple[Column, ...]) -> dict[str, pa.Array]:
    """Return members of an object; a value of another type is null."""
    texts = raw_text(cells, at, cells.kinds[at] == OBJECT).cast(pa.binary())
    found, _ = find(texts, [column.name for column in columns])
    return {c.name: read_column(found, i, c)[0] for i, c in enumerate(columns)}


def _taken(struct: pa.Array | None, columns: tuple[Column, ...], count: int) -> Named:
    """Return members of a struct; a value of another type is null."""
    there = {} if struct is None or not pa.types.is_struct(struct.type) else {
        each.name: each.type for each in struct.type
    }  # fmt: skip
    taken = {}
    for column in columns:
        array = pa.nulls(count, column.arrow)
        if column.name in there and struct is not None:
            inner = pc.struct_field(struct, column.name)
            same = pa.types.is_integer(inner.type) == pa.types.is_integer(column.arrow)
            if inner.type == column.arrow or (same and pa.types.is_integer(inner.type)):
                array = inner.cast(column.arrow)
            elif column.name == "snapshot":
                array = inner.cast(pa.string())
        taken[column.name] = array
    return taken


def _origins(source: Named) -> pa.Array:
    server = pc.cast(source["server_id"], pa.string())
    rest = [pc.fill_null(part, "") for part in (source["name"], source["db"], server)]
    return pc.binary_join_element_wise(source["connector"], *rest, "\n")


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
    alike = pa.array(np.zeros(count, np.bool_))
    sql_server = _bytes(by("sqlserver"), alike, _lsn(source["commit_lsn"]), count)
    return pc.coalesce(postgres, mysql, sql_server)


def _number(text: pa.Array) -> pa.Array:
    return pc.cast(text, pa.int64())


def _lsn(text: pa.Array) -> list[pa.Array]:
    """Return the three numbers of an LSN in SQL Server's notation."""
    parts = pc.extract_regex(pc.utf8_lower(text), _LSN)
    return [_hex(pc.struct_field(parts, name)) for name in ("a", "b", "c")]


def _hex(text: pa.Array) -> pa.Array:
    there = text.is_valid()
    return pc.if_else(there, pc.cast(pc.binary_join_element_wise("0x", text, ""), pa.int64()), None)


def _bytes(which: pa.Array, deletion: pa.Array, numbers: list[pa.Array], count: int) -> pa.Array:
    """Return the numbers as big-endian bytes, where `which` is true and all numbers are present."""
    there = which
    for each in numbers:
        there = pc.and_(there, pc.fill_null(pc.greater_equal(each, 0), False))
    width = 8 * len(numbers) + 1
    out = np.zeros((count, width), np.uint8)
    for i, each in enumerate(numbers):
        plain = pc.fill_null(each, 0).to_numpy(zero_copy_only=False).astype(">i8")
        out[:, 8 * i : 8 * i + 8] = plain.view(np.uint8).reshape(count, 8)
    out[:, -1] = ~pc.fill_null(deletion, False).to_numpy(zero_copy_only=False)
    made = pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(out)])
    return pc.if_else(there, made.cast(pa.binary()), None)


def _wraps_nothing(chunk: pa.Array, candidates: Any) -> Any:
    """Return which records have a schema and a null payload, another form of a tombstone."""
    wraps = np.zeros(len(chunk), np.bool_)
    for row in np.flatnonzero(candidates).tolist():
        value = chunk[row].as_py()
        if value is not None and b'"payload"' in value:
            try:
                event = json.loads(value)
            except ValueError:
                continue  # `find` reports the reason.
            wraps[row] = isinstance(event, dict) and event.get("payload", ...) is None
    return wraps


def _merge(bad: dict[int, str], more: Mapping[int, str]) -> None:
    for row, reason in more.items():
        bad.setdefault(row, reason)
