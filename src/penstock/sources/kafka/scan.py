"""A range of offsets, read by Spark's own connector, and what its records come to.

Records are prepared where they are read: decoded, their key too where it is wanted, with
the place each of them has upstream. What cannot be decoded goes along with its reason. Then
they are finished:

    none      each record is a row, at its place (partition, offset)
    upsert    the last record of a key decides: its row comes, what was stored goes
    debezium  the same, of change events, whose key is in the row they speak of

A key's last record is the last by (timestamp, partition, offset): in one partition offsets
alone would do, but who sends a key to two must be told apart by time. Debezium's events of
a key are in one partition, and go by their offsets.

A connector of Debezium that is started again may send events again that it had sent before.
They stand at a lower place of the database's log than one before them in the partition, by
which they are known, and are dropped.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF, TIME, consolidate
from penstock.data.packed import key_hashes, pack
from penstock.errors import UsageError
from penstock.sources.kafka.formats.format import Format
from penstock.sources.source import Aside, Out

__all__ = ["DATA", "ERRORS", "ERRORS_SCHEMA", "META", "Envelope", "KafkaScan", "Layout", "Told"]

Envelope: TypeAlias = Literal["none", "upsert", "debezium"]

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
_POSITION: Final = "\0position"
_BAD: Final = (_TOPIC, _PARTITION, _OFFSET, _TIMESTAMP, _KEY, _VALUE, _REASON)


@dataclass(frozen=True, slots=True)
class Layout:
    """What records become: the columns of a collection, and where each comes from."""

    envelope: Envelope
    value: Format
    """Of Debezium, what decodes its events."""

    key: Format | None = None
    """How keys are decoded, if their columns are wanted."""

    include: Mapping[str, str] = field(default_factory=dict)
    """By what of a record besides its value, the column that has it."""

    named: tuple[str, ...] = ()
    """The columns that tell rows apart, if the file names them."""

    def __post_init__(self) -> None:
        if self.envelope == "upsert" and self.key is None:
            raise UsageError(
                "envelope upsert needs to know what keys are",
                hint="Say how they are decoded: key_format: text, or as format says it.",
            )
        if self.envelope == "debezium" and not self.named:
            raise UsageError(
                "envelope debezium needs to know the key of the rows",
                hint="Name its columns: key: [id]",
            )
        if missing := [name for name in self.named if name not in self.schema.names]:
            raise UsageError(
                f'there is no column "{missing[0]}" for the key',
                hint=f"Name some of these: {', '.join(self.schema.names)}.",
            )

    @property
    def schema(self) -> pa.Schema:
        """The columns of the collection."""
        keys = [] if self.key is None else [*self.key.schema]
        taken = {each.name for each in keys}
        row = self.value.schema
        if self.envelope == "debezium":
            row = pa.schema([*row.field("after").type])
        values = [each for each in row if each.name not in taken]
        others = [pa.field(name, META[what]) for what, name in self.include.items()]
        return pa.schema([*keys, *values, *others, *self._place()])

    @property
    def key_columns(self) -> tuple[str, ...]:
        """What tells rows apart, unless the file says otherwise."""
        if self.named and self.envelope != "upsert":
            return self.named
        if self.key is not None and self.envelope == "upsert":
            return tuple(self.key.schema.names)
        return (self.column_of("partition"), self.column_of("offset"))

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

    marks: Mapping[int, bytes]
    """By partition, the highest place in a database's log that an event stood at."""


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

    marks: Mapping[int, bytes] = field(default_factory=dict)
    """By partition, the highest place in a database's log of events that were drawn before."""

    aside: Mapping[str, Aside] = field(default_factory=dict)
    format: str = "kafka"

    @property
    def meets(self) -> bool:
        """Whether records with one key must be finished by one task."""
        return self.layout.envelope != "none"

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Records, decoded."""
        marks = dict(self.marks)
        for batch in rows:
            if batch.num_rows:
                yield self._prepared(pa.Table.from_batches([batch]), marks)

    def _prepared(self, read: pa.Table, marks: dict[int, bytes]) -> pa.Table:
        layout, reasons = self.layout, dict[int, str]()
        columns: dict[str, pa.ChunkedArray] = {}
        if layout.key is not None:
            keys = layout.key.decode(read.column("key"))
            reasons.update((bad.row, f"its key: {bad.reason}") for bad in keys.bad)
            columns.update(zip(keys.rows.column_names, keys.rows.columns, strict=True))
        values = layout.value.decode(read.column("value"))
        for bad in values.bad:
            reasons.setdefault(bad.row, bad.reason)
        judged = _JUDGES[layout.envelope](read, values.rows)
        for name, column in judged.columns.items():
            columns.setdefault(name, column)
        columns.update(self._of_record(read))
        for row, reason in judged.reasons.items():
            reasons.setdefault(row, reason)
        count = read.num_rows
        skipped = judged.skipped
        bad_rows = np.zeros(count, bool)
        bad_rows[[*reasons]] = True
        bad_rows &= ~skipped
        if judged.positions is not None:
            partitions = read.column("partition").to_numpy()
            skipped |= _again(judged.positions, partitions, marks) & ~bad_rows
        told = pa.nulls(count, pa.string())
        key = value = pa.nulls(count, pa.binary())
        if bad_rows.any():
            told = pa.array([reasons.get(row) if bad_rows[row] else None for row in range(count)])
            key, value = (
                pc.if_else(pa.array(bad_rows), read.column(name), pa.scalar(None, pa.binary()))
                for name in ("key", "value")
            )
        inner = {
            _TOPIC: read.column("topic"),
            _PARTITION: read.column("partition"),
            _OFFSET: read.column("offset"),
            _TIMESTAMP: read.column("timestamp").cast(META["timestamp"]),
            _KEY: key,
            _VALUE: value,
            _GONE: judged.gone,
            _REASON: told,
            _POSITION: pa.nulls(count, pa.binary())
            if judged.positions is None
            else judged.positions,
        }
        table = pa.table({**{name: columns[name] for name in layout.schema.names}, **inner})
        return table.filter(pa.array(~skipped)) if skipped.any() else table

    def _of_record(self, read: pa.Table) -> dict[str, pa.ChunkedArray]:
        """What is wanted of records besides their values."""
        layout = self.layout
        found = {name: read.column(what).cast(META[what]) for what, name in layout.include.items()}
        if layout.envelope == "none":
            found[layout.column_of("partition")] = read.column("partition")
            found[layout.column_of("offset")] = read.column("offset")
        return found

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """For each record, where it meets the others of its key."""
        packed = pack([rows.column(name).combine_chunks() for name in self.layout.key_columns])
        return pa.array((key_hashes(packed).astype(np.int64) * count) >> 32, pa.int32())

    def finish(self, rows: Iterable[pa.Table], out: Out) -> Told:
        """Put the rows that records come to, and apart from them those that cannot be taken."""
        records, bad, good = 0, list[pa.Table](), list[pa.Table]()
        marks: dict[int, bytes] = {}
        for table in rows:
            records += table.num_rows
            reasons = table.column(_REASON)
            if reasons.null_count < table.num_rows:
                bad.append(table.filter(pc.is_valid(reasons)).select(_BAD))
                table = table.filter(pc.is_null(reasons))
            if self.layout.envelope == "none":
                out.put(DATA, table.select(self.layout.schema.names))
            else:
                good.append(table)
                _raise_marks(marks, table)
        if good:
            self._put_last(pa.concat_tables(good), out)
        return self._told(records, bad, marks, out)

    def _put_last(self, rows: pa.Table, out: Out) -> None:
        names, key = self.layout.schema.names, list(self.layout.key_columns)
        by = (_TIMESTAMP, _PARTITION, _OFFSET)
        last = _last_of(rows, key, by if self.layout.envelope == "upsert" else by[1:])
        come = last.filter(pc.invert(last.column(_GONE))).select(names)
        changes = [_with_diff(come, 1)]
        if not self.fresh:
            changes.append(_with_diff(out.stored(DATA, last.select(key)).select(names), -1))
        out.put(DATA, consolidate(pa.concat_tables(changes)).drop_columns([TIME]))

    def _told(
        self, records: int, bad: list[pa.Table], marks: Mapping[int, bytes], out: Out
    ) -> Told:
        if not bad:
            return Told(records, 0, None, marks)
        rows = pa.concat_tables(bad).sort_by([(_PARTITION, "ascending"), (_OFFSET, "ascending")])
        if ERRORS in self.into:
            out.put(ERRORS, pa.table(rows.columns, schema=ERRORS_SCHEMA))
        topic, partition, offset, reason = (
            rows.column(name)[0].as_py() for name in (_TOPIC, _PARTITION, _OFFSET, _REASON)
        )
        return Told(records, rows.num_rows, (topic, partition, offset, reason), marks)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What an envelope makes of records."""

    columns: Mapping[str, pa.ChunkedArray]
    gone: pa.ChunkedArray
    """Whether the row of this key is gone."""

    skipped: npt.NDArray[np.bool_]
    """Whether a record says nothing."""

    reasons: Mapping[int, str]
    """Why a record cannot be taken, although it was decoded."""

    positions: pa.ChunkedArray | None = None
    """Where in a database's log an event stands."""


