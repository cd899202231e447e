"""Scan of an offset range by Spark's Kafka connector, and the rows that its records produce.

The task that reads a record prepares it: it decodes the value, decodes the key if its columns are
requested, and adds the place of the record in the topic. A record that cannot be decoded carries
the reason. Then the records are finished:

    none      each record is a row, at its place (partition, offset)
    upsert    the last record of a key decides: its row is inserted, the stored row is deleted
    debezium  the same for change events, whose key is in their row

The last record of a key has the highest offset. A key may be in two partitions, for example after
partitions were added. The key then has a last record in each partition. The later of these counts,
by timestamp and then by partition.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.packed import key_hashes, pack
from penstock.sources.debezium import transaction_ids
from penstock.sources.debezium.dedup import MARKED, Mark, Marks, highest, raised, resent
from penstock.sources.kafka.changes import Lacking, changes_of, completed, last_of
from penstock.sources.kafka.envelopes import JUDGES
from penstock.sources.kafka.held import Held, anchored, held_in, nowhere
from penstock.sources.kafka.layout import ASIDE, DATA, ERRORS, ERRORS_SCHEMA, META, Layout
from penstock.sources.kafka.prepared import (
    AGAIN,
    AGE,
    BAD,
    GONE,
    HAPPENED_MS,
    KEY,
    OFFSET,
    ORDER,
    ORIGIN,
    PARTITION,
    POSITION,
    REASON,
    TIMESTAMP,
    TOPIC,
    TOTAL_ORDER,
    TRANSACTION,
    VALUE,
)
from penstock.sources.kafka.transactions import RUNS, merged, runs_of
from penstock.sources.source import ScanOutput, SideRows

__all__ = ["Finishing", "KafkaScan", "Told"]

_IN_LOG: Final = (ORIGIN, HAPPENED_MS, POSITION, AGE)
"""Log columns of prepared records, for the detection of duplicates."""

_IN_TRANSACTION: Final = {
    TRANSACTION: "transaction",
    TOTAL_ORDER: "total_order",
    ORDER: "data_collection_order",
}
"""Column of the decoded event by internal column, for the place in the transaction."""


class Told(NamedTuple):
    """Report of a task on the records that it finished."""

    records: int
    bad: int
    first_bad: tuple[str, int, int, str] | None
    """Topic, partition, offset and reason of the first bad record."""

    again: int
    """Number of duplicates."""

    marks: Marks
    """Progress of each log, for the detection of later duplicates."""

    runs: pa.Table
    """Events by transaction, as runs; see `RUNS`."""

    held: Mapping[int, Held]
    """By partition, the last event put into side state."""

    aside: int
    """Number of rows put into side state."""


@dataclass(frozen=True, slots=True)
class KafkaScan:
    """Scan of an offset range of each partition of one topic."""

    options: Mapping[str, str] = field(repr=False)
    secrets: Collection[str] = field(repr=False)
    size: int
    into: Mapping[str, str]
    layout: Layout
    fresh: bool
    """True if no rows are stored yet, and so no row can be deleted."""

    marks: Marks = field(default_factory=dict)
    """Progress of each log in the events that were read before."""

    held: Mapping[int, Held] | None = None
    """By partition, the last event that still waits; None without transaction metadata."""

    side_rows: Mapping[str, SideRows] = field(default_factory=dict)
    format: str = "kafka"

    @property
    def by_key(self) -> bool:
        """Return whether all records of a key must be finished by one task."""
        return self.layout.envelope != "none"

    def prepare(self, rows: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
        """Yield the records of each batch, decoded."""
        prepare = self.preparing()
        for batch in rows:
            if batch.num_rows:
                yield prepare(pa.Table.from_batches([batch]))

    def preparing(self) -> Callable[[pa.Table], pa.Table]:
        """Return a function that prepares batches in order and keeps state between them."""
        marks, held = dict(self.marks), None if self.held is None else dict(self.held)
        return lambda read: self._prepared(read, marks, held)

    def _prepared(
        self, read: pa.Table, marks: dict[tuple[int, str], Mark], held: dict[int, Held] | None
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
        judged = JUDGES[layout.envelope](read, values.rows)
        for name, column in judged.columns.items():
            columns.setdefault(name, column)
        columns.update(self._of_record(read))
        for row, reason in judged.reasons.items():
            reasons.setdefault(row, reason)
        if held is not None:
            for row in np.flatnonzero(nowhere(values.rows)).tolist():
                reasons.setdefault(row, "it is in a transaction and does not say where in it")
        count = read.num_rows
        # A record that cannot be decoded is never a no-op.
        skipped = judged.skipped
        skipped[[bad.row for bad in values.bad]] = False
        if layout.envelope != "none":
            for name in layout.key_columns:
                nulls = pc.is_null(columns[name]).to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(nulls & ~skipped).tolist():
                    reasons.setdefault(row, f'column "{name}" of its key is null')
        bad_rows = np.zeros(count, bool)
        bad_rows[[*reasons]] = True
        bad_rows &= ~skipped
        again, log = np.zeros(count, bool), None
        if judged.log is not None:
            again, log = resent(judged.log, read.column("partition").to_numpy(), marks)
            again &= ~bad_rows
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
            PARTITION: read.column("partition"),
            OFFSET: read.column("offset"),
            TIMESTAMP: read.column("timestamp").cast(META["timestamp"]),
            KEY: key,
            VALUE: value,
            GONE: judged.gone,
            REASON: told,
            AGAIN: pa.array(again),
        }
        if log is not None:
            inner |= dict(zip(_IN_LOG, log.columns, strict=True))
        if held is not None:
            inner |= {name: values.rows.column(said) for name, said in _IN_TRANSACTION.items()}
        table = pa.table({**{name: columns[name] for name in layout.schema.names}, **inner})
        table = table.filter(pa.array(~skipped)) if skipped.any() else table
        if held is None:
            return table
        # A duplicate holds back no later event.
        sent_before = table.column(AGAIN)
        anchoring = anchored(table.filter(pc.invert(sent_before)), held)
        return pa.concat_tables([anchoring, table.filter(sent_before)])

    def _of_record(self, read: pa.Table) -> dict[str, pa.ChunkedArray]:
        """Return the columns filled from record parts other than the value."""
        layout = self.layout
        found = {name: read.column(what).cast(META[what]) for what, name in layout.include.items()}
        if layout.envelope == "none":
            found[layout.column_of("partition")] = read.column("partition")
            found[layout.column_of("offset")] = read.column("offset")
        return found

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """Return, for each record, the number of the task that finishes its key."""
        places = _places([rows.column(name) for name in self.layout.key_columns], count)
        if self.held is None:
            return pa.array(places, pa.int32())
        # Waiting events are not matched by key. Together, the events of a transaction make one run.
        waits = pc.is_valid(rows.column(TRANSACTION)).to_numpy(zero_copy_only=False)
        names, _ = transaction_ids.part_all(rows.column(TRANSACTION))
        there = _places([names], count)
        return pa.array(np.where(waits, there, places), pa.int32())

    def finish(self, rows: Iterable[pa.Table], out: ScanOutput) -> Told:
        """Write the rows that records produce, dead-letter bad records, and return a report."""
        finishing = Finishing(self, out)
        for table in rows:
            finishing.add(table)
        return finishing.told()


class Finishing:
    """Finishing of the prepared records of one topic, table by table."""

    def __init__(self, scan: KafkaScan, out: ScanOutput) -> None:
        self._scan = scan
        self._layout = scan.layout
        self._out = out
        self._records = 0
        self._again = 0
        self._bad: list[pa.Table] = []
        self._good: list[pa.Table] = []
        self._marks: Marks = {}
        self._runs: list[pa.Table] = []
        self._held: dict[int, Held] = {}
        self._aside = 0

    def add(self, table: pa.Table) -> None:
        """Process one table of prepared records."""
        self._records += table.num_rows
        if self._layout.envelope == "debezium":
            self._again += pc.sum(table.column(AGAIN)).as_py() or 0
            table = table.filter(pc.invert(table.column(AGAIN)))
        if self._scan.held is not None:
            # A bad record still counts as an event of its transaction.
            known = table.filter(pc.is_valid(table.column(TRANSACTION)))
            self._runs.append(runs_of(known.column(TRANSACTION), known.column(ORDER)))
        reasons = table.column(REASON)
        if reasons.null_count < table.num_rows:
            self._bad.append(table.filter(pc.is_valid(reasons)).select(BAD))
            table = table.filter(pc.is_null(reasons))
        if self._layout.envelope == "none":
            self._out.put(DATA, table.select(self._layout.schema.names))
            return
        if POSITION in table.column_names:
            log = table.select(_IN_LOG).rename_columns(MARKED.names)
            found = highest(log, table.column(PARTITION).to_numpy())
            self._marks = raised(self._marks, [found])
        if self._scan.held is not None:
            waits = pc.is_valid(table.column(TRANSACTION))
            self._put_aside(table.filter(waits))
            table = table.filter(pc.invert(waits))
        self._good.append(table)

    def told(self) -> Told:
        """Write the remaining rows and return the report of the task."""
        if self._good:
            self._put_last(pa.concat_tables(self._good))
        runs = merged(pa.concat_tables(self._runs)) if self._runs else RUNS.empty_table()
        told = Told(self._records, 0, None, self._again, self._marks, runs, self._held, self._aside)
        if not self._bad:
            return told
        rows = pa.concat_tables(self._bad)
        rows = rows.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
        if ERRORS in self._scan.into:
            self._out.put(ERRORS, pa.table(rows.columns, schema=ERRORS_SCHEMA))
        topic, partition, offset, reason = (
            rows.column(name)[0].as_py() for name in (TOPIC, PARTITION, OFFSET, REASON)
        )
        return told._replace(bad=rows.num_rows, first_bad=(topic, partition, offset, reason))

    def _put_last(self, rows: pa.Table) -> None:
        names, key = self._layout.schema.names, list(self._layout.key_columns)
        topic = pc.first(rows.column(TOPIC)).as_py()
        lacking = Lacking(GONE, topic) if self._layout.envelope == "debezium" else None
        last = last_of(rows, [*key, PARTITION], [OFFSET], lacking=lacking)
        last = last_of(last, key, [TIMESTAMP, PARTITION], lacking=lacking)
        come = last.filter(pc.invert(last.column(GONE))).select(names)
        stored = come.slice(0, 0)
        if not self._scan.fresh:
            stored = self._out.stored(DATA, last.select(key)).select(names)
        if lacking is not None:
            come = completed(come, stored, key, topic=topic)
        self._out.put(DATA, changes_of(stored, come))

    def _put_aside(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._aside += rows.num_rows
        names = (TRANSACTION, TOTAL_ORDER, ORDER, PARTITION, OFFSET, GONE)
        columns = [rows.column(name).combine_chunks() for name in self._layout.schema.names]
        row = pa.StructArray.from_arrays(columns, fields=list(self._layout.schema))
        arrays = [*(rows.column(name) for name in names), row]
        self._out.put(ASIDE, pa.table(arrays, schema=self._layout.aside))
        for partition, held in held_in(rows.select(names[:-1])).items():
            self._held[partition] = max(held, self._held.get(partition, held))


def _places(columns: Sequence[pa.ChunkedArray], count: int) -> npt.NDArray[np.int64]:
    packed = pack([column.combine_chunks() for column in columns])
    found: npt.NDArray[np.int64] = (key_hashes(packed).astype(np.int64) * count) >> 32
    return found
