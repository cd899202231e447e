"""Which of the database's transactions are whole, in the order in which they ended.

Debezium writes the events of one transaction to the topics of their tables, and into a topic
of transactions that it began and that it ended, with how many events it has in each table:

    BEGIN 571:53195829     END 571:53195832, 3 events: 2 of public.orders, 1 of public.lines

Topics come at their own pace, so that events may be there before the END, or after it. A
transaction is whole once its END and all its events are there. Transactions are applied in
the order of their ENDs, and the first that is not whole holds back all after it; so does one
that began and has not ended, whatever ended since.

An id tells which transaction that is, and of Postgres where in the log the record stands; see
`formats/ids.py`. A database gives the number of a transaction to another one later: Postgres
after 2^32 in all of the server, few of which may come to us. So one that was applied may be known
by the number that a new one has. The new one stands after the END of the other: what has a place
at or before it was sent again, and what has a later place makes the other forgotten. While the
other waits, it stops the source. Where ids tell no place, they do not come again.

A connector that is started again repeats some of what it sent. A BEGIN or an END that is known
says nothing new; an event is counted by its place in its transaction, once; and what is sent
again of a transaction that was applied not long ago is dropped. An event beyond those with
which its transaction was applied was not sent before, and stops the source.

More may be sent again than are known. Events that were sent before are dropped where they are
read, so that such an END would wait for them for ever. Where ids tell places, ENDs stand in the
log in their order: one at or before the last that was applied was applied, too. It waits for
nothing, and its events are dropped.

Nothing here reads or writes: what is kept where is up to whoever asks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DefiniteError
from penstock.sources.kafka.errors import BEGIN_AGAIN, NotOfTransaction
from penstock.sources.kafka.formats import ids

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
"""Events of a transaction in one topic that follow each other, by their place there, and the
highest place in the log that their ids tell."""

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
    names, at = ids.part_all(transactions.filter(there))
    found = places.filter(there)
    return merged(pa.table([names, found, found, at], schema=RUNS))


def merged(runs: pa.Table) -> pa.Table:
    """The same runs, as few as can be, in the order of transactions."""
    if not runs.num_rows:
        return runs
    coded = runs.column("transaction").combine_chunks().dictionary_encode()
    codes = coded.indices.to_numpy().astype(np.int64)
    firsts, lasts, places = (runs.column(name).to_numpy() for name in ("first", "last", "at"))
    order = np.lexsort((firsts, codes))
    codes, firsts, lasts = codes[order], firsts[order], lasts[order]
    # So far apart that runs of two transactions never touch.
    apart = codes * (int(lasts.max()) + 3)
    highest = np.maximum.accumulate(apart + lasts)
    begins = np.append(True, (apart + firsts)[1:] > highest[:-1] + 1)
    at = np.flatnonzero(begins)
    ends = np.append(at[1:], len(begins)) - 1
    names = coded.dictionary.take(pa.array(codes[at]))
    numbers = firsts[at], highest[ends] - apart[ends], np.maximum.reduceat(places[order], at)
    return pa.table([names, *map(pa.array, numbers)], schema=RUNS)


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

    id: str
    at: int
    """Its id as it came, and the place in the log that this tells."""

    began: Mapping[str, int]
    """The ids with which it began, as far as that was heard, and at which offsets."""

    over: bool
    """Whether it was applied so long ago that it is not known."""


class Applied(NamedTuple):
    """What is remembered of a transaction that was applied."""

    at: int
    """The place in the log of its END."""

    counts: Mapping[str, int]
    """By topic, how many events it had."""


class _There(NamedTuple):
    """Events of a transaction in a topic: how many, and the last one's place there."""

    events: int
    last: int


