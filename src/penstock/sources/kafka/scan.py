"""A range of offsets, read by Spark's own connector, and what its records come to.

Records are prepared where they are read: decoded, their key too where it is wanted, with
the place each of them has upstream. What cannot be decoded goes along with its reason. Then
they are finished:

    none      each record is a row, at its place (partition, offset)
    upsert    the last record of a key decides: its row comes, what was stored goes

A key's last record is the last by (timestamp, partition, offset): in one partition offsets
alone would do, but who sends a key to two must be told apart by time.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, consolidate
from penstock.data.packed import key_hashes, pack
from penstock.sources.kafka.formats.format import Format
from penstock.sources.source import Out

__all__ = ["DATA", "ERRORS", "ERRORS_SCHEMA", "META", "KafkaScan", "Layout", "Told"]

DATA: Final = "data"
ERRORS: Final = "errors"

PARTITION: Final = "_partition"
OFFSET: Final = "_offset"

META: Final[Mapping[str, pa.DataType]] = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    "key": pa.binary(),
}
"""What can be had of a record besides its value."""

ERRORS_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("reason", pa.string(), nullable=False),
    ]
)

# Of prepared rows, besides the columns of the collection. No column of a record has such a name.
_TOPIC: Final = "\0topic"
_PARTITION: Final = "\0partition"
_OFFSET: Final = "\0offset"
_TIMESTAMP: Final = "\0timestamp"
_KEY: Final = "\0key"
_VALUE: Final = "\0value"
_GONE: Final = "\0gone"
_REASON: Final = "\0reason"
_INNER: Final = (_TOPIC, _PARTITION, _OFFSET, _TIMESTAMP, _KEY, _VALUE, _GONE, _REASON)


@dataclass(frozen=True, slots=True)
class Layout:
    """What records become: the columns of a collection, and where each comes from."""

    envelope: Literal["none", "upsert"]
    value: Format
    key: Format | None = None
    """How keys are decoded, if their columns are wanted."""

    include: Mapping[str, str] = field(default_factory=dict)
    """By what of a record besides its value, the column that has it."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the collection."""
        keys = [] if self.key is None else [*self.key.schema]
        taken = {each.name for each in keys}
        values = [each for each in self.value.schema if each.name not in taken]
        others = [pa.field(name, META[what]) for what, name in self.include.items()]
        return pa.schema([*keys, *values, *others, *self._place()])

    @property
    def key_columns(self) -> tuple[str, ...]:
        """What tells rows apart, unless the file says otherwise."""
        if self.envelope == "none":
            return (self.column_of("partition"), self.column_of("offset"))
        assert self.key is not None
        return tuple(self.key.schema.names)

    def column_of(self, what: Literal["partition", "offset"]) -> str:
        """The column that has the place of a record."""
        return self.include.get(what, PARTITION if what == "partition" else OFFSET)

    def _place(self) -> list[pa.Field]:
        """Of rows that are records: their place, in which their order is kept."""
        if self.envelope != "none":
            return []
        return [
            pa.field(name, META[what], nullable=False)
            for what, name in (("partition", PARTITION), ("offset", OFFSET))
            if what not in self.include
        ]


class Told(NamedTuple):
    """What a task tells of the records that it finished."""

    records: int
    bad: int
    first_bad: tuple[str, int, int, str] | None
    """Topic, partition, offset and reason of the first that could not be taken."""


