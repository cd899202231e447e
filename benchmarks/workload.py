"""A table that changes: batches of updates, and the resulting rows.

A row is a function of its id and of its number of updates. The table therefore stores two
numbers per row and computes the columns on demand, and the same seed gives the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

import penstock.persist as persist

__all__ = ["COLLECTION", "SCHEMA", "ChangingTable", "append", "rows_of", "run_maintenance"]

COLLECTION: Final = "orders"

SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("quantity", pa.int32()),
        ("price", pa.float64()),
        ("weight", pa.float64()),
        ("ordered_at", pa.timestamp("us")),
        ("city", pa.string()),
        ("status", pa.string()),
        ("customer", pa.string()),
    ]
)

CITIES: Final = pa.array(
    ["Aarhus", "Bergen", "Cork", "Delft", "Espoo", "Faro", "Ghent", "Halle"], pa.string()
)
STATUSES: Final = pa.array(["new", "paid", "sent", "returned"], pa.string())


@dataclass(slots=True)
class ChangingTable:
    """Table that grows by two fifths of each batch.

    Of 50,000 updates, 24,000 are inserts, 22,000 are the old and new versions of updated rows,
    and 4,000 are deletes. The first batch has only inserts.
    """

    size: int
    """Updates per batch."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    time: int = 0
    """Time of the next batch, which is its number."""

    versions: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    """Number of updates of each row, by id."""

    live: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    """Ids of the rows that are not deleted."""

    def next_batch(self) -> pa.Table:
        """Return the next updates, all at one time, with `mz_timestamp` and `mz_diff`."""
        share = self.size // 50
        deleted, updated, inserted = (4 * share, 11 * share, self.size - 26 * share)
        if self.time == 0:
            deleted, updated, inserted = 0, 0, self.size
        indexes = self.rng.choice(len(self.live), deleted + updated, replace=False)
        touched = self.live[indexes]
        before = rows_of(touched, self.versions[touched])
        changed = touched[deleted:]
        self.versions[changed] += 1
        new = np.arange(len(self.versions), len(self.versions) + inserted)
        self.versions = np.append(self.versions, np.zeros(inserted, np.int64))
        self.live = np.append(np.delete(self.live, indexes[:deleted]), new)
        now = np.append(changed, new)
        after = rows_of(now, self.versions[now])
        diffs = np.append(np.full(len(touched), -1), np.full(len(now), +1))
        times = np.full(len(diffs), self.time)
        self.time += 1
        updates = pa.concat_tables([before, after])
        return updates.append_column("mz_timestamp", pa.array(times)).append_column(
            "mz_diff", pa.array(diffs)
        )

    def batches(self, count: int) -> Iterator[pa.Table]:
        """Yield the next `count` batches."""
        for _ in range(count):
            yield self.next_batch()

    def rows(self) -> pa.Table:
        """Return the rows after all batches so far, in key order."""
        ids = np.sort(self.live)
        return rows_of(ids, self.versions[ids])


def rows_of(ids: Any, versions: Any) -> pa.Table:
    """Return rows of eight columns: numbers, a timestamp, strings of low and high cardinality."""

    def random_column(column: int) -> Any:
        return _splitmix64(
            ids.astype(np.uint64) << np.uint64(20) | versions.astype(np.uint64), column
        )

    customers = (random_column(6) % np.uint64(1_000_000)).astype("U6")
    return pa.table(
        [
            pa.array(ids),
            pa.array((random_column(1) % np.uint64(1_000)).astype(np.int32)),
            pa.array((random_column(2) % np.uint64(100_000)) / 100),
            pa.array(random_column(3) / 2.0**64),
            pa.array(
                (random_column(4) % np.uint64(10**12)).astype(np.int64) + 1_700_000_000_000_000,
                pa.timestamp("us"),
            ),
            CITIES.take(pa.array(random_column(5) % np.uint64(len(CITIES)))),
            STATUSES.take(pa.array(random_column(7) % np.uint64(len(STATUSES)))),
            pa.array(np.char.add("customer-", customers), pa.string()),
        ],
        schema=SCHEMA,
    )


def append(
    client: persist.Client, batches: Iterator[pa.Table], *, retain: int | None = None
) -> persist.Collection:
    """Append batches in order, each at its own time.

    With `retain`, since stays this many batches behind, as with `retain` of a pipeline;
    otherwise it does not advance.
    """
    collection = client.create_or_load(COLLECTION, schema=SCHEMA, key_columns=["id"])
    for batch in batches:
        time = collection.upper
        appended = collection.compare_and_append(batch, time, time + 1)
        assert isinstance(appended, persist.Appended)
        if retain is not None and time > retain:
            collection.allow_compaction(time - retain)
    return collection


def run_maintenance(client: persist.Client, collection: persist.Collection) -> None:
    """Run maintenance until it is idle."""
    before: object = None
    while (now := (collection.since, [b.id for b in collection.state.batches])) != before:
        before = now
        client.run_maintenance()


def _splitmix64(numbers: Any, salt: int) -> Any:
    """Return pseudorandom numbers from numbers, by splitmix64."""
    mixed = numbers + np.uint64(salt * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
