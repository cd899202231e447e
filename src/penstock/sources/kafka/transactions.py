"""Which of the database's transactions are whole, in the order in which they ended.

Debezium writes the events of one transaction to the topics of their tables, and into a topic
of transactions that it began and that it ended, with how many events it has in each table:

    BEGIN 571     END 571, 3 events: 2 of public.orders, 1 of public.lines

Topics come at their own pace, so that events may be there before the END, or after it. A
transaction is whole once its END and all its events are there. Transactions are applied in
the order of their ENDs, and the first that is not whole holds back all after it; so does one
that began and has not ended, whatever ended since.

A connector that is started again repeats some of what it sent. A BEGIN or an END that is known
says nothing new; an event is counted by its place in its transaction, once; and what is sent
again of a transaction that was applied not long ago is dropped.

Nothing here reads or writes: what is kept where is up to whoever asks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.kafka.errors import NotOfTransaction

__all__ = ["MARKERS", "RUNS", "End", "Transactions", "covering", "merged", "runs_of"]

RUNS: Final = pa.schema([("transaction", pa.string()), ("first", pa.int64()), ("last", pa.int64())])
"""Events of a transaction in one topic that follow each other, by their place there."""

MARKERS: Final = pa.schema(
    [
        pa.field("transaction", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("counts", pa.string()),
    ]
)
"""BEGIN or END of a transaction; of an END, how many events it has by data collection, as JSON."""


def runs_of(transactions: pa.ChunkedArray, places: pa.ChunkedArray) -> pa.Table:
    """Events as runs; those without a place do not count."""
    there = pc.is_valid(places)
    found, at = transactions.filter(there), places.filter(there)
    return merged(pa.table([found, at, at], schema=RUNS))


def merged(runs: pa.Table) -> pa.Table:
    """The same runs, as few as can be, in the order of transactions."""
    if not runs.num_rows:
        return runs
    coded = runs.column("transaction").combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy().astype(np.int64)
    firsts, lasts = (runs.column(name).to_numpy() for name in ("first", "last"))
    order = np.lexsort((firsts, codes))
    codes, firsts, lasts = codes[order], firsts[order], lasts[order]
    # So far apart that runs of two transactions never touch.
    apart = codes * (int(lasts.max()) + 3)
    highest = np.maximum.accumulate(apart + lasts)
    begins = np.append(True, (apart + firsts)[1:] > highest[:-1] + 1)
    at = np.flatnonzero(begins)
    ends = np.append(at[1:], len(begins)) - 1
    names = coded.dictionary.take(pa.array(codes[at]))
    return pa.table(
        [names, pa.array(firsts[at]), pa.array(highest[ends] - apart[ends])], schema=RUNS
    )


def covering(collections: Iterable[str], topics: Mapping[str, str | None]) -> dict[str, str]:
    """By data collection, the topic that has its events, of those that have one.

    A topic that is not said to be of one is of that which its name ends with.
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
    """The end of a transaction."""

    offset: int
    counts: Mapping[str, int]
    """By topic, how many events there must be; not of topics that are not followed."""

    told: str
    """The same by data collection, as it came."""