def _none(read: pa.Table, values: pa.Table) -> _Judged:
    no_key, no_value = _missing(read)
    wrong = no_value & ~no_key
    reason = "it has a key and no value, which is a deletion to others; envelope none has none"
    return _Judged(
        _columns(values),
        pa.chunked_array([pa.array(no_value)]),
        no_key & no_value,
        dict.fromkeys(np.flatnonzero(wrong).tolist(), reason),
    )


def _upsert(read: pa.Table, values: pa.Table) -> _Judged:
    no_key, no_value = _missing(read)
    reason = "it has no key, and its row would be known by that"
    return _Judged(
        _columns(values),
        pa.chunked_array([pa.array(no_value)]),
        no_key & no_value,
        dict.fromkeys(np.flatnonzero(no_key).tolist(), reason),
    )


def _debezium(read: pa.Table, values: pa.Table) -> _Judged:
    ops, after, before = (
        values.column(name).combine_chunks() for name in ("op", "after", "before")
    )
    deleted = pc.fill_null(pc.equal(ops, "d"), fill_value=False)
    rows = pc.if_else(deleted, before, after)
    reasons: dict[int, str] = {}
    for op, reason in _NOT_TAKEN.items():
        found = pc.fill_null(pc.equal(ops, op), fill_value=False).to_numpy(zero_copy_only=False)
        reasons.update(dict.fromkeys(np.flatnonzero(found).tolist(), reason))
    lacking = pc.and_(deleted, pc.is_null(before)).to_numpy(zero_copy_only=False)
    reason = "it deletes a row and does not say which: before is null"
    reasons.update(dict.fromkeys(np.flatnonzero(lacking).tolist(), reason))
    says_nothing = pc.or_kleene(pc.is_null(ops), pc.fill_null(pc.equal(ops, "m"), fill_value=False))
    names = [field.name for field in rows.type]
    fields = pc.struct_field
    return _Judged(
        {name: pa.chunked_array([fields(rows, [at])]) for at, name in enumerate(names)},
        pa.chunked_array([deleted]),
        says_nothing.to_numpy(zero_copy_only=False).copy(),
        reasons,
        values.column("position"),
    )


