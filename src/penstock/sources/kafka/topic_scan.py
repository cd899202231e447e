"""Records of one topic in a scan, and the rows that they produce.

The task that reads a record decodes it: its value, its key if the columns of the key are requested,
and its place in the topic. A record that cannot be decoded carries the reason. Then the records are
written:

    none      each record is a row, at its place (partition, offset)
    upsert    the last record of a key decides: its row is inserted, the stored row is deleted
    debezium  the same for change events, whose key is in their row

The last record of a key has the highest offset. A key may be in two partitions, for example after
partitions were added. The key then has a last record in each partition. The later of these counts,
by timestamp and then by partition.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data.packed import key_hashes, pack
from penstock.sources.context import ScanOutput
from penstock.sources.debezium import transaction_ids
from penstock.sources.debezium.buffer import (
    EventReport,
    WaitingEvent,
    hold_back,
    last_waiting_events,
    misses_order,
    side_schema,
)
from penstock.sources.debezium.dedup import (
    MARKED_LOG,
    Mark,
    Marks,
    find_duplicates,
    highest_marks,
    raise_marks,
)
from penstock.sources.debezium.last_by_key import (
    UnavailableValues,
    diff_rows,
    fill_from_stored,
    last_by_key,
)
from penstock.sources.debezium.transactions import RUNS, merge_runs, runs_of
from penstock.sources.kafka.decoded_columns import (
    AGE,
    BAD_RECORD,
    DELETED,
    DUPLICATE,
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
from penstock.sources.kafka.envelope import INTERPRETERS
from penstock.sources.kafka.output_schema import (
    DATA,
    ERRORS,
    ERRORS_SCHEMA,
    RECORD_PARTS,
    SIDE_STATE,
    OutputSchema,
)

__all__ = ["RecordWriter", "TopicReport", "TopicScan"]

_LOG_COLUMNS: Final = (ORIGIN, HAPPENED_MS, POSITION, AGE)
"""Log columns of decoded records, for the detection of duplicates."""

_TRANSACTION_COLUMNS: Final = {
    TRANSACTION: "transaction",
    TOTAL_ORDER: "total_order",
    ORDER: "data_collection_order",
}
"""Column of the decoded event by internal column, for the place in the transaction."""


class TopicReport(NamedTuple):
    """Report of a task on the records of one topic that it wrote."""

    records: int
    bad: int
    first_bad: tuple[str, int, int, str] | None
    """Topic, partition, offset and reason of the first bad record."""

    duplicates: int
    marks: Marks
    """Progress of each log, for the detection of later duplicates."""

    events: EventReport
    """Events of transactions, for the transaction buffer."""


@dataclass(frozen=True, slots=True)
class TopicScan:
    """Rules of one topic to decode records and to write them. Picklable."""

    output: OutputSchema
    is_first: bool
    """True if no rows are stored yet, and so no row can be deleted."""

    dead_letter: bool
    """True if bad records are written to the dead-letter collection."""

    marks: Marks = field(default_factory=dict)
    """Progress of each log in the events that were read before."""

    last_waiting: Mapping[int, WaitingEvent] | None = None
    """By partition, the last event that still waits; None without transaction metadata."""

    @property
    def by_key(self) -> bool:
        """Return whether all records of a key must be written by one task."""
        return self.output.envelope != "none"

    def decoder(self) -> Callable[[pa.Table], pa.Table]:
        """Return a function that decodes batches in order and keeps state between them."""
        marks = dict(self.marks)
        last_waiting = None if self.last_waiting is None else dict(self.last_waiting)
        return lambda records: self._decode(records, marks, last_waiting)

    def _decode(
        self,
        records: pa.Table,
        marks: dict[tuple[int, str], Mark],
        last_waiting: dict[int, WaitingEvent] | None,
    ) -> pa.Table:
        output, reasons = self.output, dict[int, str]()
        columns: dict[str, pa.ChunkedArray] = {}
        if output.key is not None:
            keys = output.key.decode(records.column("key"))
            reasons.update((bad.row, f"its key: {bad.reason}") for bad in keys.bad)
            columns.update(zip(keys.rows.column_names, keys.rows.columns, strict=True))
        values = output.value.decode(records.column("value"))
        for bad in values.bad:
            reasons.setdefault(bad.row, bad.reason)
        interpreted = INTERPRETERS[output.envelope](records, values.rows)
        for name, column in interpreted.columns.items():
            columns.setdefault(name, column)
        columns.update(self._record_columns(records))
        for row, reason in interpreted.reasons.items():
            reasons.setdefault(row, reason)
        if last_waiting is not None:
            for row in np.flatnonzero(misses_order(values.rows)).tolist():
                reasons.setdefault(row, "it is in a transaction and has no order in it")
        # A record that cannot be decoded is never a no-op.
        skipped = interpreted.skipped
        skipped[[bad.row for bad in values.bad]] = False
        self._check_key(columns, skipped, reasons)
        is_bad = np.zeros(records.num_rows, bool)
        is_bad[[*reasons]] = True
        is_bad &= ~skipped
        internal = {
            TOPIC: records.column("topic"),
            PARTITION: records.column("partition"),
            OFFSET: records.column("offset"),
            TIMESTAMP: records.column("timestamp").cast(RECORD_PARTS["timestamp"]),
            **_bad_columns(records, is_bad, reasons),
            DELETED: interpreted.deleted,
            DUPLICATE: pa.array(np.zeros(records.num_rows, bool)),
        }
        if interpreted.log is not None:
            partitions = records.column("partition").to_numpy()
            is_duplicate, log = find_duplicates(interpreted.log, partitions, marks)
            internal[DUPLICATE] = pa.array(is_duplicate & ~is_bad)
            internal |= dict(zip(_LOG_COLUMNS, log.columns, strict=True))
        if last_waiting is not None:
            for column_name, name in _TRANSACTION_COLUMNS.items():
                internal[column_name] = values.rows.column(name)
        table = pa.table({**{name: columns[name] for name in output.schema.names}, **internal})
        if skipped.any():
            table = table.filter(pa.array(~skipped))
        if last_waiting is None:
            return table
        # A duplicate holds back no later event.
        duplicates = table.column(DUPLICATE)
        new = _hold_back(table.filter(pc.invert(duplicates)), last_waiting)
        return pa.concat_tables([new, table.filter(duplicates)])

    def _record_columns(self, records: pa.Table) -> dict[str, pa.ChunkedArray]:
        """Return the columns filled from record parts other than the value."""
        output = self.output
        columns = {
            name: records.column(part).cast(RECORD_PARTS[part])
            for part, name in output.include.items()
        }
        if output.envelope == "none":
            columns[output.column_of("partition")] = records.column("partition")
            columns[output.column_of("offset")] = records.column("offset")
        return columns

    def _check_key(
        self,
        columns: Mapping[str, pa.ChunkedArray],
        skipped: npt.NDArray[np.bool_],
        reasons: dict[int, str],
    ) -> None:
        """Add a reason for each record with a null in its key."""
        if self.output.envelope == "none":
            return
        for name in self.output.key_columns:
            is_null = pc.is_null(columns[name]).to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(is_null & ~skipped).tolist():
                reasons.setdefault(row, f'column "{name}" of its key is null')

    def places(self, rows: pa.Table, count: int) -> pa.Array:
        """Return, for each record, the number of the task that writes its key."""
        places = _hash_places([rows.column(name) for name in self.output.key_columns], count)
        if self.last_waiting is None:
            return pa.array(places, pa.int32())
        # Waiting events are not matched by key. Together, the events of a transaction make one run.
        is_waiting = pc.is_valid(rows.column(TRANSACTION)).to_numpy(zero_copy_only=False)
        names, _ = transaction_ids.split_array(rows.column(TRANSACTION))
        return pa.array(np.where(is_waiting, _hash_places([names], count), places), pa.int32())


class RecordWriter:
    """Writer of the decoded records of one topic, table by table."""

    def __init__(self, scan: TopicScan, out: ScanOutput) -> None:
        self._scan = scan
        self._output = scan.output
        self._out = out
        self._records = 0
        self._duplicates = 0
        self._bad: list[pa.Table] = []
        self._good: list[pa.Table] = []
        self._marks: Marks = {}
        self._runs: list[pa.Table] = []
        self._last_waiting: dict[int, WaitingEvent] = {}
        self._side_rows = 0

    def add(self, table: pa.Table) -> None:
        """Process one table of decoded records."""
        has_transactions = self._scan.last_waiting is not None
        self._records += table.num_rows
        if self._output.envelope == "debezium":
            self._duplicates += pc.sum(table.column(DUPLICATE)).as_py() or 0
            table = table.filter(pc.invert(table.column(DUPLICATE)))
        if has_transactions:
            # A bad record still counts as an event of its transaction.
            events = table.filter(pc.is_valid(table.column(TRANSACTION)))
            self._runs.append(runs_of(events.column(TRANSACTION), events.column(ORDER)))
        reasons = table.column(REASON)
        if reasons.null_count < table.num_rows:
            self._bad.append(table.filter(pc.is_valid(reasons)).select(BAD_RECORD))
            table = table.filter(pc.is_null(reasons))
        if self._output.envelope == "none":
            self._out.put(DATA, table.select(self._output.schema.names))
            return
        if POSITION in table.column_names:
            log = table.select(_LOG_COLUMNS).rename_columns(MARKED_LOG.names)
            marks = highest_marks(log, table.column(PARTITION).to_numpy())
            self._marks = raise_marks(self._marks, [marks])
        if has_transactions:
            is_waiting = pc.is_valid(table.column(TRANSACTION))
            self._put_side_rows(table.filter(is_waiting))
            table = table.filter(pc.invert(is_waiting))
        self._good.append(table)

    def finish(self) -> TopicReport:
        """Write the remaining rows and return the report of the task."""
        if self._good:
            self._put_last(pa.concat_tables(self._good))
        runs = merge_runs(pa.concat_tables(self._runs)) if self._runs else RUNS.empty_table()
        events = EventReport(runs, self._last_waiting, self._side_rows)
        bad_count, first_bad = self._put_bad()
        return TopicReport(
            self._records, bad_count, first_bad, self._duplicates, self._marks, events
        )

    def _put_bad(self) -> tuple[int, tuple[str, int, int, str] | None]:
        if not self._bad:
            return 0, None
        rows = pa.concat_tables(self._bad)
        rows = rows.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
        if self._scan.dead_letter:
            self._out.put(ERRORS, pa.table(rows.columns, schema=ERRORS_SCHEMA))
        topic, partition, offset, reason = (
            rows.column(name)[0].as_py() for name in (TOPIC, PARTITION, OFFSET, REASON)
        )
        return rows.num_rows, (topic, partition, offset, reason)

    def _put_last(self, rows: pa.Table) -> None:
        names, key = self._output.schema.names, list(self._output.key_columns)
        topic = pc.first(rows.column(TOPIC)).as_py()
        is_debezium = self._output.envelope == "debezium"
        unavailable = UnavailableValues(DELETED, topic) if is_debezium else None
        last = last_by_key(rows, [*key, PARTITION], [OFFSET], unavailable=unavailable)
        last = last_by_key(last, key, [TIMESTAMP, PARTITION], unavailable=unavailable)
        inserts = last.filter(pc.invert(last.column(DELETED))).select(names)
        stored = inserts.slice(0, 0)
        if not self._scan.is_first:
            stored = self._out.stored(DATA, last.select(key)).select(names)
        if is_debezium:
            inserts = fill_from_stored(inserts, stored, key, topic=topic)
        self._out.put(DATA, diff_rows(stored, inserts))

    def _put_side_rows(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._side_rows += rows.num_rows
        names = (TRANSACTION, TOTAL_ORDER, ORDER, PARTITION, OFFSET, DELETED)
        schema = self._output.schema
        columns = [rows.column(name).combine_chunks() for name in schema.names]
        row = pa.StructArray.from_arrays(columns, fields=list(schema))
        arrays = [*(rows.column(name) for name in names), row]
        self._out.put(SIDE_STATE, pa.table(arrays, schema=side_schema(schema)))
        for partition, event in last_waiting_events(rows.select(names[:-1])).items():
            self._last_waiting[partition] = max(event, self._last_waiting.get(partition, event))


def _bad_columns(
    records: pa.Table, is_bad: npt.NDArray[np.bool_], reasons: Mapping[int, str]
) -> dict[str, pa.ChunkedArray]:
    """Return key, value and reason of bad records, with nulls for all others."""
    count = records.num_rows
    if not is_bad.any():
        nulls = pa.nulls(count, pa.binary())
        return {KEY: nulls, VALUE: nulls, REASON: pa.nulls(count, pa.string())}
    mask, null = pa.array(is_bad), pa.scalar(None, pa.binary())
    return {
        KEY: pc.if_else(mask, records.column("key"), null),
        VALUE: pc.if_else(mask, records.column("value"), null),
        REASON: pa.array([reasons.get(row) if is_bad[row] else None for row in range(count)]),
    }


def _hold_back(table: pa.Table, last_waiting: dict[int, WaitingEvent]) -> pa.Table:
    transactions, total_orders = hold_back(
        table.column(TRANSACTION).combine_chunks(),
        table.column(TOTAL_ORDER).combine_chunks(),
        table.column(PARTITION).to_numpy(),
        table.column(OFFSET),
        is_bad=pc.is_valid(table.column(REASON)).to_numpy(zero_copy_only=False),
        last_waiting=last_waiting,
    )
    for name, column in ((TRANSACTION, transactions), (TOTAL_ORDER, total_orders)):
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _hash_places(columns: Sequence[pa.ChunkedArray], count: int) -> npt.NDArray[np.int64]:
    packed = pack([column.combine_chunks() for column in columns])
    places: npt.NDArray[np.int64] = (key_hashes(packed).astype(np.int64) * count) >> 32
    return places
