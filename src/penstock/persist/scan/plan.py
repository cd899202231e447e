"""What a reading needs to look at: which parts of which batches, and how much of each. Pure.

The contents as of a time are the sum of all updates up to it. Added up
plainly, that groups every row there is. But a merge has done most of the
adding already: the rows it brought up to its since are a *base*, each there
once and no key twice (`Batch.distinct`). Let D be what all other updates up to
as_of come to, added up. A row that D takes away was there before, and with a
key in the base it can only have been the base's row of that key. So

    contents  =  base without the keys of rows that D takes away  +  rows that D brings

and only D is ever grouped. Where there is no such base, everything is D.

A reading is cut into `PartScan`s: one part each, with the times that count in it.
A slice says by itself whether its times must be looked at, so whole batches
are read without.
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
    """How to read the contents of a collection as of a time."""

    collection: CollectionState
    schema: SchemaVersion
    as_of: int
    base: tuple[PartScan, ...]
    """Distinct rows; empty if there is no base."""

    deltas: tuple[PartScan, ...]
    """All other updates up to `as_of`: what must be added up."""

    delta_rows: int
    """How many updates there are in `rest`, at most."""

    delta_memory: int
    """How many bytes they take as Arrow, at most."""

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that tell a row of the base from any other: its key, else all of it."""
        return self.schema.key or tuple(columns_of(self.schema).names)


@dataclass(frozen=True, slots=True)
class ChangesScan:
    """How to read the updates of a collection with times in `[lower, upper)`."""

    collection: CollectionState
    schema: SchemaVersion
    lower: int
    upper: int
    part_scans: tuple[PartScan, ...]


def scan_snapshot(collection: CollectionState, as_of: int) -> SnapshotScan:
    """The plan for the contents as of a time.

    Raises:
        SinceError: the time lies below since.
        NotYetComplete: it lies at or past upper.
        CollectionErrored: the collection is in error as of it.
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
    """The plan for the updates with times in `[lower, upper)`.

    Raises:
        SinceError: updates below since have been brought up to it, so an
            interval must begin past since, or at 0.
        NotYetComplete: the interval reaches past upper.
        CollectionErrored: the collection is in error somewhere on the way.
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
    """The best merge to begin from; one that holds nothing but its base comes first."""
    candidates = [
        batch
        for batch in collection.batches
        if batch.distinct and batch.lower == batch.since <= as_of and batch.until == END
    ]
    return max(
        candidates, key=lambda batch: (batch.upper == batch.since + 1, batch.rows), default=None
    )