class Transactions:
    """What is known of transactions that are not applied yet."""

    def __init__(self, topics: Mapping[str, str | None]) -> None:
        """`topics` are those with events, each with its data collection if the file says it."""
        self._topics = topics
        self._begun: dict[str, int] = {}
        """At which offset a transaction began that has not ended."""

        self._ends: dict[str, End] = {}
        """In their order."""

        self._runs = {topic: RUNS.empty_table() for topic in topics}
        self._counts: dict[str, dict[str, int]] = {topic: {} for topic in topics}
        """By topic and transaction, how many events are there."""

        self._applied: dict[str, frozenset[str]] = {}
        """With the topics that their events were in."""

    # What is learned.

    def hear(self, markers: pa.Table) -> list[int]:
        """Transactions that began or ended, in order; which rows say something new."""
        fresh = []
        for row, (name, offset, status, told) in enumerate(
            zip(*(column.to_pylist() for column in markers.columns), strict=True)
        ):
            if name in self._applied or name in self._ends:
                continue
            if status == "END":
                self._begun.pop(name, None)
                self._ends[name] = self._end(offset, told)
            elif name in self._begun:
                continue
            else:
                self._begun[name] = offset
            fresh.append(row)
        return fresh

    def come(self, topic: str, runs: pa.Table) -> bool:
        """Events came; whether some are of transactions that were applied before.

        Raises:
            NotOfTransaction: the END of a transaction does not speak of their topic.
        """
        again = False
        for name in pc.unique(runs.column("transaction")).to_pylist():
            if name in self._applied:
                again = True
                if topic not in self._applied[name]:
                    raise NotOfTransaction(topic, name)
        if again:
            runs = runs.filter(self._waiting(runs.column("transaction")))
        self._runs[topic] = merged(pa.concat_tables([self._runs[topic], runs]))
        self._count(topic)
        return again

    def remember(self, applied: Mapping[str, frozenset[str]]) -> None:
        """These were applied, and are to be known again; called with what is kept of them."""
        self._applied.update(applied)
        for name in applied:
            self._begun.pop(name, None)
            self._ends.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """These were applied so long ago that they are not sent again."""
        for name in names:
            self._applied.pop(name, None)

    # What follows.

    def ready(self) -> list[str]:
        """The transactions to apply next, in order.

        Raises:
            NotOfTransaction: the END of one does not speak of a topic that has events of it.
        """
        found = []
        held = min(self._begun.values(), default=None)
        for name, end in self._ends.items():
            if (held is not None and held < end.offset) or self._lacking(name, end):
                break
            found.append(name)
        return found

    def apply(self, names: Sequence[str]) -> dict[str, frozenset[str]]:
        """They are applied; what to remember of them."""
        done = {name: frozenset(self._ends[name].counts) for name in names}
        self.remember(done)
        for topic, runs in self._runs.items():
            if runs.num_rows:
                self._runs[topic] = runs.filter(self._waiting(runs.column("transaction")))
                self._count(topic)
        return done

    def is_applied(self, name: str) -> bool:
        """Whether it was, not long ago."""
        return name in self._applied

    def events(self, topic: str, names: Iterable[str]) -> int:
        """How many events there are of these transactions in a topic."""
        counts = self._counts[topic]
        return sum(counts.get(name, 0) for name in names)

    def markers(self) -> pa.Table:
        """What was heard of transactions that are not applied."""
        rows = [
            *((name, offset, "BEGIN", None) for name, offset in self._begun.items()),
            *((name, end.offset, "END", end.told) for name, end in self._ends.items()),
        ]
        rows.sort(key=lambda row: row[1])
        columns = [*zip(*rows, strict=True)] or [()] * len(MARKERS)
        arrays = [pa.array(each, kind.type) for each, kind in zip(columns, MARKERS, strict=True)]
        return pa.table(arrays, schema=MARKERS)

    def waiting(self) -> int:
        """How many events wait."""
        return sum(sum(counts.values()) for counts in self._counts.values())

    def first(self) -> str | None:
        """The transaction that holds back the others, or is itself not whole."""
        opened = min(self._begun, key=self._begun.__getitem__, default=None)
        ended = next(iter(self._ends.items()), None)
        if ended is not None and (opened is None or self._begun[opened] > ended[1].offset):
            return ended[0]
        if opened is not None:
            return opened
        return next((name for counts in self._counts.values() for name in counts), None)

    def lacks(self, name: str) -> str:
        """What is missing of it, for people."""
        end = self._ends.get(name)
        if end is None:
            return f'the END of transaction "{name}"'
        missing = ", ".join(
            f'{count} of {wanted} in topic "{topic}"'
            for topic, (count, wanted) in sorted(self._lacking(name, end).items())
        )
        return f'events of transaction "{name}" that has ended: {missing}'

    def _end(self, offset: int, told: str | None) -> End:
        counted = msgspec.json.decode(told or "{}", type=dict[str, int])
        topics = covering(counted, self._topics)
        counts = {topic: counted[each] for each, topic in topics.items()}
        return End(offset, counts, told or "{}")

    def _lacking(self, name: str, end: End) -> dict[str, tuple[int, int]]:
        for topic, counts in self._counts.items():
            if name in counts and topic not in end.counts:
                raise NotOfTransaction(topic, name)
        found = {
            topic: (wanted - self._counts[topic].get(name, 0), wanted)
            for topic, wanted in end.counts.items()
        }
        return {topic: lack for topic, lack in found.items() if lack[0] > 0}

    def _waiting(self, names: pa.ChunkedArray) -> pa.Array:
        """Which of these are of transactions that were not applied."""
        coded = names.combine_chunks().dictionary_encode()
        waits = pa.array([name not in self._applied for name in coded.dictionary.to_pylist()])
        return waits.take(coded.indices)

    def _count(self, topic: str) -> None:
        runs = self._runs[topic]
        sizes = pc.add(pc.subtract(runs.column("last"), runs.column("first")), 1)
        summed = (
            pa.table([runs.column("transaction"), sizes], names=["name", "size"])
            .group_by("name", use_threads=False)
            .aggregate([("size", "sum")])
        )
        names, counts = (summed.column(each).to_pylist() for each in ("name", "size_sum"))
        self._counts[topic] = dict(zip(names, counts, strict=True))
