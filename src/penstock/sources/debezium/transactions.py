"""Complete transactions of the database, in the order of their END records.

Debezium writes the events of one transaction to the topics of their tables. It also writes a BEGIN
and an END record to the transaction metadata topic. The END has the number of events by table:

    BEGIN 571:53195829     END 571:53195832, 3 events: 2 of public.orders, 1 of public.lines

Topics progress independently, so events may arrive before the END or after it. A transaction is
complete once its END and all its events have arrived. Transactions are applied in the order of
their ENDs. The first incomplete transaction holds back all later ones. So does a transaction with a
BEGIN and no END, even if later transactions have ended.

An id names the transaction and, for Postgres, the log position of the record; see
`transaction_ids.py`. A database reuses transaction numbers. Postgres does so after 2^32
transactions of the whole server, and only few of them may be in the topics. A new transaction may
therefore have the number of a known applied one. The new one is after the END of the other in the
log. A record with a position at or before that END is a duplicate. A record with a later position
removes the other from the known transactions. If the other still waits, the source stops. Ids
without a log position are never reused.

A connector repeats some records after a restart. A known BEGIN or END has no effect. An event is
counted once, by its order in its transaction. Duplicates of a recently applied transaction are
dropped. An event beyond the count of an applied transaction is not a duplicate, and stops the
source.

A connector may repeat more transactions than are known. The tasks that read duplicate events drop
them, so a repeated END would wait for its events without limit. If ids have log positions, ENDs are
in the log in their order. An END at or before the last applied END was therefore applied too. Such
an END waits for nothing, and its events are dropped.

This module has no I/O. The caller stores the state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DefiniteError
from penstock.sources.debezium import transaction_ids

__all__ = [
    "MARKERS",
    "RUNS",
    "AppliedTransaction",
    "EventsNotCounted",
    "TransactionEnd",
    "Transactions",
    "match_topics",
    "merge_runs",
    "runs_of",
]

RUNS: Final = pa.schema(
    [
        ("transaction", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("position", pa.int64()),
    ]
)
"""Runs of consecutive events of a transaction in one topic: first and last order in the topic, and
the highest log position in their ids.
"""

MARKERS: Final = pa.schema(
    [
        pa.field("transaction", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("counts", pa.string()),
    ]
)
"""BEGIN or END of a transaction; for an END, the number of events by data collection, as JSON."""

_RESTART_HINT: Final = "To replicate the current contents, drop the source and start it again."


class EventsNotCounted(DefiniteError):
    """Events of a transaction whose END does not count events of their topic."""

    def __init__(self, topic: str, transaction: str) -> None:
        super().__init__(
            f'topic "{topic}" has events of transaction "{transaction}", which its END does not '
            "count",
            detail="By its name, the topic belongs to none of the data collections in the END.",
            hint=f"Name the table of the topic: topics: {{{topic}: SCHEMA.TABLE}}",
        )


def runs_of(transactions: pa.ChunkedArray, orders: pa.ChunkedArray) -> pa.Table:
    """Return events as runs; events without an order are left out."""
    ordered = pc.is_valid(orders)
    names, positions = transaction_ids.split_array(transactions.filter(ordered))
    orders = orders.filter(ordered)
    return merge_runs(pa.table([names, orders, orders, positions], schema=RUNS))


def merge_runs(runs: pa.Table) -> pa.Table:
    """Return the same events in the fewest runs, grouped by transaction."""
    if not runs.num_rows:
        return runs
    encoded = runs.column("transaction").combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int64)
    firsts, lasts, positions = (
        runs.column(name).to_numpy() for name in ("first", "last", "position")
    )
    order = np.lexsort((firsts, codes))
    codes, firsts, lasts = codes[order], firsts[order], lasts[order]
    # Offsets between transactions, large enough to keep runs of two transactions separate.
    shifts = codes * (int(lasts.max()) + 3)
    highest = np.maximum.accumulate(shifts + lasts)
    is_start = np.append(True, (shifts + firsts)[1:] > highest[:-1] + 1)
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], len(is_start)) - 1
    names = encoded.dictionary.take(pa.array(codes[starts]))
    numbers = (
        firsts[starts],
        highest[ends] - shifts[ends],
        np.maximum.reduceat(positions[order], starts),
    )
    return pa.table([names, *map(pa.array, numbers)], schema=RUNS)


def match_topics(collections: Iterable[str], topics: Mapping[str, str | None]) -> dict[str, str]:
    """Return the topic with the events of each data collection, for collections that have one.

    A topic without a configured data collection has the events of the longest collection name that
    its own name ends with.
    """
    longest: dict[str, tuple[int, str]] = {}
    for topic, configured in topics.items():
        candidates = [
            name
            for name in collections
            if (name == configured if configured is not None else f".{topic}".endswith(f".{name}"))
        ]
        if candidates:
            collection = max(candidates, key=len)
            longest[collection] = max(longest.get(collection, (0, "")), (len(topic), topic))
    return {collection: topic for collection, (_, topic) in longest.items()}


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """END record of a transaction."""

    offset: int
    counts: Mapping[str, int]
    """Expected number of events by topic; only for topics of the source."""

    counts_json: str
    """Expected number of events by data collection, as received."""

    id: str
    position: int
    """Id as received, and the log position in it."""

    begins: Mapping[str, int]
    """Ids of its BEGIN records, as far as they were received, with their offsets."""

    was_applied: bool
    """True if the transaction was applied and is no longer known."""


class AppliedTransaction(NamedTuple):
    """State of an applied transaction, for the detection of duplicates."""

    position: int
    """Log position of its END."""

    counts: Mapping[str, int]
    """Number of its events by topic."""


class _Received(NamedTuple):
    """Events of a transaction in a topic: their number, and the order of the last one."""

    events: int
    last: int


class Transactions:
    """State of the transactions that are not applied yet."""

    def __init__(
        self, topics: Mapping[str, str | None], position: int = transaction_ids.NO_POSITION
    ) -> None:
        """Start without transactions.

        `topics` maps each topic with events to its data collection, if the file names it.
        """
        self._topics = topics
        self.position = position
        """Log position of the last applied END."""

        self._open: dict[str, int] = {}
        """Offset of the BEGIN by id as received, for transactions without an END."""

        self._ended: dict[str, TransactionEnd] = {}
        """END records in their order, by transaction."""

        self._runs = {topic: RUNS.empty_table() for topic in topics}
        self._received: dict[str, dict[str, _Received]] = {topic: {} for topic in topics}
        """Received events by topic and transaction."""

        self._applied: dict[str, AppliedTransaction] = {}

    # Input.

    def add_markers(self, markers: pa.Table) -> list[int]:
        """Process BEGIN and END records in order, and return the row numbers of new ones.

        Raises:
            DefiniteError: a new transaction has the number of a waiting one.
        """
        columns = (column.to_pylist() for column in markers.columns)
        return [
            row
            for row, (id, offset, status, counts) in enumerate(zip(*columns, strict=True))
            if (self._end(id, offset, counts) if status == "END" else self._begin(id, offset))
        ]

    def _begin(self, id: str, offset: int) -> bool:
        name, position = transaction_ids.split(id)
        if id in self._open or self._is_known(transaction_ids.join(id)):
            return False
        if self._has_ended(name, position) or self._is_duplicate(name, position):
            return False
        self._open[id] = offset
        return True

    def _end(self, id: str, offset: int, counts: str | None) -> bool:
        name, position = transaction_ids.split(id)
        if id in self._open or self._is_known(transaction_ids.join(id)):
            name = transaction_ids.join(id)
        if self._is_known(name):
            return False
        begin_ids = [
            begin_id
            for begin_id in self._open
            if id == begin_id or transaction_ids.split(begin_id)[0] == name
        ]
        begins = {begin_id: self._open.pop(begin_id) for begin_id in begin_ids}
        was_applied = transaction_ids.NO_POSITION < position <= self.position
        counts_json = counts or "{}"
        self._ended[name] = TransactionEnd(
            offset, self._counts_by_topic(counts_json), counts_json, id, position, begins,
            was_applied,
        )  # fmt: skip
        return True

    def add_events(self, topic: str, runs: pa.Table) -> bool:
        """Process events, and return whether some belong to transactions that were applied before.

        Raises:
            EventsNotCounted: the END of a transaction does not count events of the topic.
            DefiniteError: an applied transaction has an event beyond its count; or a waiting
                transaction has the same number.
        """
        has_duplicates = False
        for name, last, position in _last_events(runs):
            self._has_ended(name, position)
            if not self._is_duplicate(name, position):
                continue
            has_duplicates = True
            counts = self._applied[name].counts
            if topic not in counts:
                raise EventsNotCounted(topic, name)
            if last > counts[topic]:
                raise DefiniteError(
                    f'topic "{topic}" has event {last} of transaction "{name}", which was applied '
                    f"with {counts[topic]}",
                    detail="The END of the transaction does not count the event.",
                    hint=_RESTART_HINT,
                )
        if has_duplicates:
            runs = runs.filter(self._are_waiting(runs.column("transaction")))
        self._runs[topic] = merge_runs(pa.concat_tables([self._runs[topic], runs]))
        self._count_received(topic)
        return has_duplicates

    def add_applied(self, applied: Mapping[str, AppliedTransaction]) -> None:
        """Record transactions as applied, new or loaded, to detect their duplicates."""
        for name, transaction in applied.items():
            known = self._applied.get(name, transaction)
            self._applied[name] = max(transaction, known, key=lambda one: one.position)
            self._ended.pop(name, None)

    def forget(self, applied: Mapping[str, AppliedTransaction]) -> None:
        """Forget transactions that were applied too long ago to be sent again."""
        for name, transaction in applied.items():
            # A later transaction may have the same number.
            if self._applied.get(name) == transaction:
                del self._applied[name]

    # Output.

    def ready(self) -> list[str]:
        """Return the transactions to apply next, in order.

        Raises:
            EventsNotCounted: an END does not count events of a topic that has some.
        """
        ready = []
        first_open = min(self._open.values(), default=None)
        for name, end in self._ended.items():
            is_blocked = first_open is not None and first_open < end.offset
            if is_blocked or self._missing_events(name, end):
                break
            ready.append(name)
        return ready

    def applied_before(self) -> set[str]:
        """Return the ended transactions that were applied before, and sent again."""
        return {name for name, end in self._ended.items() if end.was_applied}

    def apply(self, names: Sequence[str]) -> dict[str, AppliedTransaction]:
        """Mark transactions as applied, and return the state to store."""
        applied = {name: self._applied_state(name, self._ended[name]) for name in names}
        self.add_applied(applied)
        positions = (transaction.position for transaction in applied.values())
        self.position = max([self.position, *positions])
        for topic, runs in self._runs.items():
            if runs.num_rows:
                self._runs[topic] = runs.filter(self._are_waiting(runs.column("transaction")))
                self._count_received(topic)
        return applied

    def applied_position(self, name: str) -> int | None:
        """Return the log position of the END, if the transaction was applied recently."""
        transaction = self._applied.get(name)
        return None if transaction is None else transaction.position

    def is_applied(self, id: str) -> bool:
        """Return whether the transaction of an event with this id was applied recently."""
        name, position = transaction_ids.split(id)
        applied_position = self.applied_position(name)
        return applied_position is not None and position <= applied_position

    def event_count(self, topic: str, names: Iterable[str]) -> int:
        """Return the number of received events of these transactions in a topic."""
        received = self._received[topic]
        return sum(received[name].events for name in names if name in received)

    def markers(self) -> pa.Table:
        """Return the BEGIN and END records of transactions that are not applied."""
        ends = self._ended.values()
        rows = [
            *((id, offset, "BEGIN", None) for id, offset in self._open.items()),
            *((id, offset, "BEGIN", None) for end in ends for id, offset in end.begins.items()),
            *((end.id, end.offset, "END", end.counts_json) for end in ends),
        ]
        rows.sort(key=lambda row: row[1])
        columns = [*zip(*rows, strict=True)] or [()] * len(MARKERS)
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, MARKERS, strict=True)
        ]
        return pa.table(arrays, schema=MARKERS)

    def waiting_events(self) -> int:
        """Return the number of events that wait for their transactions."""
        return sum(
            events.events for received in self._received.values() for events in received.values()
        )

    def blocking_transaction(self) -> str | None:
        """Return the transaction that holds back the others or is incomplete, if any."""
        first_open = min(self._open, key=self._open.__getitem__, default=None)
        first_ended = next(iter(self._ended.items()), None)
        if first_ended is not None and (
            first_open is None or self._open[first_open] > first_ended[1].offset
        ):
            return first_ended[0]
        if first_open is not None:
            return transaction_ids.split(first_open)[0]
        return next((name for received in self._received.values() for name in received), None)

    def describe_missing(self, name: str) -> str:
        """Return the missing parts of a transaction, as text for the status page."""
        end = self._ended.get(name)
        if end is None:
            return f'the END of transaction "{name}"'
        missing = ", ".join(
            f'{count} of {expected} in topic "{topic}"'
            for topic, (count, expected) in sorted(self._missing_events(name, end).items())
        )
        return f'events of transaction "{name}" that has ended: {missing}'

    def _is_known(self, name: str) -> bool:
        return name in self._applied or name in self._ended

    def _has_ended(self, name: str, position: int) -> bool:
        """Return whether the transaction has ended and waits."""
        end = self._ended.get(name)
        if end is not None and position > end.position:
            raise DefiniteError(
                f'two transactions have the number "{name}", and the first of them waits',
                detail=f"The first waits for {self.describe_missing(name)}.",
                hint=_RESTART_HINT,
            )
        return end is not None

    def _is_duplicate(self, name: str, position: int) -> bool:
        """Return whether the transaction was applied; a later one with its number removes it."""
        applied = self._applied.get(name)
        if applied is not None and position > applied.position:
            del self._applied[name]
            return False
        return applied is not None

    def _counts_by_topic(self, counts_json: str) -> dict[str, int]:
        counts = msgspec.json.decode(counts_json, type=dict[str, int])
        topics = match_topics(counts, self._topics)
        return {topic: counts[collection] for collection, topic in topics.items()}

    def _applied_state(self, name: str, end: TransactionEnd) -> AppliedTransaction:
        counts = {
            topic: max(expected, self._received[topic].get(name, _Received(0, 0)).last)
            for topic, expected in end.counts.items()
        }
        return AppliedTransaction(end.position, counts)

    def _missing_events(self, name: str, end: TransactionEnd) -> dict[str, tuple[int, int]]:
        """Return, by topic, the number of missing events and of expected ones."""
        for topic, received in self._received.items():
            if name in received and topic not in end.counts:
                raise EventsNotCounted(topic, name)
        if end.was_applied:
            return {}
        missing = {
            topic: (expected - self.event_count(topic, [name]), expected)
            for topic, expected in end.counts.items()
        }
        return {topic: counts for topic, counts in missing.items() if counts[0] > 0}

    def _are_waiting(self, names: pa.ChunkedArray) -> pa.Array:
        """Return which of the names are transactions that were not applied."""
        encoded = names.combine_chunks().dictionary_encode()
        are_waiting = pa.array(
            [name not in self._applied for name in encoded.dictionary.to_pylist()], pa.bool_()
        )
        return are_waiting.take(encoded.indices)

    def _count_received(self, topic: str) -> None:
        runs = self._runs[topic]
        sizes = pc.add(pc.subtract(runs.column("last"), runs.column("first")), 1)
        totals = (
            runs.append_column("size", sizes)
            .group_by("transaction", use_threads=False)
            .aggregate([("size", "sum"), ("last", "max")])
        )
        columns = ("transaction", "size_sum", "last_max")
        names, counts, lasts = (totals.column(name).to_pylist() for name in columns)
        self._received[topic] = dict(zip(names, map(_Received, counts, lasts), strict=True))


def _last_events(runs: pa.Table) -> Iterable[tuple[str, int, int]]:
    """Yield each transaction with the last order of its events and the highest log position."""
    lasts = runs.group_by("transaction", use_threads=False).aggregate(
        [("last", "max"), ("position", "max")]
    )
    columns = ("transaction", "last_max", "position_max")
    return zip(*(lasts.column(name).to_pylist() for name in columns), strict=True)
