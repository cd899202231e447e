"""Transaction buffer: events in side state until their transactions are complete.

Names in side state have a number:

    events/TOPIC/3     events of incomplete transactions
    markers/7          their BEGIN and END records
    applied/0          applied transactions, to detect duplicates

When some events under a name are applied, the remaining ones are written under the next number. The
numbers are stored as state in the same log entry. A restart therefore finds an event either in side
state or in its collection. The log position of the last applied END is stored with them.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.data import DIFF
from penstock.data.packed import key_hashes, pack
from penstock.sources.debezium import transaction_ids
from penstock.sources.kafka.changes import Lacking, changes_of, completed, last_of
from penstock.sources.kafka.held import Held, held_in
from penstock.sources.kafka.layout import Layout
from penstock.sources.kafka.scan import Told
from penstock.sources.kafka.transactions import (
    MARKERS,
    Applied,
    Transactions,
    runs_of,
)
from penstock.sources.source import SideRows, TickTransaction

__all__ = ["NUMBERS", "Waiting"]

NUMBERS: Final = "aside"
"""State key of the numbers."""

KNOWN: Final = 100_000
"""Minimum number of recently applied transactions that are remembered."""

EVENT_BYTES: Final = 512
"""Estimated size of an event in memory, in bytes."""

APPLY_BYTES: Final = 128 << 20
"""Approximate limit of applied events in memory at once, in bytes."""

_APPLIED: Final = pa.schema(
    [
        pa.field("transaction", pa.string(), nullable=False),
        pa.field("at", pa.int64(), nullable=False),
        pa.field("counts", pa.string(), nullable=False),
    ]
)
"""Applied transactions; `counts` is the number of events by topic, as JSON."""

_COUNTS: Final = msgspec.json.Decoder(dict[str, int])
_MARKERS: Final = "markers"
_KNOWN: Final = "applied"
_UPTO: Final = "upto"


class Waiting:
    """Transaction buffer of one open source."""

    def __init__(
        self,
        topics: Mapping[str, str | None],
        layouts: Mapping[str, Layout],
        collections: Mapping[str, str],
        numbers: Mapping[str, int],
    ) -> None:
        self.transactions = Transactions(topics, numbers.get(_UPTO, transaction_ids.NOWHERE))
        self.held: dict[str, dict[int, Held]] = {topic: {} for topic in topics}
        """By topic and partition, the last waiting event."""

        self._layouts = layouts
        self._collections = collections
        self._numbers = dict(numbers)
        self._durable: set[str] = set()
        """Names with rows from before this tick."""

        self._known: dict[int, dict[str, Applied]] = {}
        """Remembered applied transactions, by number of their side-state name."""

    def asides(self) -> dict[str, SideRows]:
        """Return, by topic, the side state that receives new events."""
        return {
            topic: SideRows(self._name(_events(topic)), layout.aside)
            for topic, layout in self._layouts.items()
        }

    def recall(self, tick: TickTransaction) -> None:
        """Load the buffer from side state; must be called first."""
        last = self._number(_KNOWN)
        for number in (last - 1, last):
            for part in tick.side_rows(f"{_KNOWN}/{number}"):
                names, at, counts = (part.column(each).to_pylist() for each in _APPLIED.names)
                found = map(Applied, at, map(_COUNTS.decode, counts))
                self._learn_known(number, dict(zip(names, found, strict=True)))
        markers = [MARKERS.empty_table(), *tick.side_rows(self._name(_MARKERS))]
        self._note_durable(self._name(_MARKERS), markers[1:])
        self.transactions.hear(pa.concat_tables(markers).sort_by("offset"))
        for topic in self._layouts:
            name = self._name(_events(topic))
            for part in tick.side_rows(name):
                self._note_durable(name, [part])
                self.transactions.come(
                    topic, runs_of(part.column("transaction"), part.column("order"))
                )
                self._hold(topic, held_in(part))
        self._let_go()
        names = {self._name(each) for each in (_MARKERS, *map(_events, self._layouts))}
        tick.retain_side_rows(names | {f"{_KNOWN}/{last - 1}", f"{_KNOWN}/{last}"})

    def take(
        self, tick: TickTransaction, told: Mapping[str, Iterable[Told]], markers: pa.Table
    ) -> None:
        """Process the events and markers of a tick: apply complete transactions, store the others.

        Raises:
            NotOfTransaction: an END does not count events of a topic that has some.
        """
        found = self.transactions
        fresh = found.hear(markers)
        again = set()
        for topic, each in ((topic, one) for topic, some in told.items() for one in some):
            if found.come(topic, each.runs):
                again.add(topic)
            self._hold(topic, each.held)
        ready, over = found.ready(), found.over()
        before = dict(self._numbers)
        rows = {topic: sum(each.aside for each in some) for topic, some in told.items()}
        sizes = {topic: found.events(topic, ready) for topic in self._layouts}
        done = found.apply(ready)
        self._numbers[_UPTO] = found.up_to
        for topic in self._layouts:
            name = self._name(_events(topic))
            there = name in self._durable or rows.get(topic, 0)
            if there and (sizes[topic] or topic in again):
                self._apply(tick, topic, [each for each in ready if each not in over], sizes[topic])
            elif there:
                self._durable.add(name)
        self._keep_markers(tick, markers.take(pa.array(fresh, pa.int64())), applied=bool(ready))
        self._keep_known(tick, done)
        self._let_go()
        if self._numbers != before:
            tick.put_state(NUMBERS, dict(self._numbers))

    # Apply.

    def _apply(self, tick: TickTransaction, topic: str, ready: list[str], size: int) -> None:
        """Move events of complete transactions from side state to their collection."""
        stem = _events(topic)
        name = self._name(stem)
        after = f"{stem}/{self._number(stem) + 1}"
        passes = 1 + size * EVENT_BYTES // APPLY_BYTES
        order = pa.array(ready, pa.string())
        left = 0
        for number in range(passes):
            # Parts have no order, so all of them are read before the last event of a key is known.
            ready_rows: list[pa.Table] = []
            for part in tick.side_rows(name):
                ranks, waits = self._judge(part, order)
                if number == 0 and pc.any(waits).as_py():
                    rest = part.filter(waits)
                    left += rest.num_rows
                    tick.append_side_rows(after, rest)
                come = self._rows(topic, part, ranks).filter(pc.is_valid(ranks))
                ready_rows.append(self._of_pass(topic, come, number, passes))
            if any(come.num_rows for come in ready_rows):
                self._change(tick, topic, self._last(topic, pa.concat_tables(ready_rows)))
        if left or name in self._durable:
            tick.drop_side_rows(name)
            self._durable.discard(name)
            self._numbers[stem] = self._number(stem) + 1
            if left:
                self._durable.add(after)
        else:
            tick.discard_side_rows(name)

    def _judge(self, part: pa.Table, ready: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the rank of each event to apply, else null, and whether each event still waits."""
        names, at = (
            each.combine_chunks() for each in transaction_ids.part_all(part.column("transaction"))
        )
        coded = names.dictionary_encode()
        names = coded.dictionary
        ranks = pc.index_in(names, value_set=ready).cast(pa.int64()).take(coded.indices)
        up_to = map(self.transactions.applied_upto, names.to_pylist())
        over = pc.less_equal(at, pa.array(up_to, pa.int64()).take(coded.indices))
        known = pc.or_(pc.is_valid(ranks), pc.fill_null(over, fill_value=False))
        # An event of no transaction, behind a duplicate: nothing holds it back.
        loose = pc.and_(pc.is_null(part.column("order").combine_chunks()), known)
        first = pc.if_else(loose, pa.scalar(-1, pa.int64()), pa.scalar(None, pa.int64()))
        return pc.coalesce(ranks, first), pc.invert(known)

    def _rows(self, topic: str, part: pa.Table, ranks: pa.Array) -> pa.Table:
        rows = part.column("row").combine_chunks()
        names = self._layouts[topic].schema.names
        columns = {name: pc.struct_field(rows, [at]) for at, name in enumerate(names)}
        places = {each: part.column(each) for each in ("total_order", "offset", "gone")}
        return pa.table(
            {**columns, _RANK: ranks, **{_inner(each): column for each, column in places.items()}}
        )

    def _of_pass(self, topic: str, rows: pa.Table, number: int, passes: int) -> pa.Table:
        if passes == 1 or not rows.num_rows:
            return rows
        keys = [rows.column(name).combine_chunks() for name in self._layouts[topic].key_columns]
        hashes = key_hashes(pack(keys)).astype(np.int64)
        return rows.filter(pa.array((hashes * passes) >> 32 == number))

    def _last(self, topic: str, rows: pa.Table) -> pa.Table:
        key = list(self._layouts[topic].key_columns)
        by = (_RANK, _inner("total_order"), _inner("offset"))
        return last_of(rows, key, by, lacking=Lacking(_inner("gone"), topic))

    def _change(self, tick: TickTransaction, topic: str, last: pa.Table) -> None:
        layout, collection = self._layouts[topic], self._collections[topic]
        names = layout.schema.names
        come = last.filter(pc.invert(last.column(_inner("gone")))).select(names)
        key = list(layout.key_columns)
        stored = tick.lookup(collection, last.select(key)).select(names)
        come = completed(come, stored, key, topic=topic).cast(layout.schema)
        changes = changes_of(stored.cast(layout.schema), come)
        diffs = changes.column(DIFF)
        rows = changes.drop_columns([DIFF])
        tick.change(
            collection,
            deletes=rows.filter(pc.less(diffs, 0)),
            inserts=rows.filter(pc.greater(diffs, 0)),
        )

    # Store.

    def _keep_markers(self, tick: TickTransaction, fresh: pa.Table, *, applied: bool) -> None:
        name = self._name(_MARKERS)
        if not applied:
            if fresh.num_rows:
                tick.append_side_rows(name, fresh)
                self._durable.add(name)
            return
        if name in self._durable:
            tick.drop_side_rows(name)
            self._durable.discard(name)
            self._numbers[_MARKERS] = self._number(_MARKERS) + 1
            name = self._name(_MARKERS)
        left = self.transactions.markers()
        if left.num_rows:
            tick.append_side_rows(name, left)
            self._durable.add(name)

    def _keep_known(self, tick: TickTransaction, done: Mapping[str, Applied]) -> None:
        if not done:
            return
        number = self._number(_KNOWN)
        if len(self._known.get(number, {})) >= KNOWN:
            if number - 1 in self._known:
                tick.drop_side_rows(f"{_KNOWN}/{number - 1}")
                self.transactions.forget(self._known.pop(number - 1))
            number += 1
            self._numbers[_KNOWN] = number
        self._learn_known(number, done)
        at = [each.at for each in done.values()]
        counts = [msgspec.json.encode(each.counts).decode() for each in done.values()]
        columns = [[*done], at, counts]
        arrays = [pa.array(each, kind.type) for each, kind in zip(columns, _APPLIED, strict=True)]
        tick.append_side_rows(f"{_KNOWN}/{number}", pa.table(arrays, schema=_APPLIED))

    def _learn_known(self, number: int, done: Mapping[str, Applied]) -> None:
        self.transactions.put_state(done)
        self._known.setdefault(number, {}).update(done)

    def _hold(self, topic: str, held: Mapping[int, Held]) -> None:
        mine = self.held[topic]
        for partition, each in held.items():
            mine[partition] = max(each, mine.get(partition, each))

    def _let_go(self) -> None:
        """Drop applied events from `held`: later events of the partition need not wait."""
        for mine in self.held.values():
            for partition in [p for p, each in mine.items() if self._is_over(each)]:
                del mine[partition]

    def _is_over(self, held: Held) -> bool:
        return self.transactions.is_applied(held.transaction)

    def _note_durable(self, name: str, parts: Iterable[pa.Table]) -> None:
        if any(part.num_rows for part in parts):
            self._durable.add(name)

    def _number(self, stem: str) -> int:
        return self._numbers.get(stem, 0)

    def _name(self, stem: str) -> str:
        return f"{stem}/{self._number(stem)}"


def _events(topic: str) -> str:
    return f"events/{topic}"


def _inner(name: str) -> str:
    return f"\0{name}"


_RANK: Final = _inner("rank")