class Transactions:
    """What is known of transactions that are not applied yet."""

    def __init__(self, topics: Mapping[str, str | None], up_to: int = ids.NOWHERE) -> None:
        """`topics` are those with events, each with its data collection if the file says it."""
        self._topics = topics
        self.up_to = up_to
        """The place in the log of the last END that was applied."""

        self._begun: dict[str, int] = {}
        """By id as it came, at which offset a transaction began that has not ended."""

        self._ends: dict[str, End] = {}
        """In their order."""

        self._runs = {topic: RUNS.empty_table() for topic in topics}
        self._there: dict[str, dict[str, _There]] = {topic: {} for topic in topics}
        """By topic and transaction, which events are there."""

        self._applied: dict[str, Applied] = {}

    # What is learned.

    def hear(self, markers: pa.Table) -> list[int]:
        """Transactions that began or ended, in order; which rows say something new.

        Raises:
            DefiniteError: a transaction has the number of one that waits.
        """
        columns = (column.to_pylist() for column in markers.columns)
        return [
            row
            for row, (id, offset, status, told) in enumerate(zip(*columns, strict=True))
            if (self._ends_now(id, offset, told) if status == "END" else self._begins(id, offset))
        ]

    def _begins(self, id: str, offset: int) -> bool:
        name, at = ids.part(id)
        if id in self._begun or self._is_known(ids.whole(id)):
            return False
        if self._has_ended(name, at) or self._is_again(name, at):
            return False
        self._begun[id] = offset
        return True

    def _ends_now(self, id: str, offset: int, told: str | None) -> bool:
        name, at = ids.part(id)
        if id in self._begun or self._is_known(ids.whole(id)):
            name = ids.whole(id)
        if self._is_known(name):
            return False
        mine = [each for each in self._begun if id == each or ids.part(each)[0] == name]
        began = {each: self._begun.pop(each) for each in mine}
        over = ids.NOWHERE < at <= self.up_to
        self._ends[name] = End(offset, *self._counted(told), id, at, began, over)
        return True

    def come(self, topic: str, runs: pa.Table) -> bool:
        """Events came; whether some are of transactions that were applied before.

        Raises:
            NotOfTransaction: the END of a transaction does not speak of their topic.
            DefiniteError: it counts fewer events of the topic, and was applied with those; or a
                transaction has the number of one that waits.
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
        """These were applied, and are to be known again; called with what is kept of them."""
        for name, each in applied.items():
            self._applied[name] = max(each, self._applied.get(name, each), key=lambda one: one.at)
            self._ends.pop(name, None)

    def forget(self, applied: Mapping[str, Applied]) -> None:
        """These were applied so long ago that they are not sent again."""
        for name, each in applied.items():
            # There may be a later one of the same number.
            if self._applied.get(name) == each:
                del self._applied[name]

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

    def over(self) -> set[str]:
        """Of those that ended, which were applied before."""
        return {name for name, end in self._ends.items() if end.over}

    def apply(self, names: Sequence[str]) -> dict[str, Applied]:
        """They are applied; what to remember of them."""
        done = {name: self._done(name, self._ends[name]) for name in names}
        self.put_state(done)
        self.up_to = max([self.up_to, *(each.at for each in done.values())])
        for topic, runs in self._runs.items():
            if runs.num_rows:
                self._runs[topic] = runs.filter(self._waiting(runs.column("transaction")))
                self._count(topic)
        return done

    def applied_upto(self, name: str) -> int | None:
        """If it was applied not long ago, the place in the log of its END."""
        known = self._applied.get(name)
        return None if known is None else known.at

    def is_applied(self, id: str) -> bool:
        """Whether the transaction of an event with this id was, not long ago."""
        name, at = ids.part(id)
        up_to = self.applied_upto(name)
        return up_to is not None and at <= up_to

    def events(self, topic: str, names: Iterable[str]) -> int:
        """How many events there are of these transactions in a topic."""
        there = self._there[topic]
        return sum(there[name].events for name in names if name in there)

    def markers(self) -> pa.Table:
        """What was heard of transactions that are not applied."""
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
        """How many events wait."""
        return sum(each.events for there in self._there.values() for each in there.values())

    def first(self) -> str | None:
        """The transaction that holds back the others, or is itself not whole."""
        opened = min(self._begun, key=self._begun.__getitem__, default=None)
        ended = next(iter(self._ends.items()), None)
        if ended is not None and (opened is None or self._begun[opened] > ended[1].offset):
            return ended[0]
        if opened is not None:
            return ids.part(opened)[0]
        return next((name for there in self._there.values() for name in there), None)

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

    def _is_known(self, name: str) -> bool:
        return name in self._applied or name in self._ends

    def _has_ended(self, name: str, at: int) -> bool:
        """Whether it ended, and waits."""
        end = self._ends.get(name)
        if end is not None and at > end.at:
            raise DefiniteError(
                f'two transactions have the number "{name}", and the first of them waits',
                detail=f"It waits for {self.lacks(name)}.",
                hint=BEGIN_AGAIN,
            )
        return end is not None

    def _is_again(self, name: str, at: int) -> bool:
        """Whether it was applied; one of the same number that comes after it makes it forgotten."""
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
        """Which of these are of transactions that were not applied."""
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
    """Of each transaction, the last place of an event, and the highest in the log."""
    found = runs.group_by("transaction", use_threads=False)
    found = found.aggregate([("last", "max"), ("at", "max")])
    columns = ("transaction", "last_max", "at_max")
    return zip(*(found.column(each).to_pylist() for each in columns), strict=True)