_NOT_TAKEN: Final = {
    "t": "it says that its table was truncated, of which no row is named",
}

_JUDGES: Final = {"none": _none, "upsert": _upsert, "debezium": _debezium}


def _columns(values: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(values.column_names, values.columns, strict=True))


def _missing(read: pa.Table) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which records have no key, and which no value."""
    no_key, no_value = (
        pc.is_null(read.column(name)).to_numpy(zero_copy_only=False).copy()
        for name in ("key", "value")
    )
    return no_key, no_value


def _again(
    positions: pa.ChunkedArray, partitions: npt.NDArray[np.int32], marks: dict[int, bytes]
) -> npt.NDArray[np.bool_]:
    """Which events were sent before, and raises `marks` by the others."""
    found = np.zeros(len(partitions), bool)
    known = pc.is_valid(positions).to_numpy(zero_copy_only=False)
    for partition in np.unique(partitions[known]).tolist():
        at = np.flatnonzero(known & (partitions == partition))
        here = positions.take(pa.array(at)).combine_chunks()
        mark = marks.get(partition, b"")
        # As numbers that compare as the bytes do; the first is that of the mark.
        ranks = pc.rank(pa.concat_arrays([pa.array([mark], here.type), here]), tiebreaker="dense")
        numbers = ranks.to_numpy().astype(np.int64)
        found[at] = numbers[1:] < np.maximum.accumulate(numbers)[:-1]
        marks[partition] = max(mark, pc.max(here).as_py())
    return found


def _raise_marks(marks: dict[int, bytes], rows: pa.Table) -> None:
    if rows.column(_POSITION).null_count == rows.num_rows:
        return
    highest = rows.group_by(_PARTITION).aggregate([(_POSITION, "max")])
    for partition, position in zip(
        *(column.to_pylist() for column in highest.columns), strict=True
    ):
        if position is not None:
            marks[partition] = max(marks.get(partition, b""), position)


def _last_of(rows: pa.Table, key: list[str], by: Sequence[str]) -> pa.Table:
    """Of each key, the last record."""
    ordered = rows.sort_by([(name, "ascending") for name in by])
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
