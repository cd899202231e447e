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

Where transactions count, an event of one is put aside until it is whole. An event without a
transaction that comes after one in its partition waits with it, lest the earlier one overtakes
it; any other is taken at once.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from penstock.sources.kafka.transactions import RUNS, merged, runs_of
from penstock.sources.source import Aside, Out

__all__ = [
    "ASIDE",
    "DATA",
    "ERRORS",
    "ERRORS_SCHEMA",
    "META",
    "TOPIC",
    "Envelope",
    "Finishing",
    "Held",
    "KafkaScan",
    "Layout",
    "Told",
    "changes_of",
    "held_in",
    "last_of",
]

Envelope: TypeAlias = Literal["none", "upsert", "debezium"]

DATA: Final = "data"
ERRORS: Final = "errors"
ASIDE: Final = "aside"
"""What goes to the collection, what cannot be taken, and what waits."""

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
TOPIC: Final = "\0topic"
"""The topic of a prepared row."""

_PARTITION: Final = "\0partition"
_OFFSET: Final = "\0offset"
_TIMESTAMP: Final = "\0timestamp"
_KEY: Final = "\0key"
_VALUE: Final = "\0value"
_GONE: Final = "\0gone"
_REASON: Final = "\0reason"
_POSITION: Final = "\0position"
_TRANSACTION: Final = "\0transaction"
_TOTAL_ORDER: Final = "\0total_order"
_ORDER: Final = "\0order"
_BAD: Final = (TOPIC, _PARTITION, _OFFSET, _TIMESTAMP, _KEY, _VALUE, _REASON)


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
        if self.envelope == "upsert" and self.key is not None and self.named:
            keys = self.key.schema.names
            if set(self.named) != set(keys):
                raise UsageError(
                    f"envelope upsert tells rows apart by the records' keys: {', '.join(keys)}",
                    hint="Leave key out, or choose another envelope.",
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
    def aside(self) -> pa.Schema:
        """What is kept of an event that waits for its transaction."""
        return pa.schema(
            [
                pa.field("transaction", pa.string(), nullable=False),
                pa.field("total_order", pa.int64(), nullable=False),
                # Its place among the transaction's events of the topic; none if it is of none.
                pa.field("order", pa.int64()),
                pa.field("partition", pa.int32(), nullable=False),
                pa.field("offset", pa.int64(), nullable=False),
                pa.field("gone", pa.bool_(), nullable=False),
                pa.field("row", pa.struct(list(self.schema)), nullable=False),
            ]
        )

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


class Held(NamedTuple):
    """The last event of a partition that waits: at which offset, and where in which transaction."""

    offset: int
    transaction: str
    total_order: int


class Told(NamedTuple):
    """What a task tells of the records that it finished."""

    records: int
    bad: int
    first_bad: tuple[str, int, int, str] | None
    """Topic, partition, offset and reason of the first that could not be taken."""

    marks: Mapping[int, bytes]
    """By partition, the highest place in a database's log that an event stood at."""

    runs: pa.Table
    """Which events of which transactions came."""

    held: Mapping[int, Held]
    """By partition, the last that was put aside."""

    aside: int
    """How many rows were."""


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

    held: Mapping[int, Held] | None = None
    """By partition, the last event that waits from before; None if transactions do not count."""

    aside: Mapping[str, Aside] = field(default_factory=dict)
    format: str = "kafka"

    @property
    def meets(self) -> bool:
        """Whether records with one key must be finished by one task."""
        return self.layout.envelope != "none"

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Records, decoded."""
        prepare = self.preparing()
        for batch in rows:
            if batch.num_rows:
                yield prepare(pa.Table.from_batches([batch]))

    def preparing(self) -> Callable[[pa.Table], pa.Table]:
        """What prepares one batch of records after the other."""
        marks, held = dict(self.marks), None if self.held is None else dict(self.held)
        return lambda read: self._prepared(read, marks, held)

    def _prepared(
        self, read: pa.Table, marks: dict[int, bytes], held: dict[int, Held] | None
    ) -> pa.Table:
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
        if held is not None:
            for row in np.flatnonzero(_nowhere(values.rows)).tolist():
                reasons.setdefault(row, "it is in a transaction and does not say where in it")
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
            TOPIC: read.column("topic"),
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
        if held is not None:
            inner |= {name: values.rows.column(told) for name, told in _PLACES.items()}
        table = pa.table({**{name: columns[name] for name in layout.schema.names}, **inner})
        table = table.filter(pa.array(~skipped)) if skipped.any() else table
        return table if held is None else _anchored(table, held)

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
        places = _places([rows.column(name) for name in self.layout.key_columns], count)
        if self.held is None:
            return pa.array(places, pa.int32())
        # What waits need not meet by its key; together, a transaction's events make one run.
        waits = pc.is_valid(rows.column(_TRANSACTION)).to_numpy(zero_copy_only=False)
        there = _places([rows.column(_TRANSACTION)], count)
        return pa.array(np.where(waits, there, places), pa.int32())

    def finish(self, rows: Iterable[pa.Table], out: Out) -> Told:
        """Put the rows that records come to, and apart from them those that cannot be taken."""
        finishing = Finishing(self, out)
        for table in rows:
            finishing.add(table)
        return finishing.told()


class Finishing:
    """What prepared records of one topic come to, one table after the other."""

    def __init__(self, scan: KafkaScan, out: Out) -> None:
        self._scan = scan
        self._layout = scan.layout
        self._out = out
        self._records = 0
        self._bad: list[pa.Table] = []
        self._good: list[pa.Table] = []
        self._marks: dict[int, bytes] = {}
        self._runs: list[pa.Table] = []
        self._held: dict[int, Held] = {}
        self._aside = 0

    def add(self, table: pa.Table) -> None:
        """Take some more."""
        self._records += table.num_rows
        if self._scan.held is not None:
            # What cannot be taken is an event of its transaction all the same.
            known = table.filter(pc.is_valid(table.column(_TRANSACTION)))
            self._runs.append(runs_of(known.column(_TRANSACTION), known.column(_ORDER)))
        reasons = table.column(_REASON)
        if reasons.null_count < table.num_rows:
            self._bad.append(table.filter(pc.is_valid(reasons)).select(_BAD))
            table = table.filter(pc.is_null(reasons))
        if self._layout.envelope == "none":
            self._out.put(DATA, table.select(self._layout.schema.names))
            return
        _raise_marks(self._marks, table)
        if self._scan.held is not None:
            waits = pc.is_valid(table.column(_TRANSACTION))
            self._put_aside(table.filter(waits))
            table = table.filter(pc.invert(waits))
        self._good.append(table)

    def told(self) -> Told:
        """Put what is left, and tell of all."""
        if self._good:
            self._put_last(pa.concat_tables(self._good))
        runs = merged(pa.concat_tables(self._runs)) if self._runs else RUNS.empty_table()
        told = Told(self._records, 0, None, self._marks, runs, self._held, self._aside)
        if not self._bad:
            return told
        rows = pa.concat_tables(self._bad)
        rows = rows.sort_by([(_PARTITION, "ascending"), (_OFFSET, "ascending")])
        if ERRORS in self._scan.into:
            self._out.put(ERRORS, pa.table(rows.columns, schema=ERRORS_SCHEMA))
        topic, partition, offset, reason = (
            rows.column(name)[0].as_py() for name in (TOPIC, _PARTITION, _OFFSET, _REASON)
        )
        return told._replace(bad=rows.num_rows, first_bad=(topic, partition, offset, reason))

    def _put_last(self, rows: pa.Table) -> None:
        names, key = self._layout.schema.names, list(self._layout.key_columns)
        by = (_TIMESTAMP, _PARTITION, _OFFSET)
        last = last_of(rows, key, by if self._layout.envelope == "upsert" else by[1:])
        come = last.filter(pc.invert(last.column(_GONE))).select(names)
        stored = come.slice(0, 0)
        if not self._scan.fresh:
            stored = self._out.stored(DATA, last.select(key)).select(names)
        self._out.put(DATA, changes_of(stored, come))

    def _put_aside(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._aside += rows.num_rows
        names = (_TRANSACTION, _TOTAL_ORDER, _ORDER, _PARTITION, _OFFSET, _GONE)
        columns = [rows.column(name).combine_chunks() for name in self._layout.schema.names]
        row = pa.StructArray.from_arrays(columns, fields=list(self._layout.schema))
        arrays = [*(rows.column(name) for name in names), row]
        self._out.put(ASIDE, pa.table(arrays, schema=self._layout.aside))
        for partition, held in held_in(rows.select(names[:-1])).items():
            self._held[partition] = max(held, self._held.get(partition, held))


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


_PLACES: Final = {
    _TRANSACTION: "transaction",
    _TOTAL_ORDER: "total_order",
    _ORDER: "data_collection_order",
}


def _nowhere(values: pa.Table) -> npt.NDArray[np.bool_]:
    """Which events are in a transaction and do not say where."""
    orders = [pc.is_null(values.column(name)) for name in ("total_order", "data_collection_order")]
    found = pc.and_(pc.is_valid(values.column("transaction")), pc.or_(*orders))
    nowhere: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
    return nowhere


def _anchored(table: pa.Table, held: dict[int, Held]) -> pa.Table:
    """Rows of no transaction with that of the last before them that waits, and raises `held`."""
    partitions = table.column(_PARTITION).to_numpy()
    bad = pc.is_valid(table.column(_REASON)).to_numpy(zero_copy_only=False)
    owned = pc.is_valid(table.column(_TRANSACTION)).to_numpy(zero_copy_only=False) & ~bad
    before = np.full(len(partitions), -1)
    for partition in np.unique(partitions).tolist():
        at = np.flatnonzero(partitions == partition)
        before[at] = np.maximum.accumulate(np.where(owned[at], at, -1))
    names = table.column(_TRANSACTION).combine_chunks()
    totals = table.column(_TOTAL_ORDER).combine_chunks()
    loose = ~owned & ~bad
    taken = pa.array(np.where(owned | bad, np.arange(len(partitions)), before), pa.int64())
    taken = pc.if_else(pa.array(loose & (before < 0)), pa.scalar(None, pa.int64()), taken)
    names, totals = names.take(taken), totals.take(taken)
    for partition, last in held.items():
        here = pa.array(loose & (before < 0) & (partitions == partition))
        names = pc.if_else(here, last.transaction, names)
        totals = pc.if_else(here, last.total_order, totals)
    for partition in np.unique(partitions[owned]).tolist():
        row = int(np.flatnonzero(owned & (partitions == partition))[-1])
        offset = table.column(_OFFSET)[row].as_py()
        held[partition] = Held(offset, names[row].as_py(), totals[row].as_py())
    for name, column in ((_TRANSACTION, names), (_TOTAL_ORDER, totals)):
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def held_in(rows: pa.Table) -> dict[int, Held]:
    """By partition, the last of rows that are or were put aside.

    Their columns are those of what is put aside, in order, whatever they are called.
    """
    names, totals, _, partitions, offsets = rows.columns[:5]
    numbers, at = partitions.to_numpy(), offsets.to_numpy()
    found = {}
    for partition in np.unique(numbers).tolist():
        here = np.flatnonzero(numbers == partition)
        row = int(here[np.argmax(at[here])])
        found[partition] = Held(int(at[row]), names[row].as_py(), totals[row].as_py())
    return found


def _places(columns: Sequence[pa.ChunkedArray], count: int) -> npt.NDArray[np.int64]:
    packed = pack([column.combine_chunks() for column in columns])
    found: npt.NDArray[np.int64] = (key_hashes(packed).astype(np.int64) * count) >> 32
    return found


def changes_of(gone: pa.Table, come: pa.Table) -> pa.Table:
    """Rows that go and come, with diffs, without those that do both."""
    changes = [_with_diff(come, 1), _with_diff(gone, -1)]
    return consolidate(pa.concat_tables(changes)).drop_columns([TIME])


def last_of(rows: pa.Table, key: list[str], by: Sequence[str]) -> pa.Table:
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
