"""Transaction buffer: events in side state until their transactions are complete.

Names in side state have a number:

    events/TOPIC/3     events of incomplete transactions
    markers/7          their BEGIN and END records
    applied/0          applied transactions, to detect duplicates

When some events under a name are applied, the remaining ones are written under the next number. The
numbers are stored as state in the same log entry. A restart therefore finds an event either in side
state or in its collection. The log position of the last applied END is stored with them.

An event without a transaction that follows a waiting event in its partition waits with that event.
Otherwise the earlier event would be applied after the later one. Any other event without a
transaction is applied at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF
from penstock.data.packed import key_hashes, pack
from penstock.sources.context import SideRows, TickTransaction
from penstock.sources.debezium import transaction_ids
from penstock.sources.debezium.last_by_key import (
    UnavailableValues,
    diff_rows,
    fill_from_stored,
    last_by_key,
)
from penstock.sources.debezium.transactions import (
    MARKERS,
    AppliedTransaction,
    Transactions,
    runs_of,
)

__all__ = [
    "NUMBERS",
    "BufferedTopic",
    "EventReport",
    "TransactionBuffer",
    "WaitingEvent",
    "hold_back",
    "last_waiting_events",
    "misses_order",
    "side_schema",
]

NUMBERS: Final = "aside"
"""State key of the numbers."""

KNOWN_TRANSACTIONS: Final = 100_000
"""Minimum number of recently applied transactions in side state."""

EVENT_BYTES: Final = 512
"""Estimated size of an event in memory, in bytes."""

APPLY_BYTES: Final = 128 << 20
"""Approximate limit of applied events in memory at once, in bytes."""

_APPLIED_SCHEMA: Final = pa.schema(
    [
        pa.field("transaction", pa.string(), nullable=False),
        pa.field("at", pa.int64(), nullable=False),
        pa.field("counts", pa.string(), nullable=False),
    ]
)
"""Applied transactions: log position of the END, and number of events by topic, as JSON."""

_COUNTS: Final = msgspec.json.Decoder(dict[str, int])
_MARKERS: Final = "markers"
_APPLIED: Final = "applied"
_POSITION: Final = "upto"
"""Stems of names in side state, and the key of the log position among their numbers."""


class WaitingEvent(NamedTuple):
    """Last waiting event of a partition: its offset, its transaction, and its order in that."""

    offset: int
    transaction: str
    total_order: int


class EventReport(NamedTuple):
    """Events of one topic that one task has read and put into side state."""

    runs: pa.Table
    """Events by transaction, as runs; see `RUNS`."""

    last_waiting: Mapping[int, WaitingEvent]
    """Last event put into side state, by partition."""

    side_row_count: int


@dataclass(frozen=True, slots=True)
class BufferedTopic:
    """Topic with events of transactions, and the collection of its rows."""

    data_collection: str | None
    """Debezium's name of the table, if the name of the topic does not end with it."""

    collection: str
    schema: pa.Schema
    key_columns: tuple[str, ...]


def side_schema(row: pa.Schema) -> pa.Schema:
    """Return the columns of an event in side state, given the columns of its row."""
    return pa.schema(
        [
            pa.field("transaction", pa.string(), nullable=False),
            pa.field("total_order", pa.int64(), nullable=False),
            # Order among the events of the transaction in this topic; null for an event of no
            # transaction.
            pa.field("order", pa.int64()),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("gone", pa.bool_(), nullable=False),
            pa.field("row", pa.struct(list(row)), nullable=False),
        ]
    )