@dataclass(frozen=True, slots=True)
class KafkaScan:
    """Offsets of the partitions of one topic, each from one to another."""

    options: Mapping[str, str] = field(repr=False)
    secrets: Collection[str] = field(repr=False)
    size: int
    into: Mapping[str, str]
    layout: Layout
    fresh: bool
    """Whether nothing is stored yet, so that nothing can go."""

    format: str = "kafka"

    @property
    def meets(self) -> bool:
        """Whether records with one key must be finished by one task."""
        return self.layout.envelope == "upsert"

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Records, decoded."""
        for batch in rows:
            if batch.num_rows:
                yield self._prepared(pa.Table.from_batches([batch]))

    def _prepared(self, read: pa.Table) -> pa.Table:
        layout, reasons = self.layout, dict[int, str]()
        columns: dict[str, Any] = {}
        if layout.key is not None:
            keys = layout.key.decode(read.column("key"))
            reasons.update((bad.row, f"its key: {bad.reason}") for bad in keys.bad)
            columns.update(zip(keys.rows.column_names, keys.rows.columns, strict=True))
        values = layout.value.decode(read.column("value"))
        for name, column in zip(values.rows.column_names, values.rows.columns, strict=True):
            columns.setdefault(name, column)
        for bad in values.bad:
            reasons.setdefault(bad.row, bad.reason)
        times = read.column("timestamp").cast(META["timestamp"])
        meta = {"timestamp": times, **{name: read.column(name) for name in ("partition", "offset")}}
        for what in ("headers", "key"):
            if what in layout.include:
                meta[what] = read.column(what)
        named = {what: meta[what].cast(META[what]) for what in layout.include}
        columns.update((layout.include[what], column) for what, column in named.items())
        if layout.envelope == "none":
            for what in ("partition", "offset"):
                columns[layout.column_of(what)] = read.column(what)
        no_key, no_value = (pc.is_null(read.column(name)) for name in ("key", "value"))
        if layout.envelope == "upsert":
            wrong = no_key
            message = "it has no key, and a key is what its row is known by"
        else:
            wrong = pc.and_(no_value, pc.invert(no_key))
            message = "it has a key and no value, which means a deletion, and envelope none has none"
        for row in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)):
            reasons.setdefault(int(row), message)
        skipped = pc.and_(no_key, no_value)
        bad = np.zeros(read.num_rows, bool)
        bad[[*reasons]] = True
        bad &= ~skipped.to_numpy(zero_copy_only=False)
        told = [reasons[row] if bad[row] else None for row in range(read.num_rows)] if reasons else []
        nothing = pa.nulls(read.num_rows, pa.binary())
        kept = pa.array(bad)
        inner = {
            _TOPIC: read.column("topic"),
            _PARTITION: read.column("partition"),
            _OFFSET: read.column("offset"),
            _TIMESTAMP: times,
            _KEY: pc.if_else(kept, read.column("key"), None) if reasons else nothing,
            _VALUE: pc.if_else(kept, read.column("value"), None) if reasons else nothing,
            _GONE: no_value,
            _REASON: pa.array(told, pa.string()) if told else pa.nulls(read.num_rows, pa.string()),
        }
        table = pa.table({**{name: columns[name] for name in layout.schema.names}, **inner})
        return table.filter(pc.invert(skipped)) if pc.any(skipped).as_py() else table

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """For each record, where it meets the others of its key."""
        packed = pack([rows.column(name).combine_chunks() for name in self.layout.key_columns])
        return pa.array((key_hashes(packed).astype(np.int64) * count) >> 32, pa.int32())

    def finish(self, rows: Iterable[pa.Table], out: Out) -> Told:
        """Put the rows that records come to, and apart from them those that cannot be taken."""
        records, bad = 0, list[pa.Table]()
        good = list[pa.Table]()
        for table in rows:
            records += table.num_rows
            reasons = table.column(_REASON)
            if reasons.null_count < table.num_rows:
                bad.append(table.filter(pc.is_valid(reasons)).select(_INNER))
                table = table.filter(pc.is_null(reasons))
            if self.layout.envelope == "none":
                out.put(DATA, table.select(self.layout.schema.names))
            else:
                good.append(table)
        if good:
            self._put_last(pa.concat_tables(good), out)
        return self._told(records, bad, out)

    def _put_last(self, rows: pa.Table, out: Out) -> None:
        names, key = self.layout.schema.names, list(self.layout.key_columns)
        last = _last_of(rows, key)
        keys = last.select(key)
        come = last.filter(pc.invert(last.column(_GONE))).select(names)
        changes = [_with_diff(come, 1)]
        if not self.fresh:
            changes.append(_with_diff(out.stored(DATA, keys).select(names), -1))
        out.put(DATA, consolidate(pa.concat_tables(changes)).drop_columns([TIME]))

    def _told(self, records: int, bad: list[pa.Table], out: Out) -> Told:
        if not bad:
            return Told(records, 0, None)
        rows = pa.concat_tables(bad).sort_by([(_PARTITION, "ascending"), (_OFFSET, "ascending")])
        found = [_TOPIC, _PARTITION, _OFFSET, _TIMESTAMP, _KEY, _VALUE, _REASON]
        if ERRORS in self.into:
            out.put(ERRORS, pa.table([rows.column(name) for name in found], schema=ERRORS_SCHEMA))
        topic, partition, offset, reason = (
            rows.column(name)[0].as_py() for name in (_TOPIC, _PARTITION, _OFFSET, _REASON)
        )
        return Told(records, rows.num_rows, (topic, partition, offset, reason))


def _last_of(rows: pa.Table, key: list[str]) -> pa.Table:
    """Of each key, the last record by (timestamp, partition, offset)."""
    ordered = rows.sort_by([(name, "ascending") for name in (_TIMESTAMP, _PARTITION, _OFFSET)])
    names = [f"c{number}" for number in range(len(key))]
    numbered = pa.table(
        [*(ordered.column(name) for name in key), np.arange(ordered.num_rows)],
        names=[*names, "row"],
    )
    lasts = numbered.group_by(names, use_threads=False).aggregate([("row", "max")])
    return ordered.take(lasts.column("row_max"))


def _with_diff(rows: pa.Table, diff: int) -> pa.Table:
    """Rows with a diff, all at one time, which whoever writes them replaces."""
    ones = pa.array(np.full(rows.num_rows, diff), pa.int64())
    zeros = pa.array(np.zeros(rows.num_rows, np.int64))
    return rows.append_column(TIME, zeros).append_column(DIFF, ones)
