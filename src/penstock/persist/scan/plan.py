"""Plan of a scan: the parts of batches to read, and the times that count in each. Pure.

The contents as of a time are the sum of all updates up to it. A plain sum groups every row
of the collection. A merge has already done most of this work: the rows at its since form a
*base*, where each row has multiplicity 1 and each key occurs once (`Batch.distinct`).

Let D be the consolidated sum of all other updates up to `as_of`. A row with a negative diff
in D existed before. If its key is in the base, it can only be the base's row with that key.
Therefore

    contents  =  base without the keys of negative rows of D  +  positive rows of D

and only D is grouped. Without such a base, all updates belong to D.

A scan consists of `PartScan`s: one part each, with its range of times. A part scan without
bounds needs no filter on time, so complete batches are read without one.
"""

from dataclasses import dataclass

from penstock.persist.batch import PartScan, part_scans_of
from penstock.persist.readability import check_changes, check_contents
from penstock.persist.state import (
    END,
    Batch,
    CollectionState,
    SchemaVersion,
    columns_of,
    schema_as_of,
)

__all__ = ["ChangesScan", "SnapshotScan", "scan_changes", "scan_snapshot"]


@dataclass(frozen=True, slots=True)
class SnapshotScan:
    """Plan of a read of a collection's contents as of a time."""

    collection: CollectionState
    schema: SchemaVersion
    as_of: int
    base: tuple[PartScan, ...]
    """Scans of the distinct rows; empty without a base."""

    deltas: tuple[PartScan, ...]
    """Scans of all other updates up to `as_of`, which must be consolidated."""

    delta_rows: int
    """Upper bound of the number of updates in `deltas`."""

    delta_memory: int
    """Upper bound of the size of `deltas` in memory as Arrow, in bytes."""

    @property
    def key(self) -> tuple[str, ...]:
        """Columns that identify a row of the base: its key or, without a key, all columns."""
        return self.schema.key or tuple(columns_of(self.schema).names)


@dataclass(frozen=True, slots=True)
class ChangesScan:
    """Plan of a read of a collection's updates with times in `[lower, upper)`."""

    collection: CollectionState
    schema: SchemaVersion
    lower: int
    upper: int
    part_scans: tuple[PartScan, ...]


def scan_snapshot(collection: CollectionState, as_of: int) -> SnapshotScan:
    """Plan a read of the contents as of a time.

    Raises:
        SinceError: the time lies below since.
        NotYetComplete: the time lies at or past upper.
        CollectionErrored: the collection is in error as of the time.
    """
    check_contents(collection, as_of)
    schema = schema_as_of(collection, as_of)
    base = _base(collection, as_of)
    needed = [batch for batch in collection.batches if batch.lower <= as_of]
    rest: list[PartScan] = []
    rows = memory = 0
    for batch in needed:
        lower = base.since + 1 if base is not None and batch.id == base.id else 0
        if lower <= as_of and batch.upper > lower:
            rest += part_scans_of(collection, batch, lower=lower, upper=as_of + 1)
            rows += batch.rows
            memory += batch.memory
    return SnapshotScan(
        collection=collection,
        schema=schema,
        as_of=as_of,
        base=() if base is None else tuple(part_scans_of(collection, base, upper=base.since + 1)),
        deltas=tuple(rest),
        delta_rows=rows,
        delta_memory=memory,
    )


def scan_changes(collection: CollectionState, lower: int, upper: int) -> ChangesScan:
    """Plan a read of the updates with times in `[lower, upper)`.

    Raises:
        SinceError: compaction has advanced updates below since, so the interval must begin past
            since, or at 0.
        NotYetComplete: the interval reaches past upper.
        CollectionErrored: the collection is in error somewhere in the interval.
    """
    check_changes(collection, lower, upper)
    part_scans: list[PartScan] = []
    for batch in collection.batches:
        if batch.lower < upper and batch.upper > lower:
            part_scans += part_scans_of(collection, batch, lower=lower, upper=upper)
    return ChangesScan(
        collection=collection,
        schema=schema_as_of(collection, max(upper - 1, 0)),
        lower=lower,
        upper=upper,
        part_scans=tuple(part_scans),
    )


def _base(collection: CollectionState, as_of: int) -> Batch | None:
    """Return the best merged batch as base; a batch that holds only its base is preferred."""
    candidates = [
        batch
        for batch in collection.batches
        if batch.distinct and batch.lower == batch.since <= as_of and batch.until == END
    ]
    return max(
        candidates, key=lambda batch: (batch.upper == batch.since + 1, batch.rows), default=None
    )