class TransactionBuffer:
    """Transaction buffer of one open source."""

    def __init__(self, topics: Mapping[str, BufferedTopic], numbers: Mapping[str, int]) -> None:
        """Create an empty buffer, given the stored numbers; `load` reads its contents."""
        self.transactions = Transactions(
            {name: topic.data_collection for name, topic in topics.items()},
            numbers.get(_POSITION, transaction_ids.NO_POSITION),
        )
        self.last_waiting: dict[str, dict[int, WaitingEvent]] = {topic: {} for topic in topics}
        """Last waiting event by topic and partition."""

        self._topics = topics
        self._numbers = dict(numbers)
        self._durable: set[str] = set()
        """Names with rows from before this tick."""

        self._applied: dict[int, dict[str, AppliedTransaction]] = {}
        """Known applied transactions, by number of their side-state name."""

    def side_rows(self) -> dict[str, SideRows]:
        """Return, by topic, the side state that receives new events."""
        return {
            name: SideRows(self._name(_events(name)), side_schema(topic.schema))
            for name, topic in self._topics.items()
        }

    def load(self, tick: TickTransaction) -> None:
        """Load the buffer from side state; must be called first."""
        last_number = self._number(_APPLIED)
        for number in (last_number - 1, last_number):
            for part in tick.side_rows(f"{_APPLIED}/{number}"):
                names, positions, counts = (
                    part.column(name).to_pylist() for name in _APPLIED_SCHEMA.names
                )
                applied = map(AppliedTransaction, positions, map(_COUNTS.decode, counts))
                self._add_applied(number, dict(zip(names, applied, strict=True)))
        markers = [MARKERS.empty_table(), *tick.side_rows(self._name(_MARKERS))]
        self._note_durable(self._name(_MARKERS), markers[1:])
        self.transactions.add_markers(pa.concat_tables(markers).sort_by("offset"))
        for topic in self._topics:
            name = self._name(_events(topic))
            for part in tick.side_rows(name):
                self._note_durable(name, [part])
                runs = runs_of(part.column("transaction"), part.column("order"))
                self.transactions.add_events(topic, runs)
                self._add_waiting(topic, last_waiting_events(part))
        self._release_applied()
        names = {self._name(stem) for stem in (_MARKERS, *map(_events, self._topics))}
        tick.retain_side_rows(
            names | {f"{_APPLIED}/{last_number - 1}", f"{_APPLIED}/{last_number}"}
        )

    def process(
        self,
        tick: TickTransaction,
        reports: Mapping[str, Iterable[EventReport]],
        markers: pa.Table,
    ) -> None:
        """Process the events and markers of a tick: apply complete transactions, store the others.

        Raises:
            EventsNotCounted: an END does not count events of a topic that has some.
        """
        transactions = self.transactions
        new_markers = transactions.add_markers(markers)
        new_rows = dict.fromkeys(self._topics, 0)
        topics_with_duplicates = set()
        for topic, topic_reports in reports.items():
            for report in topic_reports:
                if transactions.add_events(topic, report.runs):
                    topics_with_duplicates.add(topic)
                self._add_waiting(topic, report.last_waiting)
                new_rows[topic] += report.side_row_count
        ready, applied_before = transactions.ready(), transactions.applied_before()
        numbers_before = dict(self._numbers)
        sizes = {topic: transactions.event_count(topic, ready) for topic in self._topics}
        applied = transactions.apply(ready)
        self._numbers[_POSITION] = transactions.position
        for topic in self._topics:
            name = self._name(_events(topic))
            has_rows = name in self._durable or new_rows[topic]
            if has_rows and (sizes[topic] or topic in topics_with_duplicates):
                new = [transaction for transaction in ready if transaction not in applied_before]
                self._apply(tick, topic, new, sizes[topic])
            elif has_rows:
                self._durable.add(name)
        self._store_markers(
            tick, markers.take(pa.array(new_markers, pa.int64())), applied=bool(ready)
        )
        self._store_applied(tick, applied)
        self._release_applied()
        if self._numbers != numbers_before:
            tick.put_state(NUMBERS, dict(self._numbers))

    # Apply.

    def _apply(self, tick: TickTransaction, topic: str, ready: list[str], size: int) -> None:
        """Move events of complete transactions from side state to their collection."""
        stem = _events(topic)
        name = self._name(stem)
        next_name = f"{stem}/{self._number(stem) + 1}"
        pass_count = 1 + size * EVENT_BYTES // APPLY_BYTES
        order = pa.array(ready, pa.string())
        waiting_rows = 0
        for number in range(pass_count):
            # Parts have no order, so all of them are read before the last event of a key is known.
            ready_parts: list[pa.Table] = []
            for part in tick.side_rows(name):
                ranks, is_waiting = self._rank(part, order)
                if number == 0 and pc.any(is_waiting).as_py():
                    waiting = part.filter(is_waiting)
                    waiting_rows += waiting.num_rows
                    tick.append_side_rows(next_name, waiting)
                events = self._event_rows(topic, part, ranks).filter(pc.is_valid(ranks))
                ready_parts.append(self._rows_of_pass(topic, events, number, pass_count))
            if any(part.num_rows for part in ready_parts):
                self._write(tick, topic, self._last_by_key(topic, pa.concat_tables(ready_parts)))
        if waiting_rows or name in self._durable:
            tick.drop_side_rows(name)
            self._durable.discard(name)
            self._numbers[stem] = self._number(stem) + 1
            if waiting_rows:
                self._durable.add(next_name)
        else:
            tick.discard_side_rows(name)

    def _rank(self, part: pa.Table, ready: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the rank of each event to apply, else null, and whether each event still waits."""
        names, positions = (
            column.combine_chunks()
            for column in transaction_ids.split_array(part.column("transaction"))
        )
        encoded = names.dictionary_encode()
        names = encoded.dictionary
        ranks = pc.index_in(names, value_set=ready).cast(pa.int64()).take(encoded.indices)
        applied_positions = pa.array(
            map(self.transactions.applied_position, names.to_pylist()), pa.int64()
        )
        was_applied = pc.less_equal(positions, applied_positions.take(encoded.indices))
        is_done = pc.or_(pc.is_valid(ranks), pc.fill_null(was_applied, fill_value=False))
        # An event of no transaction, behind a duplicate: nothing holds it back.
        is_free = pc.and_(pc.is_null(part.column("order").combine_chunks()), is_done)
        first = pc.if_else(is_free, pa.scalar(-1, pa.int64()), pa.scalar(None, pa.int64()))
        return pc.coalesce(ranks, first), pc.invert(is_done)

    def _event_rows(self, topic: str, part: pa.Table, ranks: pa.Array) -> pa.Table:
        rows = part.column("row").combine_chunks()
        names = self._topics[topic].schema.names
        columns = {name: pc.struct_field(rows, [index]) for index, name in enumerate(names)}
        columns[_RANK] = ranks
        for internal, name in _ORDER_COLUMNS.items():
            columns[internal] = part.column(name)
        return pa.table(columns)

    def _rows_of_pass(self, topic: str, rows: pa.Table, number: int, pass_count: int) -> pa.Table:
        if pass_count == 1 or not rows.num_rows:
            return rows
        keys = [rows.column(name).combine_chunks() for name in self._topics[topic].key_columns]
        hashes = key_hashes(pack(keys)).astype(np.int64)
        return rows.filter(pa.array((hashes * pass_count) >> 32 == number))

    def _last_by_key(self, topic: str, rows: pa.Table) -> pa.Table:
        key = list(self._topics[topic].key_columns)
        order = (_RANK, _TOTAL_ORDER, _OFFSET)
        return last_by_key(rows, key, order, unavailable=UnavailableValues(_DELETED, topic))

    def _write(self, tick: TickTransaction, name: str, last: pa.Table) -> None:
        topic = self._topics[name]
        columns, key = topic.schema.names, list(topic.key_columns)
        inserts = last.filter(pc.invert(last.column(_DELETED))).select(columns)
        stored = tick.lookup(topic.collection, last.select(key)).select(columns)
        inserts = fill_from_stored(inserts, stored, key, topic=name).cast(topic.schema)
        changes = diff_rows(stored.cast(topic.schema), inserts)
        diffs = changes.column(DIFF)
        rows = changes.drop_columns([DIFF])
        tick.change(
            topic.collection,
            deletes=rows.filter(pc.less(diffs, 0)),
            inserts=rows.filter(pc.greater(diffs, 0)),
        )

    # Store.

    def _store_markers(self, tick: TickTransaction, new: pa.Table, *, applied: bool) -> None:
        name = self._name(_MARKERS)
        if not applied:
            if new.num_rows:
                tick.append_side_rows(name, new)
                self._durable.add(name)
            return
        if name in self._durable:
            tick.drop_side_rows(name)
            self._durable.discard(name)
            self._numbers[_MARKERS] = self._number(_MARKERS) + 1
            name = self._name(_MARKERS)
        waiting = self.transactions.markers()
        if waiting.num_rows:
            tick.append_side_rows(name, waiting)
            self._durable.add(name)

    def _store_applied(
        self, tick: TickTransaction, applied: Mapping[str, AppliedTransaction]
    ) -> None:
        if not applied:
            return
        number = self._number(_APPLIED)
        if len(self._applied.get(number, {})) >= KNOWN_TRANSACTIONS:
            if number - 1 in self._applied:
                tick.drop_side_rows(f"{_APPLIED}/{number - 1}")
                self.transactions.forget(self._applied.pop(number - 1))
            number += 1
            self._numbers[_APPLIED] = number
        self._add_applied(number, applied)
        positions = [transaction.position for transaction in applied.values()]
        counts = [
            msgspec.json.encode(transaction.counts).decode() for transaction in applied.values()
        ]
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(([*applied], positions, counts), _APPLIED_SCHEMA, strict=True)
        ]
        tick.append_side_rows(f"{_APPLIED}/{number}", pa.table(arrays, schema=_APPLIED_SCHEMA))

    def _add_applied(self, number: int, applied: Mapping[str, AppliedTransaction]) -> None:
        self.transactions.add_applied(applied)
        self._applied.setdefault(number, {}).update(applied)

    def _add_waiting(self, topic: str, events: Mapping[int, WaitingEvent]) -> None:
        last_waiting = self.last_waiting[topic]
        for partition, event in events.items():
            last_waiting[partition] = max(event, last_waiting.get(partition, event))

    def _release_applied(self) -> None:
        """Drop applied events from `last_waiting`: later events of the partition need not wait."""
        for topic, events in self.last_waiting.items():
            self.last_waiting[topic] = {
                partition: event
                for partition, event in events.items()
                if not self.transactions.is_applied(event.transaction)
            }

    def _note_durable(self, name: str, parts: Iterable[pa.Table]) -> None:
        if any(part.num_rows for part in parts):
            self._durable.add(name)

    def _number(self, stem: str) -> int:
        return self._numbers.get(stem, 0)

    def _name(self, stem: str) -> str:
        return f"{stem}/{self._number(stem)}"


_RANK: Final = "\0rank"
_TOTAL_ORDER: Final = "\0total_order"
_OFFSET: Final = "\0offset"
_DELETED: Final = "\0deleted"
_ORDER_COLUMNS: Final = {_TOTAL_ORDER: "total_order", _OFFSET: "offset", _DELETED: "gone"}
"""Internal columns next to the columns of a row, and their names in side state."""


def _events(topic: str) -> str:
    return f"events/{topic}"


def last_waiting_events(rows: pa.Table) -> dict[int, WaitingEvent]:
    """Return, by partition, the last of rows that are or were in side state.

    The columns must be in the order of the side-state schema. Their names do not matter.
    """
    transactions, total_orders, _, partitions, offsets = rows.columns[:5]
    partition_numbers, offset_numbers = partitions.to_numpy(), offsets.to_numpy()
    events = {}
    for partition in np.unique(partition_numbers).tolist():
        partition_rows = np.flatnonzero(partition_numbers == partition)
        row = int(partition_rows[np.argmax(offset_numbers[partition_rows])])
        events[partition] = WaitingEvent(
            int(offset_numbers[row]), transactions[row].as_py(), total_orders[row].as_py()
        )
    return events


def hold_back(
    transactions: pa.Array,
    total_orders: pa.Array,
    partitions: npt.NDArray[np.int32],
    offsets: pa.ChunkedArray,
    *,
    is_bad: npt.NDArray[np.bool_],
    last_waiting: dict[int, WaitingEvent],
) -> tuple[pa.Array, pa.Array]:
    """Return transactions and total orders of events, in the order of their partitions.

    An event without a transaction gets those of the last waiting event before it in its partition.
    Updates `last_waiting`.
    """
    row_count = len(partitions)
    has_transaction = pc.is_valid(transactions).to_numpy(zero_copy_only=False) & ~is_bad
    previous = np.full(row_count, -1)
    for partition in np.unique(partitions).tolist():
        rows = np.flatnonzero(partitions == partition)
        previous[rows] = np.maximum.accumulate(np.where(has_transaction[rows], rows, -1))
    is_free = ~has_transaction & ~is_bad
    is_first = is_free & (previous < 0)
    origin = pa.array(
        np.where(has_transaction | is_bad, np.arange(row_count), previous), pa.int64()
    )
    origin = pc.if_else(pa.array(is_first), pa.scalar(None, pa.int64()), origin)
    transactions, total_orders = transactions.take(origin), total_orders.take(origin)
    for partition, event in last_waiting.items():
        follows = pa.array(is_first & (partitions == partition))
        transactions = pc.if_else(follows, event.transaction, transactions)
        total_orders = pc.if_else(follows, event.total_order, total_orders)
    for partition in np.unique(partitions[has_transaction]).tolist():
        row = int(np.flatnonzero(has_transaction & (partitions == partition))[-1])
        last_waiting[partition] = WaitingEvent(
            offsets[row].as_py(), transactions[row].as_py(), total_orders[row].as_py()
        )
    return transactions, total_orders


def misses_order(events: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which decoded events are in a transaction but have no order in it."""
    no_order = pc.or_(
        pc.is_null(events.column("total_order")), pc.is_null(events.column("data_collection_order"))
    )
    in_transaction = pc.is_valid(events.column("transaction"))
    mask: npt.NDArray[np.bool_] = pc.and_(in_transaction, no_order).to_numpy(zero_copy_only=False)
    return mask
