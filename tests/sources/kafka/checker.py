"""Check the stored contents of a topic against a read_committed consumer.

Every committed record is stored exactly once, and no other record is stored. Bindings only rise,
and every record has the time of the first binding that covers it. At the end everything up to
the last stable offset is bound. These are invariant 29 and the guarantees that a restart keeps.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from penstock import persist
from penstock.data import DIFF, TIME
from penstock.data.remap_form import KAFKA
from penstock.reclock.remap import decode_steps, keys_of
from tests.sources.kafka.clients import Record

Place = tuple[int, int]
"""Partition and offset."""


@dataclass(frozen=True)
class Change:
    """Row that was inserted or deleted."""

    partition: int
    offset: int
    text: str
    time: int
    diff: int


@dataclass(frozen=True)
class Stored:
    """Stored state of a source: the changes of its collection and its remap bindings."""

    changes: tuple[Change, ...]
    bound: Mapping[int, tuple[Place, ...]]
    """By partition: the times at which its binding moved, and the offsets it moved to."""

    @property
    def ends(self) -> dict[int, int]:
        """Return the bound offset of each partition."""
        return {partition: moves[-1][1] for partition, moves in self.bound.items() if moves}

    def begins_with(self, earlier: "Stored") -> bool:
        """Return whether all changes and bindings of `earlier` are unchanged."""
        return set(earlier.changes) <= set(self.changes) and all(
            self.bound.get(partition, ())[: len(moves)] == moves
            for partition, moves in earlier.bound.items()
        )


def stored(url: str, source: str) -> Stored:
    """Return all changes and bindings of a source, with their times."""
    with persist.open(url, hold=True) as client:
        rows = _all_of(client.collection(source))
        bound = _bound(client, source)
    changes = zip(
        *(rows.column(name).to_pylist() for name in ("_partition", "_offset", "text", TIME, DIFF)),
        strict=True,
    )
    return Stored(tuple(Change(*change) for change in changes), bound)


def bound_ends(url: str, source: str) -> dict[int, int]:
    """Return the bound offset of each partition; empty before the first binding."""
    while True:
        with persist.open(url, hold=False) as client:
            try:
                return Stored((), _bound(client, source)).ends
            except (persist.CollectionMissing, persist.NotYetComplete):
                return {}
            except persist.SinceError:
                continue  # The running pipeline has just advanced the since.


def _bound(client: persist.Client, source: str) -> dict[int, tuple[Place, ...]]:
    read = decode_steps(KAFKA, _all_of(client.collection(f"{source}_remap")))
    bound = defaultdict[int, list[Place]](list)
    for partition, time, offset in zip(
        keys_of(KAFKA, read.partitions),
        read.times.to_pylist(),
        map(int, read.offsets.to_pylist()),
        strict=True,
    ):
        assert isinstance(partition, int)
        bound[partition].append((time, offset))
    return {partition: tuple(moves) for partition, moves in bound.items()}


def wrong_in(contents: Stored, committed: Iterable[Record], ends: Mapping[int, int]) -> list[str]:
    """Return the violated guarantees. `ends` are the last stable offsets at the end of the run."""
    return [*_rows(contents, committed), *_bindings(contents, ends), *_times(contents)]


def _rows(contents: Stored, committed: Iterable[Record]) -> list[str]:
    held = Counter[tuple[int, int, str]]()
    for change in contents.changes:
        held[change.partition, change.offset, change.text] += change.diff
    wanted = Counter(
        (each.partition, each.offset, (each.value or b"").decode()) for each in committed
    )
    wrong = []
    if missing := wanted - held:
        wrong.append(f"{missing.total()} records are missing, such as {min(missing)}")
    if extra := held - wanted:
        wrong.append(f"{extra.total()} should not be there, such as {min(extra)}")
    if unexpected := [change for change in contents.changes if change.diff != 1]:
        wrong.append(f"a record was inserted or deleted otherwise than once: {unexpected[0]}")
    return wrong


def _bindings(contents: Stored, ends: Mapping[int, int]) -> list[str]:
    wrong = []
    for partition, moves in contents.bound.items():
        for (earlier, offset), (later, next_offset) in pairwise(moves):
            if later <= earlier or next_offset <= offset:
                wrong.append(
                    f"partition {partition} was bound to {offset} at {earlier}, and to "
                    f"{next_offset} at {later}"
                )
    reached = {partition: end for partition, end in ends.items() if end}
    if contents.ends != reached:
        wrong.append(f"bound is {contents.ends}, and the topic had reached {reached}")
    return wrong


def _times(contents: Stored) -> list[str]:
    wrong = []
    for change in contents.changes:
        moves = contents.bound.get(change.partition, ())
        covering = next((time for time, upper in moves if change.offset < upper), None)
        if covering != change.time:
            wrong.append(
                f"offset {change.offset} of partition {change.partition} was inserted at "
                f"{change.time}, and was bound at {covering}"
            )
    return wrong[:5]


def _all_of(collection: persist.Collection) -> pa.Table:
    since, upper = collection.since, collection.upper
    tables = [collection.snapshot(since).arrow()]
    with collection.listen(since) as listener:
        while listener.frontier < upper:
            changes = listener.next_changes(timeout_ms=0)
            assert changes is not None
            tables.append(changes.arrow())
    return pa.concat_tables(tables)
