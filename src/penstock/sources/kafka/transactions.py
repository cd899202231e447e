"""Complete transactions of the database, in the order of their END records.

Debezium writes the events of one transaction to the topics of their tables. It also writes a BEGIN
and an END record to the transaction metadata topic. The END has the number of events by table:

    BEGIN 571:53195829     END 571:53195832, 3 events: 2 of public.orders, 1 of public.lines

Topics progress independently, so events may arrive before the END or after it. A transaction is
complete once its END and all its events have arrived. Transactions are applied in the order of
their ENDs. The first incomplete transaction holds back all later ones. So does a transaction with a
BEGIN and no END, even if later transactions have ended.

An id names the transaction and, for Postgres, the log position of the record; see
`debezium/transaction_ids.py`. A database reuses transaction numbers. Postgres does so after 2^32
transactions of the whole server, and only few of them may be in the topics. A new transaction may
therefore have the number of one that is remembered as applied. The new one is after the END of
the other in the log. A record with a position at or before that END is a duplicate. A record with
a later position removes the other from the remembered transactions. If the other still waits, the
source stops. Ids without a log position are never reused.

A connector repeats some records after a restart. A known BEGIN or END has no effect. An event is
counted once, by its order in its transaction. Duplicates of a recently applied transaction are
dropped. An event beyond the count of an applied transaction is not a duplicate, and stops the
source.

A connector may repeat more transactions than are remembered. The tasks that read duplicate events
drop them, so a repeated END would wait for its events without limit. If ids have log positions,
ENDs are in the log in their order. An END at or before the last applied END was therefore applied
too. Such an END waits for nothing, and its events are dropped.

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
from penstock.sources.kafka.errors import BEGIN_AGAIN, NotOfTransaction

__all__ = [
    "MARKERS",
    "RUNS",
    "Applied",
    "End",
    "Transactions",
    "covering",
    "merged",
    "runs_of",
]

RUNS: Final = pa.schema(
    [
        ("transaction", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("at", pa.int64()),
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


def runs_of(transactions: pa.ChunkedArray, places: pa.ChunkedArray) -> pa.Table:
    """Return events as runs; events without an order are left out."""
    there = pc.is_valid(places)
    names, at = transaction_ids.part_all(transactions.filter(there))
    found = places.filter(there)
    return merged(pa.table([names, found, found, at], schema=RUNS))


def merged(runs: pa.Table) -> pa.Table:
    """Return the same events in the fewest runs, grouped by transaction."""
    if not runs.num_rows:
        return runs
    coded = runs.column("transaction").combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy().astype(np.int64)
    firsts, lasts, places = (runs.column(name).to_numpy() for name in ("first", "last", "at"))
    order = np.lexsort((firsts, codes))
    codes, firsts, lasts = codes[order], firsts[order], lasts[order]
    # Offsets between transactions, large enough to keep runs of two transactions separate.
    apart = codes * (int(lasts.max()) + 3)
    highest = np.maximum.accumulate(apart + lasts)
    begins = np.append(True, (apart + firsts)[1:] > highest[:-1] + 1)
    at = np.flatnonzero(begins)
    ends = np.append(at[1:], len(begins)) - 1
    names = coded.dictionary.take(pa.array(codes[at]))
    numbers = firsts[at], highest[ends] - apart[ends], np.maximum.reduceat(places[order], at)
    return pa.table([names, *map(pa.array, numbers)], schema=RUNS)


def covering(collections: Iterable[str], topics: Mapping[str, str | None]) -> dict[str, str]:
    """Return the topic with the events of each data collection, for collections that have one.

    A topic without a configured data collection has the events of the longest collection name that
    its own name ends with.
    """
    found: dict[str, tuple[int, str]] = {}
    for topic, said in topics.items():
        mine = [
            each
            for each in collections
            if (each == said if said is not None else f".{topic}".endswith(f".{each}"))
        ]
        if mine:
            best = max(mine, key=len)
            found[best] = max(found.get(best, (0, "")), (len(topic), topic))
    return {collection: topic for collection, (_, topic) in found.items()}


@dataclass(frozen=True, slots=True)
class End:
    """END record of a transaction."""

    offset: int
    counts: Mapping[str, int]
    """Expected number of events by topic; only for topics of the source."""

    told: str
    """Expected number of events by data collection, as received."""

    id: str
    at: int
    """Id as received, and the log position in it."""

    began: Mapping[str, int]
    """Ids of its BEGIN records, as far as they were received, with their offsets."""

    over: bool
    """True if the transaction was applied and is no longer remembered."""


class Applied(NamedTuple):
    """Remembered state of an applied transaction."""

    at: int
    """Log position of its END."""

    counts: Mapping[str, int]
    """Number of its events by topic."""


class _There(NamedTuple):
    """Events of a transaction in a topic: their number, and the order of the last one."""

    events: int
    last: int


class Transactions:
    """State of the transactions that are not applied yet."""

    def __init__(
        self, topics: Mapping[str, str | None], up_to: int = transaction_ids.NOWHERE
    ) -> None:
        """Start without transactions.

        `topics` maps each topic with events to its data collection, if the file names it.
        """
        self._topics = topics
        self.up_to = up_to
        """Log position of the last applied END."""

        self._begun: dict[str, int] = {}
        """Offset of the BEGIN by id as received, for transactions without an END."""

        self._ends: dict[str, End] = {}
        """END records in their order, by transaction."""

        self._runs = {topic: RUNS.empty_table() for topic in topics}
        self._there: dict[str, dict[str, _There]] = {topic: {} for topic in topics}
        """Received events by topic and transaction."""

        self._applied: dict[str, Applied] = {}

    # Input.

    def hear(self, markers: pa.Table) -> list[int]:
        """Process BEGIN and END records in order, and return the row numbers of new ones.

        Raises:
            DefiniteError: a new transaction has the number of a waiting one.
        """
        columns = (column.to_pylist() for column in markers.columns)
        return [
            row
            for row, (id, offset, status, told) in enumerate(zip(*columns, strict=True))
            if (self._ends_now(id, offset, told) if status == "END" else self._begins(id, offset))
        ]

    def _begins(self, id: str, offset: int) -> bool:
        name, at = transaction_ids.part(id)
        if id in self._begun or self._is_known(transaction_ids.whole(id)):
            return False
        if self._has_ended(name, at) or self._is_again(name, at):
            return False
        self._begun[id] = offset
        return True

    def _ends_now(self, id: str, offset: int, told: str | None) -> bool:
        name, at = transaction_ids.part(id)
        if id in self._begun or self._is_known(transaction_ids.whole(id)):
            name = transaction_ids.whole(id)
        if self._is_known(name):
            return False
        mine = [each for each in self._begun if id == each or transaction_ids.part(each)[0] == name]
        began = {each: self._begun.pop(each) for each in mine}
        over = transaction_ids.NOWHERE < at <= self.up_to
        self._ends[name] = End(offset, *self._counted(told), id, at, began, over)
        return True

    def come(self, topic: str, runs: pa.Table) -> bool:
        """Process events, and return whether some belong to transactions that were applied before.

        Raises:
            NotOfTransaction: the END of a transaction does not count events of the topic.
            DefiniteError: an applied transaction has an event beyond its count; or a waiting
                transaction has the same number.
        """
        again = False
        for name, last, at in _highest(runs):
            self._has_ended(name, at)
            if not self._is_again(name, at):
                continue
            again = True
            counts = self._applied[name].counts
            if topic not in counts:
                raise NotOfTransaction(topic, name)
            if last > counts[topic]:
                raise DefiniteError(
                    f'topic "{topic}" has event {last} of transaction "{name}", which was applied '
                    f"with {counts[topic]}",
                    detail="The END of the transaction does not count it.",
                    hint=BEGIN_AGAIN,
                )
        if again:
            runs = runs.filter(self._waiting(runs.column("transaction")))
        self._runs[topic] = merged(pa.concat_tables([self._runs[topic], runs]))
        self._count(topic)
        return again

    def put_state(self, applied: Mapping[str, Applied]) -> None:
        """Record transactions as applied, new or loaded, to detect their duplicates."""
        for name, each in applied.items():
            self._applied[name] = max(each, self._applied.get(name, each), key=lambda one: one.at)
            self._ends.pop(name, None)

    def forget(self, applied: Mapping[str, Applied]) -> None:
        """Forget transactions that were applied too long ago to be sent again."""
        for name, each in applied.items():
            # A later transaction may have the same number.
            if self._applied.get(name) == each:
                del self._applied[name]

    # Output.

    def ready(self) -> list[str]:
        """Return the transactions to apply next, in order.

        Raises:
            NotOfTransaction: an END does not count events of a topic that has some.
        """
        found = []
        held = min(self._begun.values(), default=None)
        for name, end in self._ends.items():
            if (held is not None and held < end.offset) or self._lacking(name, end):
                break
            found.append(name)
        return found

    def over(self) -> set[str]:
        """Return the ended transactions that were applied before."""
        return {name for name, end in self._ends.items() if end.over}

    def apply(self, names: Sequence[str]) -> dict[str, Applied]:
        """Mark transactions as applied, and return the state to remember."""
        done = {name: self._done(name, self._ends[name]) for name in names}
        self.put_state(done)
        self.up_to = max([self.up_to, *(each.at for each in done.values())])
        for topic, runs in self._runs.items():
            if runs.num_rows:
                self._runs[topic] = runs.filter(self._waiting(runs.column("transaction")))
                self._count(topic)
        return done

    def applied_upto(self, name: str) -> int | None:
        """Return the log position of the END, if the transaction was applied recently."""
        known = self._applied.get(name)
        return None if known is None else known.at

    def is_applied(self, id: str) -> bool:
        """Return whether the transaction of an event with this id was applied recently."""
        name, at = transaction_ids.part(id)
        up_to = self.applied_upto(name)
        return up_to is not None and at <= up_to

    def events(self, topic: str, names: Iterable[str]) -> int:
        """Return the number of events of these transactions in a topic."""
        there = self._there[topic]
        return sum(there[name].events for name in names if name in there)

    def markers(self) -> pa.Table:
        """Return the BEGIN and END records of transactions that are not applied."""
        ends = self._ends.values()
        rows = [
            *((id, offset, "BEGIN", None) for id, offset in self._begun.items()),
            *((id, at, "BEGIN", None) for end in ends for id, at in end.began.items()),
            *((end.id, end.offset, "END", end.told) for end in ends),
        ]
        rows.sort(key=lambda row: row[1])
        columns = [*zip(*rows, strict=True)] or [()] * len(MARKERS)
        arrays = [pa.array(each, kind.type) for each, kind in zip(columns, MARKERS, strict=True)]
        return pa.table(arrays, schema=MARKERS)

    def waiting(self) -> int:
        """Return the number of waiting events."""
        return sum(each.events for there in self._there.values() for each in there.values())

    def first(self) -> str | None:
        """Return the transaction that holds back the others or is incomplete, if any."""
        opened = min(self._begun, key=self._begun.__getitem__, default=None)
        ended = next(iter(self._ends.items()), None)
        if ended is not None and (opened is None or self._begun[opened] > ended[1].offset):
            return ended[0]
        if opened is not None:
            return transaction_ids.part(opened)[0]
        return next((name for there in self._there.values() for name in there), None)

    def lacks(self, name: str) -> str:
        """Return the missing parts of a transaction, as text for the status page."""
        end = self._ends.get(name)
        if end is None:
            return f'the END of transaction "{name}"'
        missing = ", ".join(
            f'{count} of {wanted} in topic "{topic}"'
            for topic, (count, wanted) in sorted(self._lacking(name, end).items())
        )
        return f'events of transaction "{name}" that has ended: {missing}'

    def _is_known(self, name: str) -> bool:
        return name in self._applied or name in self._ends

    def _has_ended(self, name: str, at: int) -> bool:
        """Return whether the transaction has ended and waits."""
        end = self._ends.get(name)
        if end is not None and at > end.at:
            raise DefiniteError(
                f'two transactions have the number "{name}", and the first of them waits',
                detail=f"It waits for {self.lacks(name)}.",
                hint=BEGIN_AGAIN,
            )
        return end is not None

    def _is_again(self, name: str, at: int) -> bool:
        """Return whether the transaction was applied; a later one with its number removes it."""
        known = self._applied.get(name)
        if known is not None and at > known.at:
            del self._applied[name]
            return False
        return known is not None

    def _counted(self, told: str | None) -> tuple[dict[str, int], str]:
        counted = msgspec.json.decode(told or "{}", type=dict[str, int])
        topics = covering(counted, self._topics)
        return {topic: counted[each] for each, topic in topics.items()}, told or "{}"

    def _done(self, name: str, end: End) -> Applied:
        counts = {
            topic: max(wanted, self._there[topic].get(name, _There(0, 0)).last)
            for topic, wanted in end.counts.items()
        }
        return Applied(end.at, counts)

    def _lacking(self, name: str, end: End) -> dict[str, tuple[int, int]]:
        for topic, there in self._there.items():
            if name in there and topic not in end.counts:
                raise NotOfTransaction(topic, name)
        found = {
            topic: (wanted - self.events(topic, [name]), wanted)
            for topic, wanted in end.counts.items()
        }
        return {topic: lack for topic, lack in found.items() if lack[0] > 0 and not end.over}

    def _waiting(self, names: pa.ChunkedArray) -> pa.Array:
        """Return which of the names are transactions that were not applied."""
        coded = names.combine_chunks().dictionary_encode()
        waits = pa.array([name not in self._applied for name in coded.dictionary.to_pylist()])
        return waits.take(coded.indices)

    def _count(self, topic: str) -> None:
        runs = self._runs[topic]
        sizes = pc.add(pc.subtract(runs.column("last"), runs.column("first")), 1)
        summed = (
            runs.append_column("size", sizes)
            .group_by("transaction", use_threads=False)
            .aggregate([("size", "sum"), ("last", "max")])
        )
        columns = ("transaction", "size_sum", "last_max")
        names, counts, lasts = (summed.column(each).to_pylist() for each in columns)
        self._there[topic] = dict(zip(names, map(_There, counts, lasts), strict=True))


def _highest(runs: pa.Table) -> Iterable[tuple[str, int, int]]:
    """Yield each transaction with the last order of its events and the highest log position."""
    found = runs.group_by("transaction", use_threads=False)
    found = found.aggregate([("last", "max"), ("at", "max")])
    columns = ("transaction", "last_max", "at_max")
    return zip(*(found.column(each).to_pylist() for each in columns), strict=True)
